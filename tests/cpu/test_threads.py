"""The worker threads: their number, who works, Ctrl-C, fork, and callers that call at once."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import numpy as np
import pytest

import pagedkv
from pagedkv.cpu import threads

from ..support.interrupts import interrupts_at_every_instant

pytestmark = pytest.mark.usefixtures("restore_threads")
ALONE, SHARED, HANDED_OVER = 0, threads.ALONE_NS, threads.PATIENCE_NS  # estimates


@pytest.fixture(scope="module")
def decode():
    """A call that several threads share; it returns whether its result has the bits that the first one had."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 125, 16, 2, 64), np.float32)
    tables, seq_lens = rng.permutation(125).astype(np.int32)[None], np.array([2000], np.int32)
    q = rng.standard_normal((1, 8, 64), np.float32)
    expected = pagedkv.decode_attention(q, k, v, tables, seq_lens)
    return lambda: np.array_equal(pagedkv.decode_attention(q, k, v, tables, seq_lens), expected)


def wait_until(condition):
    """Whether it is true within half a minute."""
    deadline = time.monotonic() + 30
    while not (reached := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return reached


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        (0, ValueError, r"^n must be in 1\.\.1024, got 0$"),
        (1025, ValueError, "got 1025$"),
        (np.uint64(2**64 - 1), ValueError, "got 18446744073709551615$"),
        pytest.param(10**5000, ValueError, "got one of more than 80 digits$", id="huge"),
        (True, TypeError, "an int, got bool"),
        (2.0, TypeError, "an int, got float"),
    ],
)
def test_a_wrong_number_of_threads_is_refused(n, error, message):
    before = pagedkv.get_num_threads()
    with pytest.raises(error, match=message):
        pagedkv.set_num_threads(n)
    assert pagedkv.get_num_threads() == before


def test_the_number_of_threads_comes_from_the_environment(monkeypatch):
    monkeypatch.setattr(threads._state, "count", None)
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "7")
    assert pagedkv.get_num_threads() == 7


@pytest.mark.parametrize(
    ("num_items", "estimate", "num_workers", "caller_works"),
    [
        (5, ALONE, 0, True),
        (5, SHARED - 1, 0, True),
        (1, HANDED_OVER - 1, 0, True),
        (5, SHARED, 2, True),
        (5, HANDED_OVER, 3, False),  # it waits, so that Ctrl-C reaches it
        (1, HANDED_OVER, 1, False),
    ],
)
def test_the_estimate_says_who_works(num_items, estimate, num_workers, caller_works):
    together, done = threading.Barrier(num_workers + caller_works), []

    def kernel(counter, num_items):
        done.append((counter, num_items, threading.get_ident()))
        together.wait(30)

    pagedkv.set_num_threads(3)
    threads.run_items(kernel, num_items, (), estimate=estimate)
    counters, numbers, who = map(set, zip(*done, strict=True))
    assert len(counters) == 1
    assert numbers == {num_items}
    assert len(who - {threading.get_ident()}) == num_workers
    assert (threading.get_ident() in who) is caller_works


def test_a_caller_who_has_done_all_waits_for_no_helper_that_has_not_begun():
    pagedkv.set_num_threads(3)
    busy, go, done = threading.Semaphore(0), threading.Event(), []

    def keep_busy(*_):
        busy.release()
        go.wait(30)

    other = threading.Thread(target=lambda: threads.run_items(keep_busy, 3, (), estimate=HANDED_OVER))
    other.start()
    try:
        assert all(busy.acquire(timeout=30) for _ in range(3))
        for _ in range(9):
            threads.run_items(lambda *_: done.append(threading.get_ident()), 5, (), estimate=SHARED)
        assert done == [threading.get_ident()] * 9
        assert threads._state.pool().shares.qsize() <= 4  # what nobody comes to does not pile up
    finally:
        go.set()
        other.join()
    threads.run_items(lambda *_: None, 3, (), estimate=HANDED_OVER)  # the workers come to it behind all else
    assert len(done) == 9, "helpers work for callers who have gone"


@pytest.mark.parametrize("estimate", [SHARED, HANDED_OVER])
def test_a_call_that_is_interrupted_at_any_instant_ends_and_leaves_no_worker_missing(estimate):
    for interrupt in interrupts_at_every_instant(("pagedkv/cpu/threads",)):
        pagedkv.set_num_threads(3)

        def call(interrupt=interrupt):
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                threads.run_items(lambda counter, num_items: None, 4, (), estimate=estimate)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), f"the call waits for ever after an interrupt in {interrupt.came_at}"
        assert threads._state.pool().ready(3) == 3


