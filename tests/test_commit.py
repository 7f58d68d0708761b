"""Nothing is stored before the commit of an operation, and a commit cannot stop in the middle."""

import signal
import time

import numpy as np
import pytest

import pagedkv
from pagedkv.commit import commit
from pagedkv.cpu import blocks, rotary
from pagedkv.cpu.attention import plan

from .promises.interrupted import operations
from .support.alarm import Alarm

MOST_ALLOCATIONS = 40  # of a commit


def operations_that_write():
    pagedkv.set_num_threads(2)
    return [operation for operation in operations(np.random.default_rng(0)) if operation.written]


def test_nothing_is_stored_before_the_commit(monkeypatch):
    before = pagedkv.get_num_threads()
    todo = operations_that_write()
    pagedkv.set_num_threads(before)
    num_commits = 0

    def fail(writes):
        nonlocal num_commits
        num_commits += 1
        raise MemoryError

    for module in (blocks, plan, rotary):
        monkeypatch.setattr(module, "commit", fail)
    for operation in todo:
        with pytest.raises(MemoryError):
            operation.call()
        assert operation.is_untouched()
    assert num_commits == len(todo) == 9


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no timer of signals")
def test_an_interrupt_in_the_middle_of_a_write_comes_after_the_last():
    """The first write takes some milliseconds, and the signal comes in the first of them."""
    value = np.ones(2**23, np.uint32)
    arrays = np.zeros((2, value.size), np.uint32)
    before, num_complete = signal.getsignal(signal.SIGALRM), 0
    alarm = Alarm()

    def interrupted_commit():
        alarm.arm(1e-3)
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
def test_a_commit_of_whole_blocks_is_all_or_nothing_whichever_allocation_fails(gaps):
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
