"""The threads of the CPU backend: how many, and how a kernel runs on them.

A kernel releases the GIL and takes its work items from a shared counter; which thread takes which item never changes a
bit of the result. The caller computes short calls alone and works as one of the threads in longer ones. In a call so
long that somebody may interrupt it, the caller only waits: then it gets the KeyboardInterrupt, and the workers stop at
their next item. Unlike an OpenMP pool, all of it survives fork, concurrent callers and Ctrl-C. Only C code hands work
over, a SimpleQueue and locks that belong to one call, so an interrupt leaves nothing behind that another call would
wait for.
"""

from __future__ import annotations

import os
import sys
import weakref
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from ctypes import addressof, c_int64
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..environment import MOST_THREADS, num_threads
from .processors import Workers

ALONE_NS = 50_000  # in shorter calls, a helper would come when most is done
PATIENCE_NS = 20_000_000  # how long an interrupt may wait


def _available() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_THREADS)
    return min(os.cpu_count() or 1, MOST_THREADS)


class _Share:
    """A worker's share of a call. Its `work` keeps alive all that it reads and writes."""

    __slots__ = ("_turn", "done", "error", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work
        self.error: BaseException | None = None
        self._turn = allocate_lock()  # held by the worker while it works
        self.done = allocate_lock()  # held until the worker is done
        self.done.acquire()

    def run(self) -> None:
        """Do the work, unless the caller has finished without it."""
        with self._turn:
            work = self.work
            try:
                if work is not None:
                    work()
            except BaseException as error:
                self.error = error
        self.done.release()

    def wait(self) -> None:
        """Wait for the worker; only once, since the lock stays taken."""
        self.done.acquire()

    def finish(self) -> None:
        """Take the work back from a worker that has not begun, or wait until it is done.

        An interrupt cannot come between a `with` and its lock. After `acquire` it could, and the lock would stay taken
        when the interrupted caller comes here again.
        """
        self.work = None
        with self._turn:
            pass


def _serve(shares: SimpleQueue[Any], end: object, workers: Workers) -> None:
    """Run shares, one after the other, until `end` comes."""
    workers.add()
    while (share := shares.get()) is not end:
        share.run()
        share = None  # an idle worker keeps no arrays alive
    shares.put(end)  # for the next worker


class _Pool:
    """Daemon threads that start when there is work for them, and end when nothing refers to the pool.

    A thread begins with the floating-point environment of the one that starts it, which is the default one in a call.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.shares: SimpleQueue[Any] = SimpleQueue()
        self.workers = Workers()
        self._end = weakref.ref(self, self.shares.put)  # puts itself: no byte code that an interrupt could cut short
        # Lists, since other threads and signal handlers may come in between: no two of them pop the same element.
        self._free: list[None] = [None] * size
        self._started: list[int] = []

    def ready(self, wanted: int) -> int:
        """Start workers until there are `wanted` ones, if possible, and return how many of these there are."""
        wanted = min(wanted, self.size)
        # Python's threads stop where they are when the interpreter ends.
        if sys.is_finalizing():
            return 0
        while len(self._started) < wanted:
            try:
                self._free.pop()
                self._started.append(start_new_thread(_serve, (self.shares, self._end, self.workers)))
            except IndexError:  # another thread is about to start it
                break
            except RuntimeError:  # no further thread can be started
                self._free.append(None)
                break
            except BaseException:  # an interrupt; if the thread has started all the same, one more does no harm
                self._free.append(None)
                raise
        return min(len(self._started), wanted)

    def helpers(self, num_items: int) -> int:
        """How many workers can help a caller who works, too: none while shares of other calls wait."""
        return 0 if self.shares.qsize() >= self.size else self.ready(min(num_items, self.size) - 1)


class _PoolState:
    """The pool in use, and how many threads were asked for."""

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


_state = _PoolState()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_state.forget)


def set_num_threads(n: int) -> None:
    """Set how many threads the CPU backend uses. No result depends on it.

    On Linux up to eight workers avoid the processor of a caller who works, too: each may run on the processors that it
    began with, without that one.

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

    Examples
    --------
    >>> import pagedkv
    >>> before = pagedkv.get_num_threads()
    >>> pagedkv.set_num_threads(1)
    >>> pagedkv.get_num_threads()
    1
    >>> pagedkv.set_num_threads(before)
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"n must be an int, got {type(n).__name__}")
    if not 1 <= n <= MOST_THREADS:
        got = n if abs(int(n)) < 10**80 else "one of more than 80 digits"
        raise ValueError(f"n must be in 1..{MOST_THREADS}, got {got}")
    _state.resize(int(n))


def get_num_threads() -> int:
    """How many threads the CPU backend uses; ValueError if ``PAGEDKV_NUM_THREADS`` is no number of them.

    Examples
    --------
    >>> import pagedkv
    >>> pagedkv.get_num_threads() >= 1
    True
    """
    if _state.count is None:
        _state.count = num_threads() or _available()
    return _state.count


def run_items(
    kernel: Callable[..., Any], num_items: int, args: tuple[Any, ...], *, estimate: float, owners: tuple[Any, ...] = ()
) -> None:
    """Call ``kernel(counter_address, num_items, *args)`` on some threads until the counter has reached num_items.

    `estimate` is about how many nanoseconds one thread would take. The caller computes a short call alone, and works as
    one of the threads in a longer one. If a call takes so long that somebody may interrupt it, only the workers
    compute: in a kernel the caller would see the interrupt when all is done.

    `owners` are the arrays whose addresses are among the args. Every worker keeps them alive, even if the caller
    does not wait for it. Kernels must write to arrays of this call alone: after an interrupt they may still do so.
    """
    counter = c_int64()
    address = addressof(counter)
    if estimate < ALONE_NS or (estimate < PATIENCE_NS and (num_items < 2 or get_num_threads() < 2)):
        kernel(address, num_items, *args)
        return

    def work(counter: c_int64 = counter, owners: tuple[Any, ...] = owners) -> None:
        kernel(address, num_items, *args)

    pool, joins = _state.pool(), estimate < PATIENCE_NS  # a name for the pool keeps its workers until the call ends
    shares = [_Share(work) for _ in range(pool.helpers(num_items) if joins else pool.ready(num_items))]
    try:
        pool.workers.avoid_caller(joins)
        for share in shares:
            pool.shares.put(share)
        if joins or not shares:
            work()
        else:
            shares[0].wait()  # until every item is taken
        for share in shares:
            share.finish()
    except BaseException:
        counter.value = num_items
        # A second interrupt abandons the shares that have begun.
        for share in shares:
            share.finish()
        raise
    for share in shares:
        if share.error is not None:
            try:
                raise share.error
            finally:
                del share, shares  # the error refers to this frame
