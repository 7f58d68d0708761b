"""The worker threads: their number, Ctrl-C, fork and callers that call at once."""

import contextlib
import ctypes
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pagedkv
from pagedkv.cpu import threads

from ..memory.manager import interrupted_at

pytestmark = pytest.mark.usefixtures("restore_threads")


def _problem(length=2000):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, -(-length // 16), 16, 2, 64), np.float32)
    tables = rng.permutation(len(k)).astype(np.int32)[None]
    return rng.standard_normal((1, 8, 64), np.float32), k, v, tables, np.array([length], np.int32)


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        (0, ValueError, r"^n must be in 1\.\.1024, got 0$"),
        (-3, ValueError, "got -3$"),
        (1025, ValueError, "got 1025$"),
        (np.int8(-128), ValueError, "got -128$"),
        (np.uint64(2**64 - 1), ValueError, "got 18446744073709551615$"),
        pytest.param(10**5000, ValueError, "got one of more than 80 digits$", id="huge"),
        (True, TypeError, "an int, got bool"),
        (2.0, TypeError, "an int, got float"),
    ],
)
def test_set_num_threads_refuses(n, error, message):
    before = pagedkv.get_num_threads()
    with pytest.raises(error, match=message):
        pagedkv.set_num_threads(n)
    assert pagedkv.get_num_threads() == before


def test_number_of_threads_comes_from_the_environment():
    program = "import pagedkv; print(pagedkv.get_num_threads())"

    def run(value):
        environment = {**os.environ, "PAGEDKV_NUM_THREADS": value}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    assert run("7").stdout.strip() == "7"
    assert "PAGEDKV_NUM_THREADS must be an integer in 1..1024, got '0'" in run("0").stderr


ALONE, SHARED, HANDED_OVER = 0, threads.ALONE_NS, threads.PATIENCE_NS  # estimates


def noting(done):
    """A kernel that notes its counter and its thread, and waits until every thread of three has come."""
    together = threading.Barrier(3)

    def kernel(counter, num_items):
        done.append((counter, num_items, threading.get_ident()))
        together.wait(30)

    return kernel


@pytest.mark.parametrize(("estimate", "caller_works"), [(SHARED, True), (HANDED_OVER, False)])
def test_a_call_is_shared_by_as_many_threads_as_are_set(estimate, caller_works):
    done = []
    pagedkv.set_num_threads(3)
    threads.run(noting(done), 5, (), estimate=estimate)
    assert len({counter for counter, _, _ in done}) == 1
    assert {num_items for _, num_items, _ in done} == {5}
    who = {thread for _, _, thread in done}
    assert len(who) == 3
    assert (threading.get_ident() in who) is caller_works


@pytest.mark.parametrize(("num_items", "estimate"), [(5, ALONE), (5, SHARED - 1), (1, HANDED_OVER - 1)])
def test_a_short_call_is_the_callers_alone(num_items, estimate):
    done = []
    pagedkv.set_num_threads(3)
    threads.run(lambda *_: done.append(threading.get_ident()), num_items, (), estimate=estimate)
    assert done == [threading.get_ident()]


def stopped(pool):
    """Keep the workers of a pool from work until the event that comes back is set."""
    go = threading.Event()
    for _ in range(pool.ready(pool.size)):
        share = threads._Share(lambda: go.wait(30))
        pool.shares.put(share)
        while not share._turn.locked():
            time.sleep(0.001)
    return go


def test_a_caller_who_has_done_all_waits_for_no_helper_that_has_not_begun():
    pagedkv.set_num_threads(3)
    pool = threads._state.pool()
    go, done = stopped(pool), []
    try:
        for _ in range(9):
            threads.run(lambda *_: done.append(threading.get_ident()), 5, (), estimate=SHARED)
        assert done == [threading.get_ident()] * 9
        assert pool.shares.qsize() <= pool.size + 1  # what nobody comes to does not pile up
    finally:
        go.set()


@pytest.mark.parametrize("estimate", [SHARED, HANDED_OVER])
def test_a_call_interrupted_at_any_place_ends(estimate):
    def call(place, ends):
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(place, threads.__name__) as ran:
            threads.run(lambda counter, num_items: None, 4, (), estimate=estimate)
        ends.append(ran[0])

    pagedkv.set_num_threads(3)
    for place in itertools.count(1):
        thread = threading.Thread(target=call, args=(place, ends := []), daemon=True)
        thread.start()
        thread.join(30)
        assert ends, f"the call waits for ever after an interrupt at place {place}"
        if ends[0] < place:
            break
    assert place > 20


@pytest.mark.parametrize("estimate", [SHARED, HANDED_OVER])
def test_an_exception_in_a_worker_reaches_the_caller(estimate):
    def kernel(counter, num_items):
        raise MemoryError("no scratch")

    pagedkv.set_num_threads(2)
    with pytest.raises(MemoryError, match="no scratch"):
        threads.run(kernel, 4, (), estimate=estimate)


def test_ctrl_c_stops_the_workers_at_their_next_item():
    items = []

    def kernel(counter, num_items):
        cell = ctypes.c_int64.from_address(counter)
        while cell.value < num_items:
            cell.value += 1
            items.append(cell.value)
            time.sleep(0.01)

    pagedkv.set_num_threads(2)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        threads.run(kernel, 1000, (), estimate=HANDED_OVER)
    assert 0 < len(items) < 1000
    count = len(items)
    time.sleep(0.05)
    assert len(items) == count


