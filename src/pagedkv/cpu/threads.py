"""The threads of the CPU backend: how many, and how a kernel runs on them.

A kernel releases the GIL and takes its work items from a shared counter; which thread takes which item never changes a
bit of the result. Unlike an OpenMP pool it survives fork, concurrent callers and Ctrl-C: the waiting thread gets the
KeyboardInterrupt, and the workers stop at their next item. Work is handed over through C alone, a SimpleQueue and locks
that belong to one call: an interrupt leaves nothing behind that another call waits for.
"""

from __future__ import annotations

import os
import sys
import weakref
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

MAX_NUM_THREADS = 1024


def _available() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MAX_NUM_THREADS)
    return min(os.cpu_count() or 1, MAX_NUM_THREADS)


def _from_environment() -> int:
    text = os.environ.get("PAGEDKV_NUM_THREADS")
    if not text:
        return _available()
    # The length first: Python refuses to read thousands of digits.
    if not text.isdecimal() or len(text) > 80 or not 1 <= int(text) <= MAX_NUM_THREADS:
        raise ValueError(f"PAGEDKV_NUM_THREADS must be an integer in 1..{MAX_NUM_THREADS}, got {text[:80]!r}")
    return int(text)


class _Share:
    """What one worker does of a call; its `work` keeps alive whatever it reads and writes."""

    __slots__ = ("begun", "done", "error", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.begun = False
        self.error: BaseException | None = None
        self.done = allocate_lock()  # taken until the worker is done
        self.done.acquire()

    def wait(self) -> None:
        with self.done:  # and leave it free, for an interrupted caller waits again
            pass


def _serve(shares: SimpleQueue[Any], end: object) -> None:
    """What a worker does: one share after the other, until `end` comes."""
    while (share := shares.get()) is not end:
        share.begun = True
        try:
            share.work()
        except BaseException as error:
            share.error = error
        share.done.release()
        share = None  # an idle worker keeps no arrays alive
    shares.put(end)  # for the next worker


class _Pool:
    """Daemon threads, started when there is work for them. They end once nobody refers to the pool any more.

    A thread begins with the floating-point environment of the one that starts it: the default one, during a call.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.shares: SimpleQueue[Any] = SimpleQueue()
        self._end = weakref.ref(self, self.shares.put)  # puts itself: no byte code that an interrupt could cut short
        # Lists, for a thread or a signal handler may come in between: what one has popped no other one gets.
        self._free: list[None] = [None] * size
        self._started: list[int] = []

    def ready(self, wanted: int) -> int:
        """How many workers there are, of as many as are wanted: the missing ones are started if that is possible."""
        wanted = min(wanted, self.size)
        # Python's threads stop where they are when the interpreter ends.
        if sys.is_finalizing():
            return 0
        while len(self._started) < wanted:
            try:
                self._free.pop()
                self._started.append(start_new_thread(_serve, (self.shares, self._end)))
            except IndexError:  # somebody else is about to start it
                break
            except RuntimeError:  # no further thread can be started
                self._free.append(None)
                break
            except BaseException:  # an interrupt; if the thread runs all the same, one more does no harm
                self._free.append(None)
                raise
        return min(len(self._started), wanted)


class _State:
    """The pool in use, and how many workers it may have."""

    def __init__(self) -> None:
        self.count: int | None = None
        self._pool: _Pool | None = None

    def pool(self) -> _Pool:
        pool = self._pool
        if pool is None:
            pool = self._pool = _Pool(get_num_threads())
        return pool

    def resize(self, count: int) -> None:
        self.count = count
        self.forget()

    def forget(self) -> None:
        self._pool = None


_state = _State()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_state.forget)


def set_num_threads(n: int) -> None:
    """Set how many threads the CPU backend uses. No result depends on it.

    Parameters
    ----------
    n : int
        From 1 to 1024. Starts at ``PAGEDKV_NUM_THREADS``, else the cores this process may run on. Calls that are
        running go on with as many as they began with.

    Raises
    ------
    TypeError
        `n` is not an int.
    ValueError
        `n` is out of range.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"n must be an int, got {type(n).__name__}")
    if not 1 <= n <= MAX_NUM_THREADS:
        got = n if abs(int(n)) < 10**80 else "one of more than 80 digits"
        raise ValueError(f"n must be in 1..{MAX_NUM_THREADS}, got {got}")
    _state.resize(int(n))


def get_num_threads() -> int:
    """How many threads the CPU backend uses."""
    if _state.count is None:
        _state.count = _from_environment()
    return _state.count


def run(
    kernel: Callable[..., Any], num_items: int, args: tuple[Any, ...], *, parallel: bool, owners: tuple[Any, ...] = ()
) -> None:
    """Call ``kernel(counter_address, num_items, *args)`` on all threads until the counter has reached num_items.

    `owners` are the arrays whose addresses are among the args: every worker keeps them alive, even when the caller
    does not wait for it. What a kernel writes must be the call's own: after an interrupt it may still be written.
    """
    counter = np.zeros(1, np.int64)
    if not parallel:
        kernel(counter.ctypes.data, num_items, *args)
        return

    def work(owners: tuple[Any, ...] = owners) -> None:
        kernel(counter.ctypes.data, num_items, *args)

    pool = _state.pool()  # until the end of the call, or its workers would end
    shares = [_Share(work) for _ in range(pool.ready(num_items))]
    if not shares:
        work()
    try:
        for share in shares:
            pool.shares.put(share)
        for share in shares:
            share.wait()
    except BaseException:
        counter[0] = num_items
        # Those that have not begun have nothing to do. A second interrupt leaves the others to themselves.
        for share in shares:
            if share.begun:
                share.wait()
        raise
    for share in shares:
        if share.error is not None:
            try:
                raise share.error
            finally:
                del share, shares  # the error refers to this frame
