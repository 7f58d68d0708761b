"""Starting a thread, and seeing that it begins: without memory, Python drops one before its first line."""

from __future__ import annotations

from _thread import allocate_lock, start_new_thread
from collections.abc import Callable

BEGIN_S = 1.0  # a thread that takes longer has died


def start_thread(function: Callable[..., object], *args: object) -> int:
    """Start ``function(begun, *args)`` on a thread, which calls `begun` once it is at work, and return its number.

    Raises
    ------
    RuntimeError
        No further thread can be started, or it has died.
    """
    lock = allocate_lock()
    lock.acquire()
    number = start_new_thread(function, (lock.release, *args))
    if not lock.acquire(timeout=BEGIN_S):
        raise RuntimeError("the thread has died before it began")
    return number
