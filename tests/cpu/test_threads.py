"""The worker threads: their number, Ctrl-C, fork and callers that call at once."""

import ctypes
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


@pytest.fixture(autouse=True)
def _restore_threads():
    before = pagedkv.get_num_threads()
    yield
    pagedkv.set_num_threads(before)


def _problem(length=2000):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, -(-length // 16), 16, 2, 64), np.float32)
    tables = rng.permutation(len(k)).astype(np.int32)[None]
    return rng.standard_normal((1, 8, 64), np.float32), k, v, tables, np.array([length], np.int32)


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        (0, ValueError, "at least 1, got 0"),
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
    assert "PAGEDKV_NUM_THREADS must be an integer of at least 1, got '0'" in run("0").stderr


def test_every_item_is_done_once():
    done = []
    lock = threading.Lock()

    def kernel(counter, num_items):
        with lock:
            done.append((counter, num_items, threading.current_thread().name))

    pagedkv.set_num_threads(3)
    threads.run(kernel, 5, (), parallel=True)
    assert len(done) == 3
    assert len({counter for counter, _, _ in done}) == 1
    assert all(name.startswith("pagedkv") for _, _, name in done)
    done.clear()
    threads.run(kernel, 5, (), parallel=False)
    assert [name for _, _, name in done] == [threading.current_thread().name]


def test_an_exception_in_a_worker_reaches_the_caller():
    def kernel(counter, num_items):
        raise MemoryError("no scratch")

    pagedkv.set_num_threads(2)
    with pytest.raises(MemoryError, match="no scratch"):
        threads.run(kernel, 4, (), parallel=True)


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
        threads.run(kernel, 1000, (), parallel=True)
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


def test_without_further_threads_the_call_is_done_all_the_same(monkeypatch):
    class NoThreads:
        def submit(self, work):
            raise RuntimeError("can't start new thread")

    problem = _problem()
    expected = pagedkv.decode_attention(*problem)
    monkeypatch.setattr(threads._workers, "executor", NoThreads)
    np.testing.assert_array_equal(pagedkv.decode_attention(*problem), expected)


def test_a_worker_whose_caller_does_not_wait_keeps_the_arrays_alive(monkeypatch):
    cache = np.zeros(8)
    alive = weakref.ref(cache)
    go, done = threading.Event(), threading.Event()

    def kernel(counter, num_items):
        go.wait(30)
        done.set()

    def interrupted(futures):
        raise KeyboardInterrupt

    monkeypatch.setattr(threads, "wait", interrupted)
    pagedkv.set_num_threads(1)
    with pytest.raises(KeyboardInterrupt):
        threads.run(kernel, 1, (), parallel=True, owners=(cache,))
    del cache
    assert alive() is not None
    go.set()
    assert done.wait(30)


def test_one_thread_leaves_the_main_thread_free_for_ctrl_c():
    names = []
    pagedkv.set_num_threads(1)
    threads.run(lambda counter, num_items: names.append(threading.current_thread().name), 5, (), parallel=True)
    assert len(names) == 1
    assert names[0].startswith("pagedkv")
