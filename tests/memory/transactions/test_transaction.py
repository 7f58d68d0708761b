"""Whatever goes wrong in the middle of a mutation, all of it has happened or nothing: no memory, no blocks, Ctrl-C."""

import copy
import itertools
import pickle
import tracemalloc
from operator import setitem

import numpy as np
import pytest

from pagedkv import commit
from pagedkv.errors import OutOfBlocksError
from pagedkv.memory import BlockPool, SequenceTable

from ...support.programs import printed_by
from ..manager import fails_after, interrupted_at
from .scene import MUTATIONS, Scene

ALLOCATING = [
    "pool.allocate",
    "add",
    "append 1",
    "append n",
    "add, found",
    "append, tokens",
]


@pytest.fixture(params=MUTATIONS)
def mutate(request):
    return MUTATIONS[request.param]


def after(mutate) -> tuple:
    scene = Scene()
    mutate(scene)
    return scene.everything()


def test_every_mutation_changes_something(mutate):
    assert after(mutate) != Scene().everything()


def test_an_interrupt_at_any_place_comes_before_the_change_or_after(mutate):
    before, changed = Scene().everything(), after(mutate)
    outcomes = []
    for place in itertools.count(1):
        scene = Scene()
        try:
            with interrupted_at(place) as ran:
                mutate(scene)
        except KeyboardInterrupt:
            now = scene.everything()
            assert now in (before, changed), f"half changed at place {place}"
            outcomes.append(now == changed)
            assert not scene.cache.pool._guard.lock.locked()
            scene.cache.free([])
            scene.listener_agrees()
        else:
            assert ran[0] == place - 1
            break
    assert len(outcomes) > 5
    assert not outcomes[0]
    assert outcomes == sorted(outcomes)


@pytest.mark.parametrize("name", ALLOCATING)
def test_a_failed_allocation_changes_nothing(name, monkeypatch):
    before = Scene().everything()
    for calls in itertools.count():
        scene = Scene()
        try:
            with monkeypatch.context() as patch:
                failing = fails_after(calls, BlockPool._plan, OutOfBlocksError("injected"))
                patch.setattr(BlockPool, "_plan", failing)
                MUTATIONS[name](scene)
        except OutOfBlocksError:
            assert scene.everything() == before
            assert not scene.cache.pool._guard.lock.locked()
        else:
            break
    assert calls > 0


@pytest.mark.parametrize("name", ALLOCATING)
def test_real_exhaustion_at_every_number_of_free_blocks(name):
    refusals = 0
    for taken in range(9):
        scene = Scene()
        scene.cache.pool.allocate(taken)
        before = scene.everything()
        try:
            MUTATIONS[name](scene)
        except OutOfBlocksError:
            assert scene.everything() == before
            scene.cache.pool.check()
            refusals += 1
        else:
            assert refusals == 0
    assert refusals > 0


def test_failed_copies_change_nothing(monkeypatch):
    """No memory for the copies of V, after those of K."""

    class Full(np.ndarray):
        def __setitem__(self, index, value):
            raise MemoryError("injected")

    scene = Scene()
    k_stack, v_stack = scene.cache._stacks.both
    scene.cache._stacks.both = (k_stack, v_stack.view(Full))
    before = scene.everything()
    with pytest.raises(MemoryError, match="injected"):
        scene.cache.append([scene.other, scene.seq])
    assert scene.everything() == before
    scene.cache.check()


def test_whichever_allocations_fail_nothing_has_changed():
    pytest.importorskip("_testcapi")  # with which CPython tests itself; some distributions leave it out
    lines = [line.rsplit(maxsplit=2) for line in printed_by("memory.transactions.failed_allocations")]
    assert [name for name, *_ in lines] == [*MUTATIONS, "batch"]
    assert all(int(number) > 20 for _, *numbers in lines for number in numbers)


def test_no_store_allocates(mutate, monkeypatch):
    """Every store has a form for which NumPy neither converts nor allocates: see `commit.Write`."""
    stored = []

    def checked(array, index, value):
        if isinstance(array, (list, dict)):
            assert (len(array), index) == (1, 0) if isinstance(array, list) else index in array
            setitem(array, index, value)
            return
        assert array.ndim == 1
        assert array.flags.c_contiguous
        if type(index) is int:
            assert (array.dtype, type(value)) == (np.int64, int)
            assert 0 <= index < len(array)
        else:
            assert index.dtype == np.int64
            assert value.dtype == array.dtype
            assert index.shape == value.shape == (len(index),)
            assert index.flags.c_contiguous
            assert value.flags.c_contiguous
        setitem(array, index, value)
        stored.append(array)

    monkeypatch.setattr(commit, "setitem", checked)
    mutate(Scene())
    assert stored


def test_stores_of_many_blocks_allocate_nothing(monkeypatch):
    peaks = []

    def traced(array, index, value):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        setitem(array, index, value)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)

    monkeypatch.setattr(commit, "setitem", traced)
    table = SequenceTable(BlockPool(30_000), block_size=1, max_seqs=4, max_blocks=20_000)
    tracemalloc.start()
    try:
        seq = table.add(10_000)
        table.append(seq, 10_000)
        [fork] = table.fork(seq)
        table.truncate([seq, fork], 3)
        table.append(fork, 9_000)
        table.free([fork, seq])
    finally:
        tracemalloc.stop()
    assert len(peaks) > 20
    assert max(peaks) < 1_000, "bytes"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(duplicate):
    cache = Scene().cache
    for owner in (cache, SequenceTable(cache.pool, 4, 1, 1), cache.pool):
        with pytest.raises(TypeError, match=rf"^a {type(owner).__name__} cannot be copied or pickled, .* make a new"):
            duplicate(owner)
