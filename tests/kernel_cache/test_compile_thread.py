"""The compile thread: it compiles once, finishes after an interrupt, and allows forks."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from pagedkv.kernel_cache import compile_thread
from pagedkv.kernel_cache.compile_thread import MadeOnce, made_once, on_compile_thread

from ..support.interrupts import interrupts_at_every_instant

posix = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="signals and fork are POSIX")


class Slow:
    """Makes a list of each key, as soon as it may."""

    def __init__(self):
        self.calls, self.begun, self.go = [], threading.Event(), threading.Event()
        self.make = MadeOnce(self._make, most=2)

    def _make(self, key):
        self.calls.append((key, threading.current_thread() is threading.main_thread()))
        self.begun.set()
        assert self.go.wait(30)
        return [key]

    def interrupted(self, key):
        """Compile with a Ctrl-C in the middle."""
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            self.make(key)
        timer.join()


@posix
def test_interrupted_work_is_finished_for_the_next_call():
    slow = Slow()
    slow.interrupted(1)
    slow.go.set()
    assert slow.make(1) is slow.make(1)
    assert slow.calls == [(1, False)]


@posix
def test_work_that_is_interrupted_before_it_begins_is_dropped():
    """Otherwise later calls would queue behind work that no caller waits for."""
    slow = Slow()
    first = threading.Thread(target=slow.make, args=(1,))
    first.start()
    assert slow.begun.wait(30)
    slow.interrupted(2)
    slow.go.set()
    first.join()
    slow.make(3)
    assert [key for key, _ in slow.calls] == [1, 3]


def test_an_interrupt_at_any_instant_blocks_no_later_call():
    for interrupt in interrupts_at_every_instant(("kernel_cache/compile_thread",)):
        make = MadeOnce(lambda key: [key], most=2)
        with suppress(KeyboardInterrupt), interrupt:
            make(1)
        assert make(1) == [1]


def test_threads_make_it_once():
    slow, found = Slow(), []
    threads = [threading.Thread(target=lambda: found.append(slow.make(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    slow.go.set()
    for thread in threads:
        thread.join()
    assert len(slow.calls) == 1
    assert len({id(x) for x in found}) == 1


def test_the_oldest_result_is_forgotten():
    make = MadeOnce(lambda key: [key], most=2)
    first, second, third = make(1), make(2), make(3)
    assert make(2) is second
    assert make(3) is third
    assert make(1) is not first
    assert list(make.made) == [(3,), (1,)]


def test_an_exception_reaches_the_caller_and_is_not_cached():
    outcomes = [7, ValueError("no")]

    @made_once(most=2)
    def make():
        if isinstance(outcome := outcomes.pop(), Exception):
            raise outcome
        return outcome

    with pytest.raises(ValueError, match="no"):
        make()
    assert make() == 7


def test_work_may_ask_for_other_work():
    assert on_compile_thread(lambda: on_compile_thread(threading.get_ident) == threading.get_ident())


def test_without_further_threads_the_caller_does_the_work(monkeypatch):
    def no_thread(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(compile_thread, "start_new_thread", no_thread)
    assert on_compile_thread(threading.get_ident) == threading.get_ident()


@posix
def test_work_finds_a_working_directory_though_it_has_been_deleted(monkeypatch, tmp_path):
    """numba names files relative to it."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert on_compile_thread(lambda: os.getcwd()) == os.sep
    with pytest.raises(FileNotFoundError):
        os.getcwd()


# LLVM is at work when the process forks, and when it ends.
PROGRAM = """
import os, threading, time
import numpy as np
from numba import float64
from pagedkv.kernel_cache.compile_thread import on_compile_thread
from pagedkv.cpu.compile import compile_kernel

def compile_and_run(factor):
    def kernel(values):
        for i in range(values.size):
            values[i] *= factor
    values = np.ones(3)
    compile_kernel(kernel, (float64[::1],), factor, keep=False)(values)
    assert values.tolist() == [factor] * 3

def begin(factor):
    def work():
        begun.set()
        time.sleep(0.2)
        compile_and_run(factor)
        done.append(factor)
        print("compiled", factor, flush=True)
    begun, done = threading.Event(), []
    threading.Thread(target=on_compile_thread, args=(work,), daemon=True).start()
    begun.wait()
    return done

done = begin(2)
child = os.fork()
assert done == [2]
on_compile_thread(lambda: compile_and_run(3))
if child == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
begin(4)
"""


@posix
def test_a_fork_and_the_end_of_a_process_wait_for_a_compilation():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["compiled 2", "compiled 4"]
