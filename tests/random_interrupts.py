"""Ctrl-C at random times: `python -m tests.random_interrupts NUMBER [SEED]`.

A timer's signal raises KeyboardInterrupt in the middle of an operation or of a mutation of the memory manager, until
that has happened NUMBER times. What a call writes must then be as before or as after it, nothing else may be raised,
and calls go on giving the same bits.
"""

import faulthandler
import sys
import threading
import time

import numpy as np

import pagedkv

from .memory.transactions.scene import MUTATIONS, Scene
from .support.interrupts import Alarm
from .support.operations import OPERATIONS

SECONDS_OF_A_HANG = 60
MOST_THREADS = 8  # those of calls, and those of pools that are ending


class Case:
    """A call, what it changes as bytes, before and after it, and how long it takes."""

    def __init__(self):
        self.reset()
        self.before = self.contents()
        start = time.perf_counter()
        self.call()
        self.seconds = time.perf_counter() - start
        self.after = self.contents()


class OperationCase(Case):
    def __init__(self, operation):
        self.initial = [x.copy() for x in operation.written]
        self.call, self.contents = operation.call, operation.contents
        self.reset = lambda: operation.restore(self.initial)
        super().__init__()


class MutationCase(Case):
    def __init__(self, mutate):
        self.call = lambda: mutate(self.scene)
        super().__init__()

    def reset(self):
        self.scene = Scene()

    def contents(self):
        self.scene.cache.free([])  # no lock is left taken
        return self.scene.everything()


def main(number, seed=0):
    faulthandler.enable()
    lost = []
    threading.excepthook = lost.append
    # An interrupt in the middle of a WeakSet's own callback is lost to Python.
    sys.unraisablehook = lambda x: lost.append(x) if getattr(x.object, "__module__", "") != "_weakrefset" else None
    rng, alarm = np.random.default_rng(seed), Alarm()

    def values(*shape):
        return rng.standard_normal(shape, np.float32)

    pagedkv.set_num_threads(2)
    operations = [make(values) for make in OPERATIONS.values()]
    results = [operation.result() for operation in operations]
    cases = [*map(OperationCase, operations), *map(MutationCase, MUTATIONS.values())]
    num_interrupts = num_after = 0
    while num_interrupts < number:
        faulthandler.dump_traceback_later(SECONDS_OF_A_HANG, exit=True)
        case = cases[rng.integers(len(cases))]
        case.reset()
        if rng.random() < 0.05:
            pagedkv.set_num_threads(int(rng.integers(1, 5)))
        start = time.perf_counter()
        try:
            alarm.arm(max(1e-6, rng.uniform(0, 1.3) * case.seconds))
            case.call()
            alarm.disarm()
        except KeyboardInterrupt:
            num_interrupts += 1
            num_after += case.contents() == case.after
            assert case.contents() in (case.before, case.after), f"interrupt {num_interrupts} left something half done"
        else:
            case.seconds = time.perf_counter() - start
            assert case.contents() == case.after
        assert not lost, lost
    for case in cases:
        case.reset()
    assert [operation.result() for operation in operations] == results
    assert len(sys._current_frames()) <= MOST_THREADS, "threads are left over"
    print(f"{num_interrupts} interrupts, {num_after} of them after the writes")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
