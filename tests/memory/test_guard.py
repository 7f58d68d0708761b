"""Threads, and signal handlers: what is refused in the middle of a mutation, and what waits for its end."""

import os
import signal
import sys
import threading
from contextlib import contextmanager
from operator import setitem

import pytest

from pagedkv import PagedKVCache, commit
from pagedkv.memory import BlockPool, Stats

from .transactions.scene import LATE, MUTATIONS, Scene


@pytest.fixture(params=MUTATIONS)
def mutate(request):
    return MUTATIONS[request.param]


@contextmanager
def in_another_thread(monkeypatch, owner, name, call):
    """Enters when a thread that makes the call is about to call owner.name; then it waits for the block."""
    inside, finish = threading.Event(), threading.Event()
    function = getattr(owner, name)

    def slow(*args, **kwargs):
        inside.set()
        assert finish.wait(10)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert inside.wait(10)
        monkeypatch.setattr(owner, name, function)
        yield finish
    finally:
        finish.set()
        thread.join()


@pytest.mark.parametrize("name", ["allocate", "store"])
def test_a_second_thread_in_the_middle_of_a_mutation_is_refused(mutate, name, monkeypatch):
    scene = Scene()
    place = (BlockPool, "_plan") if name == "allocate" else (commit, "setitem")
    with in_another_thread(monkeypatch, *place, lambda: scene.cache.append([scene.other, scene.forks[1]])):
        before = scene.everything()
        with pytest.raises(RuntimeError, match=r"called in the middle of another mutation of the same pool$"):
            mutate(scene)
        assert scene.everything() == before
    assert scene.cache.batch([scene.other, scene.forks[1]]).seq_lens.tolist() == [9, 7]
    scene.cache.check()
    mutate(scene)


READS = {
    "batch": lambda s: [array.tolist() for array in vars_of(s.cache.batch([s.seq, s.other]))],
    "stats": lambda s: s.cache.stats(),
    "plot": lambda s: s.cache.plot(),
    "check": lambda s: s.cache.check(),
    "pool.check": lambda s: s.cache.pool.check(),
    "html": lambda s: s.cache._repr_html_(),
    "slots": lambda s: s.cache.slots(s.other, 0, 8).tolist(),
    "seq_lens": lambda s: s.cache.seq_lens([s.seq, s.other]).tolist(),
    "block_tables": lambda s: s.cache.block_tables([s.seq, s.other]).tolist(),
    "num_tokens": lambda s: s.cache.num_tokens,
    "find": lambda s: s.cache.find(LATE),
    "can_add": lambda s: s.cache.can_add(20),
    "block_fills": lambda s: s.cache.block_fills().tolist(),
    "block_owners": lambda s: s.cache.block_owners().tolist(),
}


def vars_of(batch):
    return batch.block_tables, batch.seq_lens


def test_reads_of_other_threads_see_all_of_a_change_that_is_half_stored(monkeypatch):
    """One thread stops before its second store; the reads of the others come back when it is done."""
    scene, changed = Scene(), Scene()
    seqs = [scene.seq, scene.other]
    changed.cache.append(seqs, [2, 5])
    found = {}

    def read(name):
        try:
            found[name] = READS[name](scene)
        except BaseException as error:
            found[name] = error

    stores = iter(range(1000))
    half, finish = threading.Event(), threading.Event()

    def slow(array, index, value):
        if next(stores) == 1:
            half.set()
            assert finish.wait(10)
        setitem(array, index, value)

    monkeypatch.setattr(commit, "setitem", slow)
    writer = threading.Thread(target=scene.cache.append, args=(seqs, [2, 5]))
    writer.start()
    assert half.wait(10)
    readers = [threading.Thread(target=read, args=(name,)) for name in READS]
    for thread in readers:
        thread.start()
    readers[0].join(0.2)  # time to read what is not there yet
    finish.set()
    for thread in (writer, *readers):
        thread.join()
    assert found == {name: READS[name](changed) for name in READS}


@pytest.mark.parametrize("name", READS)
def test_a_read_in_the_middle_of_a_mutation_of_its_own_thread(name, monkeypatch):
    """A signal handler that looks at the cache sees what was before the mutation, and does not wait for it."""
    scene, before = Scene(), READS[name](Scene())
    allocate, found = BlockPool._plan, []

    def handler(pool, *args, **kwargs):
        found.append(READS[name](scene))
        return allocate(pool, *args, **kwargs)

    monkeypatch.setattr(BlockPool, "_plan", handler)
    scene.cache.append(scene.seq)
    assert found == [before]
    scene.cache.free(scene.seq)
    scene.cache.check()


def test_a_mutation_waits_for_the_read_of_another_thread(mutate, monkeypatch):
    scene, changed = Scene(), Scene()
    mutate(changed)
    with in_another_thread(monkeypatch, Stats, "of", scene.cache.stats):
        waiting = threading.Thread(target=mutate, args=(scene,))
        before = scene.everything()
        waiting.start()
        waiting.join(0.02)
        assert scene.everything() == before
    waiting.join()
    assert scene.everything() == changed.everything()


def test_a_mutation_in_the_middle_of_a_read_of_its_own_thread_is_refused(mutate, monkeypatch):
    scene = Scene()
    before = scene.everything()

    def handler(*_):
        with pytest.raises(RuntimeError, match=r"called in the middle of another call of the same pool$"):
            mutate(scene)

    monkeypatch.setattr(Stats, "of", handler)
    scene.cache.stats()
    assert scene.everything() == before
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
                seq = insist(cache.add, [1, 2, 3, 4, 5]).seq
                seqs = [seq, *insist(cache.fork, seq, 2)]
                insist(cache.append, seqs, 1, [6, 7, 8])
                insist(cache.commit, seqs)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_makes_a_new_pool():
    """Another thread may have been in the middle of a call: neither its lock nor what it has stored is of any use."""
    scene = Scene()
    before = scene.everything()
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        try:
            for call in (scene.cache.stats, lambda: scene.cache.append(scene.seq), scene.cache.pool.check):
                with pytest.raises(RuntimeError, match=r"called in a child .*: make a new pool in the child$"):
                    call()
            assert Scene().everything() == before
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    scene.cache.append(scene.seq)
