"""The threads of the CPU backend: how many, and how a kernel runs on them.

A kernel releases the GIL and takes its work items from a shared counter; which thread takes which item never changes a
bit of the result. Unlike an OpenMP pool it survives fork, concurrent callers and Ctrl-C: the waiting thread
gets the KeyboardInterrupt, and the workers stop at their next item.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np


def _available() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _from_environment() -> int:
    text = os.environ.get("PAGEDKV_NUM_THREADS")
    if not text:
        return _available()
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"PAGEDKV_NUM_THREADS must be an integer of at least 1, got {text!r}")
    return int(text)


class _Workers:
    """A pool of threads, started on first use."""

    def __init__(self) -> None:
        self.count: int | None = None
        self._executor: ThreadPoolExecutor | None = None

    def executor(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(get_num_threads(), thread_name_prefix="pagedkv")
        return self._executor

    def resize(self, count: int | None) -> None:
        self.count = count
        self.forget()

    def forget(self) -> None:
        self._executor = None


_workers = _Workers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.forget)


def set_num_threads(n: int) -> None:
    """Set how many threads the CPU backend uses. No result depends on it.

    Parameters
    ----------
    n : int
        At least 1. Starts at ``PAGEDKV_NUM_THREADS``, else the cores this process may run on.

    Raises
    ------
    TypeError
        `n` is not an int.
    ValueError
        `n` is below 1.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"n must be an int, got {type(n).__name__}")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    _workers.resize(int(n))


def get_num_threads() -> int:
    """How many threads the CPU backend uses."""
    if _workers.count is None:
        _workers.count = _from_environment()
    return _workers.count


def run(
    kernel: Callable[..., Any], num_items: int, args: tuple[Any, ...], *, parallel: bool, owners: tuple[Any, ...] = ()
) -> None:
    """Call ``kernel(counter_address, num_items, *args)`` on all threads until the counter has reached num_items.

    `owners` are the arrays whose addresses are among the args: every worker keeps them alive, even when the caller
    does not wait for it.
    """
    counter = np.zeros(1, np.int64)
    if not parallel:
        kernel(counter.ctypes.data, num_items, *args)
        return

    def work(owners: tuple[Any, ...] = owners) -> None:
        kernel(counter.ctypes.data, num_items, *args)

    executor = _workers.executor()
    futures: list[Future[None]] = []
    try:
        for _ in range(min(get_num_threads(), num_items)):
            try:
                futures.append(executor.submit(work))
            except RuntimeError:  # no further thread can be started, or the interpreter is about to end
                break
        if not futures:
            work()
        wait(futures)
    except BaseException:
        counter[0] = num_items
        wait(futures)
        raise
    for future in futures:
        future.result()