@pytest.mark.parametrize("estimate", [SHARED, HANDED_OVER])
def test_an_exception_in_a_worker_reaches_the_caller(estimate):
    def kernel(counter, num_items):
        raise MemoryError("no scratch")

    pagedkv.set_num_threads(2)
    with pytest.raises(MemoryError, match="no scratch"):
        threads.run_items(kernel, 4, (), estimate=estimate)


def test_ctrl_c_stops_the_workers_at_their_next_item():
    items = []

    def kernel(counter, num_items):
        cell = ctypes.c_int64.from_address(counter)
        while cell.value < num_items:
            cell.value += 1
            items.append(cell.value)
            time.sleep(0.01)

    pagedkv.set_num_threads(2)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        threads.run_items(kernel, 1000, (), estimate=HANDED_OVER)
    count = len(items)
    assert 0 < count < 1000
    time.sleep(0.05)
    assert len(items) == count


def test_a_worker_whose_caller_does_not_wait_keeps_the_arrays_alive(monkeypatch):
    """As after a second Ctrl-C."""
    cache = np.zeros(8)
    alive = weakref.ref(cache)
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def kernel(counter, num_items):
        begun.set()
        go.wait(30)
        done.set()

    def interrupted(share):
        begun.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(threads._Share, "wait", interrupted)
    monkeypatch.setattr(threads._Share, "finish", interrupted)
    pagedkv.set_num_threads(1)
    with pytest.raises(KeyboardInterrupt):
        threads.run_items(kernel, 1, (), estimate=HANDED_OVER, owners=(cache,))
    del cache
    assert alive() is not None
    go.set()
    assert done.wait(30)


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_worker_keeps_no_arrays_alive(fails):
    def kernel(counter, num_items):
        if fails:
            raise MemoryError

    pagedkv.set_num_threads(1)
    cache = np.zeros(8)
    alive = weakref.ref(cache)
    with contextlib.suppress(MemoryError):
        threads.run_items(kernel, 1, (), estimate=HANDED_OVER, owners=(cache,))
    del cache

    def is_gone():
        if fails:
            gc.collect()  # an exception, its traceback and the frame that caught it refer to each other
        return alive() is None

    assert wait_until(is_gone)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_workers_of_its_own():
    pagedkv.set_num_threads(2)
    threads.run_items(lambda *_: None, 4, (), estimate=HANDED_OVER)
    if (child := os.fork()) == 0:
        signal.alarm(10)
        threads.run_items(lambda *_: None, 4, (), estimate=HANDED_OVER)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("num_possible", [0, 1])
def test_a_call_is_done_by_the_threads_that_can_be_started(monkeypatch, decode, num_possible):
    started, start_new_thread = [], threads.start_new_thread

    def start(*args):
        if len(started) == num_possible:
            raise RuntimeError("can't start new thread")
        started.append(start_new_thread(*args))

    pagedkv.set_num_threads(3)
    monkeypatch.setattr(threads, "start_new_thread", start)
    assert decode()
    assert len(started) == num_possible


def test_a_call_while_the_interpreter_ends_waits_for_no_worker(monkeypatch, decode):
    """Its daemon threads stop where they are; a destructor may still call."""
    monkeypatch.setattr(threads.sys, "is_finalizing", lambda: True)
    monkeypatch.setattr(threads, "_Share", None)
    assert decode()


def test_workers_end_when_another_number_is_set(decode):
    before = None
    for n in (1, 4, 2, 3, 1):
        pagedkv.set_num_threads(n)
        assert decode()
        before = before or len(sys._current_frames())
    assert wait_until(lambda: len(sys._current_frames()) <= before)


def test_callers_in_many_threads_get_the_bits_of_one_whatever_number_is_set(decode):
    done = threading.Event()

    def resize():
        for n in cycle((1, 4, 2, 3)):
            pagedkv.set_num_threads(n)
            if done.is_set():
                return

    with ThreadPoolExecutor(4) as executor:
        executor.submit(resize)
        try:
            assert all(executor.map(lambda _: decode(), range(60)))
        finally:
            done.set()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no timer of signals")
def test_a_signal_handler_may_call_in_the_middle_of_a_call(decode):
    same = []
    before = signal.signal(signal.SIGALRM, lambda *_: same.append(decode()))
    try:
        for delay in np.random.default_rng(0).uniform(1e-6, 4e-4, 60):
            pagedkv.set_num_threads(2)  # so that workers are started when the signal comes
            signal.setitimer(signal.ITIMER_REAL, delay)
            same.append(decode())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(same) > 60
    assert all(same)