def test_callers_in_many_threads_get_the_bits_of_one():
    pagedkv.set_num_threads(3)
    problem = _problem()
    expected = pagedkv.decode_attention(*problem)
    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(lambda _: pagedkv.decode_attention(*problem), range(40)))
    assert all(np.array_equal(result, expected) for result in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_its_own_workers():
    pagedkv.set_num_threads(2)
    problem = _problem()
    expected = pagedkv.decode_attention(*problem)
    child = os.fork()
    if child == 0:
        same = np.array_equal(pagedkv.decode_attention(*problem), expected)
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 60
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status[1]) == 0


def test_interrupts_while_workers_start_leave_none_missing(monkeypatch):
    left = [2]

    def start(*args):
        thread = start_new_thread(*args)
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        return thread

    start_new_thread = threads.start_new_thread
    monkeypatch.setattr(threads, "start_new_thread", start)
    pool = threads._Pool(2)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pool.ready(2)
    assert pool.ready(2) == 2


@pytest.mark.parametrize("num_possible", [0, 1])
def test_without_further_threads_the_call_is_done_all_the_same(monkeypatch, num_possible):
    started = []

    def start(*args):
        if len(started) == num_possible:
            raise RuntimeError("can't start new thread")
        started.append(start_new_thread(*args))

    problem = _problem()
    expected = pagedkv.decode_attention(*problem)
    pagedkv.set_num_threads(2)
    start_new_thread = threads.start_new_thread
    monkeypatch.setattr(threads, "start_new_thread", start)
    np.testing.assert_array_equal(pagedkv.decode_attention(*problem), expected)
    assert len(started) == num_possible


def test_no_worker_is_waited_for_once_the_interpreter_is_ending(monkeypatch):
    """Its daemon threads stop where they are; a destructor may still call."""
    problem = _problem()
    expected = pagedkv.decode_attention(*problem)
    monkeypatch.setattr(threads.sys, "is_finalizing", lambda: True)
    monkeypatch.setattr(threads, "_Share", None)
    np.testing.assert_array_equal(pagedkv.decode_attention(*problem), expected)


def num_threads_down_to(expected):
    """How many threads Python runs, once those are gone that end."""
    deadline = time.monotonic() + 30
    while len(sys._current_frames()) > expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return len(sys._current_frames())


def test_workers_end_when_another_number_is_set():
    pagedkv.set_num_threads(1)
    problem = _problem()
    pagedkv.decode_attention(*problem)
    before = len(sys._current_frames())
    for n in (4, 2, 3):
        pagedkv.set_num_threads(n)
        pagedkv.decode_attention(*problem)
    pagedkv.set_num_threads(1)
    pagedkv.decode_attention(*problem)
    assert num_threads_down_to(before) == before


def test_the_number_is_set_while_calls_run():
    problem = _problem()
    expected = pagedkv.decode_attention(*problem)
    done = threading.Event()

    def resize():
        for n in itertools.cycle((1, 4, 2, 3)):
            pagedkv.set_num_threads(n)
            if done.is_set():
                return

    other = threading.Thread(target=resize)
    other.start()
    try:
        with ThreadPoolExecutor(3) as executor:
            results = list(executor.map(lambda _: pagedkv.decode_attention(*problem), range(60)))
    finally:
        done.set()
        other.join()
    assert all(np.array_equal(result, expected) for result in results)


def test_a_worker_whose_caller_does_not_wait_keeps_the_arrays_alive(monkeypatch):
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
        threads.run(kernel, 1, (), estimate=HANDED_OVER, owners=(cache,))
    del cache
    assert alive() is not None
    go.set()
    assert done.wait(30)


def test_a_long_call_on_one_thread_leaves_the_main_thread_free_for_ctrl_c():
    ran = []
    pagedkv.set_num_threads(1)
    threads.run(lambda counter, num_items: ran.append(threading.get_ident()), 5, (), estimate=HANDED_OVER)
    assert len(ran) == 1
    assert threading.get_ident() not in ran


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_worker_keeps_no_arrays_alive(fails):
    def kernel(counter, num_items):
        if fails:
            raise MemoryError

    pagedkv.set_num_threads(1)
    cache = np.zeros(8)
    alive = weakref.ref(cache)
    with contextlib.suppress(MemoryError):
        threads.run(kernel, 1, (), estimate=HANDED_OVER, owners=(cache,))
    del cache
    deadline = time.monotonic() + 30
    while alive() is not None and time.monotonic() < deadline:
        if fails:
            gc.collect()  # an exception, its traceback and the frame that caught it refer to each other
        time.sleep(0.001)
    assert alive() is None


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no timer of signals")
def test_a_signal_handler_may_call_in_the_middle_of_a_call():
    problem = _problem()
    expected = pagedkv.decode_attention(*problem)
    same = []

    def handle(number, frame):
        same.append(np.array_equal(pagedkv.decode_attention(*problem), expected))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        for delay in np.random.default_rng(0).uniform(1e-6, 4e-4, 60):
            pagedkv.set_num_threads(2)  # so that workers are started when the signal comes
            signal.setitimer(signal.ITIMER_REAL, delay)
            same.append(np.array_equal(pagedkv.decode_attention(*problem), expected))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(same) > 60
    assert all(same)
