"""Calls in the middle of another call: from a second thread, a signal handler or a forked child."""

import copy
import os
import pickle
import signal
import sys
import threading
from contextlib import contextmanager
from itertools import count

import pytest

from pagedkv import commit
from pagedkv.memory import BlockPool, SequenceTable, Stats

from .transactions.scene import MUTATIONS, READS, Scene


@contextmanager
def stopped_in(monkeypatch, owner, name, call, *, before=0):
    """Within the block a thread that makes a call stands before one of its calls of owner.name."""
    function, numbers = getattr(owner, name), count()
    inside, finish = threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        if next(numbers) == before:
            inside.set()
            assert finish.wait(10)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert inside.wait(10)
        yield
    finally:
        finish.set()
        thread.join()


def append(scene):
    scene.cache.append([scene.other, scene.forks[1]])


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_refused_in_the_middle_of_one_of_another_thread(name, monkeypatch):
    scene, mutate = Scene(), MUTATIONS[name]
    before = scene.everything()
    with stopped_in(monkeypatch, BlockPool, "_plan", lambda: append(scene)):
        with pytest.raises(RuntimeError, match=r"called in the middle of another mutation of the same pool$"):
            mutate(scene)
        assert scene.everything() == before
    assert scene.cache.seq_lens([scene.other, scene.forks[1]]).tolist() == [9, 7]
    mutate(scene)


@pytest.mark.parametrize("name", READS)
def test_a_read_waits_for_the_mutation_of_another_thread(name, monkeypatch):
    scene, changed, found = Scene(), Scene(), []
    append(changed)
    with stopped_in(monkeypatch, commit, "setitem", lambda: append(scene), before=1):
        reader = threading.Thread(target=lambda: found.append(READS[name](scene)))
        reader.start()
        reader.join(0.01)  # time to read what is half stored
    reader.join()
    assert found == [READS[name](changed)]


def test_a_mutation_waits_for_the_read_of_another_thread(monkeypatch):
    scene = Scene()
    before = scene.everything()
    with stopped_in(monkeypatch, Stats, "of", scene.cache.stats):
        writer = threading.Thread(target=append, args=(scene,))
        writer.start()
        writer.join(0.02)
        assert scene.everything() == before
    writer.join()
    assert scene.everything() != before


@pytest.mark.parametrize("name", READS)
def test_a_signal_handler_reads_the_state_before_the_mutation(name, monkeypatch):
    """Waiting would be a deadlock."""
    scene, before, found = Scene(), READS[name](Scene()), []
    plan = BlockPool._plan

    def handle(*args, **options):
        found.append(READS[name](scene))
        return plan(*args, **options)

    monkeypatch.setattr(BlockPool, "_plan", handle)
    append(scene)
    assert found == [before]


def test_a_signal_handler_changes_nothing_in_the_middle_of_a_read(monkeypatch):
    scene = Scene()
    before = scene.everything()

    def handle(*_):
        with pytest.raises(RuntimeError, match=r"^append called in the middle of another call of the same pool$"):
            append(scene)

    monkeypatch.setattr(Stats, "of", handle)
    scene.cache.stats()
    assert scene.everything() == before
    append(scene)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_makes_a_new_pool():
    """Another thread may have been in the middle of a call: neither its lock nor what it has stored is of any use."""
    scene = Scene()
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        try:
            for call in (scene.cache.stats, lambda: append(scene), scene.cache.pool.check):
                with pytest.raises(RuntimeError, match=r"called in a child .*: make a new pool in the child$"):
                    call()
            append(Scene())
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    append(scene)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(duplicate):
    cache = Scene().cache
    for owner in (cache, SequenceTable(cache.pool, 4, 1, 1), cache.pool):
        with pytest.raises(TypeError, match=rf"^a {type(owner).__name__} cannot be copied or pickled, .* make a new"):
            duplicate(owner)
