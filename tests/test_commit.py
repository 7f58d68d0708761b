"""All of a call is stored or nothing, whatever raises, and a commit cannot stop in the middle."""

import signal
import time
from contextlib import suppress

import numpy as np
import pytest

from pagedkv.commit import commit

from .support.interrupts import interrupts_at_every_instant
from .support.operations import OPERATIONS

MOST_ALLOCATIONS = 40  # of a commit


def values(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", [name for name, make in OPERATIONS.items() if make(values).written])
def test_an_interrupted_operation_has_written_everything_or_nothing(name):
    operation = OPERATIONS[name](values)
    initial, before = [x.copy() for x in operation.written], operation.contents()
    operation.call()
    after, outcomes = operation.contents(), []
    for interrupt in interrupts_at_every_instant(("pagedkv/cpu", "pagedkv/commit")):
        for x, content in zip(operation.written, initial, strict=True):
            x[...] = content
        with suppress(KeyboardInterrupt), interrupt:
            operation.call()
        outcomes.append(operation.contents())
        assert outcomes[-1] in (before, after), f"half written after an interrupt in {interrupt.came_at}"
    assert outcomes[0] == before
    assert outcomes[-1] == after


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no timer of signals")
def test_an_interrupt_in_the_middle_of_a_commit_comes_after_the_last_write():
    """The first write takes some milliseconds, and the signal comes in the first of them."""
    value = np.ones(2**23, np.uint32)
    arrays = np.zeros((2, value.size), np.uint32)
    before, num_complete = signal.signal(signal.SIGALRM, signal.default_int_handler), 0

    def interrupted_commit():
        signal.setitimer(signal.ITIMER_REAL, 1e-3)
        commit([(x, ..., value) for x in arrays])
        time.sleep(10)

    for _ in range(3):
        arrays[...] = 0
        with pytest.raises(KeyboardInterrupt):
            interrupted_commit()
        num_complete += int(arrays[0, -1])
        assert arrays[0, -1] == arrays[1, -1] == arrays[0, 0]
    signal.signal(signal.SIGALRM, before)
    assert num_complete


@pytest.mark.parametrize("gaps", [False, True])
def test_a_commit_of_whole_blocks_without_memory_stores_all_or_nothing(gaps):
    testcapi = pytest.importorskip("_testcapi", reason="this Python cannot make an allocation fail")
    caches = np.zeros((3, 5, 16, 4, 8), np.uint16)[:, :, :, : 2 if gaps else 4]
    block = np.ones(caches.shape[2:], caches.dtype)
    writes = [(cache[at], ..., block) for cache in caches for at in (0, 3)]
    num_failures = 0
    for number in range(MOST_ALLOCATIONS):
        caches[...] = 0
        failed = False
        testcapi.set_nomemory(number, number + 1)
        try:
            commit(writes)
        except MemoryError:
            failed = True
        finally:
            testcapi.remove_mem_hooks()
        num_failures += failed
        assert [bool(cache[at].all()) for cache in caches for at in (0, 3)] == [not failed] * len(writes)
        assert failed == (not caches.any())
    assert 0 < num_failures < MOST_ALLOCATIONS
