"""Where Linux may run the workers: not on the processor of a caller who works too.

A worker that has slept for a while often wakes up on the processor of the thread that wakes it. There it waits until
that thread is done or Linux balances the load, milliseconds later, while another processor idles: on two processors, in
half of the calls. An affinity that leaves that processor out takes a system call of a microsecond for each worker, and
none while the caller stays where it is.
"""

from __future__ import annotations

import ctypes
import os
from _thread import get_native_id
from contextlib import suppress

MOST_WORKERS = 8  # with more processors, the scheduler finds an idle one, and the calls would add up

_current = getattr(ctypes.PyDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None


class Workers:
    """The workers of a pool, and the processors that each may run on."""

    def __init__(self) -> None:
        self._of_each: list[tuple[int, set[int]]] = []  # the system's number, and the processors it began with
        self._told: tuple[int, int | None] = (0, None)  # how many have an affinity, and which processor it leaves out

    def add(self) -> None:
        """Count the calling thread among the workers."""
        if _current is not None:
            with suppress(OSError):
                self._of_each.append((get_native_id(), os.sched_getaffinity(0)))

    def make_way(self, joins: bool) -> None:
        """Keep them off the processor where the caller's thread runs, if it `joins` in the work."""
        if _current is None or not 0 < len(self._of_each) <= MOST_WORKERS:
            return
        told = len(self._of_each), _current() if joins else None
        if told != self._told:
            for worker, own in tuple(self._of_each):
                with suppress(OSError):  # the worker is gone, or the system forbids it: only speed is lost
                    os.sched_setaffinity(worker, own - {told[1]} or own)
            self._told = told
