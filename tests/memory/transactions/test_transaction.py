"""A Ctrl-C or a MemoryError in the middle of a mutation leaves all of it or nothing."""

import sys
from contextlib import suppress
from operator import setitem

import numpy as np
import pytest

from pagedkv import commit

from ...support.interrupts import interrupts_at_every_instant
from ...support.programs import printed_by
from .scene import MUTATIONS, OF_WINDOWS, WINDOWS, Scene, states_of


@pytest.fixture(params=MUTATIONS)
def mutate(request):
    return MUTATIONS[request.param]


CASES = {name: (mutate, None) for name, mutate in MUTATIONS.items()}
CASES |= {f"{name}, windows": (MUTATIONS[name], WINDOWS) for name in OF_WINDOWS}


@pytest.mark.parametrize(("mutate", "windows"), CASES.values(), ids=CASES)
def test_an_interrupted_mutation_has_changed_everything_or_nothing(mutate, windows):
    """With windows, it has changed all of its first steps: blocks that a window has passed are released in one."""
    outcomes = []
    states = states_of(mutate, windows)
    assert windows or len(states) == 2
    for interrupt in interrupts_at_every_instant():
        scene = Scene(windows)
        with suppress(KeyboardInterrupt), interrupt:
            mutate(scene)
        now = scene.everything()
        assert now in states, f"half changed after an interrupt in {interrupt.came_at}"
        outcomes.append(states.index(now))
        scene.cache.free([])  # the lock is free, and the pending events come
        scene.assert_events_match()
    assert outcomes == sorted(outcomes)
    assert states[outcomes[0]] == states[0]
    assert states[outcomes[-1]] == states[-1]


@pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0), reason="CPython 3.13.0 crashes where it has no memory to make a closure"
)
def test_a_mutation_without_memory_changes_nothing():
    pytest.importorskip("_testcapi")  # with which CPython tests itself; some distributions leave it out
    lines = [line.rsplit(maxsplit=2) for line in printed_by("memory.transactions.failed_allocations")]
    assert [name for name, *_ in lines] == [*MUTATIONS, *OF_WINDOWS]
    assert all(int(number) > 20 for _, *numbers in lines for number in numbers)


def test_stores_need_no_memory(mutate, monkeypatch):
    """Every store has a form for which NumPy neither converts nor allocates: see `commit.Write`."""
    stored = []

    def checked(array, index, value):
        if isinstance(array, np.ndarray):
            assert array.ndim == 1
            assert array.flags.c_contiguous
            if type(index) is int:
                assert (array.dtype, type(value)) == (np.int64, int)
                assert 0 <= index < len(array)
            else:
                assert (index.dtype, value.dtype) == (np.int64, array.dtype)
                assert index.shape == value.shape == (len(index),)
                assert index.flags.c_contiguous
                assert value.flags.c_contiguous
        else:
            assert (len(array), index) == (1, 0) if isinstance(array, list) else index in array
        setitem(array, index, value)
        stored.append(array)

    monkeypatch.setattr(commit, "setitem", checked)
    mutate(Scene())
    assert stored
