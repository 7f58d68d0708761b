"""Keep workers off the processor of a caller who works, too, on Linux.

A worker that has slept for a while often wakes up on the processor of the thread that wakes it. There it waits until
that thread is done or until Linux balances the load, milliseconds later, while another processor idles: with two
processors in half of the calls. An affinity without that processor costs a system call of a microsecond for each
worker, and nothing while the caller stays where it is.
"""

from __future__ import annotations

import ctypes
import os
from _thread import get_native_id
from contextlib import suppress

MOST_WORKERS = 8  # with more processors, the scheduler finds an idle one, and the calls would add up

_current = getattr(ctypes.PyDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None


class Workers:
    """The workers of a pool, and the processors on which each may run."""

    def __init__(self) -> None:
        self._workers: list[tuple[int, set[int]]] = []  # thread id, and the processors it began with
        self._avoided: tuple[int, int | None] = (0, None)  # how many workers avoid a processor, and which one

    def add(self) -> None:
        """Count the calling thread among the workers."""
        if _current is not None:
            with suppress(OSError):
                self._workers.append((get_native_id(), os.sched_getaffinity(0)))

    def avoid_caller(self, joins: bool) -> None:
        """Keep the workers off the caller's processor if the caller's thread `joins` in the work."""
        if _current is None or not 0 < len(self._workers) <= MOST_WORKERS:
            return
        avoided = len(self._workers), _current() if joins else None
        if avoided != self._avoided:
            for worker, own in tuple(self._workers):
                with suppress(OSError):  # if the worker has ended or the system forbids it, only speed is lost
                    os.sched_setaffinity(worker, own - {avoided[1]} or own)
            self._avoided = avoided
