"""Whatever goes wrong in the middle of a mutation, all of it has happened or nothing: failed allocations, Ctrl-C,
other threads."""

import itertools
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import OutOfBlocksError
from pagedkv.memory import BlockPool, PagedKVCache
from pagedkv.memory.transaction import Tally

from .manager import fails_after, interrupted_at, state


class Scene:
    """A cache in which the forks share a partial block, and one sequence is about to fill up its own."""

    def __init__(self) -> None:
        self.cache = PagedKVCache(2, 12, 4, 1, 8, max_seqs=6, max_seq_len=20)
        self.cache.k_caches[0][:] = np.arange(12)[:, None, None, None]
        self.seq = self.cache.add(6).seq
        self.forks = self.cache.fork(self.seq, 2)
        self.other = self.cache.add(8).seq
        self.cache.free(self.cache.add(1).seq)

    def contents(self) -> bytes:
        """K of all blocks in use; what is in the free ones does not matter."""
        return np.stack(self.cache.k_caches)[:, self.cache.pool.ref_counts > 0].tobytes()

    def everything(self) -> tuple:
        arrays = state(self.cache)
        del arrays["k_caches"], arrays["v_caches"]
        return arrays, self.contents()


MUTATIONS = {
    "pool.allocate": lambda s: s.cache.pool.allocate(2),
    "pool.retain": lambda s: s.cache.pool.retain([0, 1, 1]),
    "pool.release": lambda s: s.cache.pool.release([0, 2, 1, 0]),
    "table.append": lambda s: s.cache.table.append([s.other, s.forks[0], s.seq], [3, 1, 0]),
    "add": lambda s: s.cache.add(7),
    "append 1": lambda s: s.cache.append([s.other, s.forks[0], s.seq]),
    "append n": lambda s: s.cache.append([s.other, s.seq, s.forks[0]], [0, 9, 1]),
    "fork": lambda s: s.cache.fork(s.seq, 2),
    "truncate": lambda s: s.cache.truncate([s.other, s.seq], [3, 4]),
    "free": lambda s: s.cache.free([s.seq, s.other]),
}
ALLOCATING = ["pool.allocate", "table.append", "add", "append 1", "append n"]


@pytest.fixture(params=MUTATIONS)
def mutate(request):
    return MUTATIONS[request.param]


def after(mutate) -> tuple:
    scene = Scene()
    mutate(scene)
    return scene.everything()


def test_every_mutation_changes_something(mutate):
    assert after(mutate) != Scene().everything()


def test_an_interrupt_at_any_line_comes_before_the_change_or_after(mutate):
    before, changed = Scene().everything(), after(mutate)
    outcomes = []
    for line in itertools.count(1):
        scene = Scene()
        try:
            with interrupted_at(line) as ran:
                mutate(scene)
        except KeyboardInterrupt:
            now = scene.everything()
            assert now in (before, changed), f"half changed at line event {line}"
            outcomes.append(now == changed)
            assert not scene.cache.pool._lock.locked()
            scene.cache.free([])
        else:
            assert ran[0] == line - 1
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
                failing = fails_after(calls, BlockPool._plan_allocate, OutOfBlocksError("injected"))
                patch.setattr(BlockPool, "_plan_allocate", failing)
                MUTATIONS[name](scene)
        except OutOfBlocksError:
            assert scene.everything() == before
            assert not scene.cache.pool._lock.locked()
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
    """No memory for the copies of the second layer."""

    class Full(np.ndarray):
        def __setitem__(self, index, value):
            raise MemoryError("injected")

    scene = Scene()
    first, second = scene.cache.k_caches
    scene.cache.k_caches = (first, second.view(Full))
    before = scene.everything()
    with pytest.raises(MemoryError, match="injected"):
        scene.cache.append([scene.other, scene.seq])
    assert scene.everything() == before
    scene.cache.check()


def test_a_second_thread_in_the_middle_of_a_mutation_is_refused(mutate, monkeypatch):
    scene = Scene()
    inside, finish = threading.Event(), threading.Event()
    allocate = BlockPool._plan_allocate

    def slow(pool, n):
        inside.set()
        assert finish.wait(10)
        return allocate(pool, n)

    monkeypatch.setattr(BlockPool, "_plan_allocate", slow)
    thread = threading.Thread(target=scene.cache.append, args=([scene.other, scene.forks[1]],))
    thread.start()
    try:
        assert inside.wait(10)
        before = scene.everything()
        with pytest.raises(RuntimeError, match=r"called in the middle of another mutation of the same pool$"):
            mutate(scene)
        assert scene.everything() == before
        assert scene.cache.batch([scene.seq]).seq_lens.tolist() == [6]
    finally:
        finish.set()
        thread.join()
    assert scene.cache.batch([scene.other, scene.forks[1]]).seq_lens.tolist() == [9, 7]
    scene.cache.check()
    mutate(scene)


def test_threads_that_try_again_when_refused():
    cache = PagedKVCache(1, 64, 4, 1, 8, max_seqs=32, max_seq_len=16)
    refusals, errors = [], []

    def insist(call, *args):
        while True:
            try:
                return call(*args)
            except RuntimeError:
                refusals.append(call)

    def work():
        try:
            for _ in range(60):
                seq = insist(cache.add, 5).seq
                seqs = [seq, *insist(cache.fork, seq, 2)]
                insist(cache.append, seqs)
                insist(cache.truncate, seqs, 2)
                insist(cache.append, seqs, [3, 0, 1])
                assert cache.batch(seqs).seq_lens.tolist() == [5, 2, 3]
                insist(cache.free, seqs)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert refusals
    cache.check()
    assert cache.pool.num_free == 64


@given(st.lists(st.integers(0, 6), max_size=12), st.lists(st.integers(0, 6), max_size=12))
def test_tally(first, second):
    tally = Tally(7)
    for values in (first, second):
        last, counts = tally(np.array(values, np.int64))
        assert [values[place] for place in last] == values
        for value in set(values):
            assert {int(place) for place, other in zip(last, values, strict=True) if other == value} == {
                len(values) - 1 - values[::-1].index(value)
            }
        assert [counts[place] for place in last] == [values.count(value) for value in values]
        assert counts.sum() == len(values)
        repeated = tally.repeated(np.array(values, np.int64))
        assert repeated.tolist() == [value in values[place + 1 :] for place, value in enumerate(values)]
