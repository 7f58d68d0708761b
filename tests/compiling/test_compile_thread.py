"""Compiling on a thread that no signal reaches: once, finished after an interrupt, and never in the way of a fork."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pagedkv.compiling import compile_thread
from pagedkv.compiling.compile_thread import MadeOnce, made_once, on_compile_thread

posix = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="signals and fork are POSIX")


def program(text, *args, timeout=100):
    """What a program prints that compiles kernels ``values *= factor`` at once, as `scale(factor)`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNELS + text, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


KERNELS = """
import os, random, signal, sys, threading, time
import numpy as np
from pagedkv.compiling.compile_thread import made_once

@made_once(most=10_000)
def scale(factor):
    from numba import float64
    from pagedkv.cpu.compile import compile_kernel
    def kernel(values):
        for i in range(values.size):
            values[i] *= factor
    return compile_kernel(kernel, (float64[::1],), factor, keep=False)

def check(factor):
    values = np.ones(3)
    scale(factor)(values)
    assert values.tolist() == [factor] * 3
"""

INTERRUPTED = """
armed, interrupts, compiled = False, 0, 0

def interrupt(*args):
    global interrupts
    if armed:
        interrupts += 1
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
while interrupts < int(sys.argv[1]) or compiled <= 10:  # whatever a slow machine compiles in that time
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, random.expovariate(60))
        try:
            check(compiled)
            compiled += 1
        finally:
            armed = False
    except KeyboardInterrupt:
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
check(compiled)
print(interrupts, compiled)
"""


@posix
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.long)])
def test_interrupts_at_any_moment_of_first_compilations_break_nothing(count):
    interrupts, compiled = program(INTERRUPTED, count, timeout=30 + count / 20)
    assert int(interrupts) >= count
    assert int(compiled) > 10


@posix
def test_what_was_interrupted_is_finished_for_the_next_call():
    go, calls = threading.Event(), []

    @made_once(most=2)
    def make(key):
        calls.append((key, threading.current_thread() is threading.main_thread()))
        assert go.wait(30)
        return [key]

    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        make(1)
    timer.join()
    go.set()
    assert make(1) is make(1)
    assert calls == [(1, False)]


@posix
def test_what_was_interrupted_before_it_began_is_dropped():
    """Later calls would queue behind what nobody waits for."""
    begun, go, calls = threading.Event(), threading.Event(), []

    @made_once(most=2)
    def make(key):
        calls.append(key)
        begun.set()
        assert go.wait(30)
        return [key]

    first = threading.Thread(target=make, args=(1,))
    first.start()
    assert begun.wait(30)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        make(2)
    timer.join()
    go.set()
    first.join()
    make(3)
    assert calls == [1, 3]


def test_threads_make_it_once():
    calls, found = [], []

    @made_once(most=2)
    def make(key):
        calls.append(key)
        time.sleep(0.05)
        return [key]

    threads = [threading.Thread(target=lambda: found.append(make(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert len({id(x) for x in found}) == 1


def test_the_oldest_result_is_forgotten():
    make = MadeOnce(lambda key: [key], most=2)
    first, second, third = make(1), make(2), make(3)
    assert make(2) is second
    assert make(3) is third
    assert make(1) is not first
    assert list(make.made) == [(3,), (1,)]


def test_an_exception_reaches_the_caller_and_is_not_remembered():
    outcomes = [ValueError("no"), 7]

    @made_once(most=2)
    def make():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(ValueError, match="no"):
        make()
    assert make() == 7


def test_work_may_ask_for_other_work():
    assert on_compile_thread(
        lambda: on_compile_thread(lambda: on_compile_thread(threading.get_ident)) == threading.get_ident()
    )


def test_without_further_threads_the_caller_does_the_work(monkeypatch):
    def no_thread(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(compile_thread, "start_new_thread", no_thread)
    assert on_compile_thread(threading.get_ident) == threading.get_ident()


FORKED = """
started, done = threading.Event(), []

def work():
    started.set()
    time.sleep(0.3)
    check(2)
    done.append(2)

from pagedkv.compiling.compile_thread import on_compile_thread
threading.Thread(target=on_compile_thread, args=(work,)).start()
started.wait()
child = os.fork()
assert done == [2]
if child == 0:
    check(3)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
check(4)
print("done")
"""


@posix
def test_a_child_forked_in_the_middle_of_a_compilation_compiles():
    assert program(FORKED) == ["done"]


ENDED = """
from pagedkv.compiling.compile_thread import on_compile_thread

def work():
    time.sleep(0.2)
    check(2)
    print("finished", flush=True)

threading.Thread(target=on_compile_thread, args=(work,), daemon=True).start()
time.sleep(0.1)
"""


@posix
def test_a_process_that_ends_in_the_middle_of_a_compilation_waits_for_it():
    assert program(ENDED) == ["finished"]


@posix
def test_in_a_working_directory_that_has_been_deleted_kernels_are_compiled():
    text = "import tempfile\nos.chdir(folder := tempfile.mkdtemp())\nos.rmdir(folder)\ncheck(2)\n"
    text += "try:\n    os.getcwd()\nexcept FileNotFoundError:\n    print('deleted')"
    assert program(text) == ["deleted"]


def test_the_turn_is_free_after_all_of_this():
    assert compile_thread._turn.acquire(blocking=False)
    compile_thread._turn.release()
