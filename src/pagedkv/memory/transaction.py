"""How the manager changes its state: one thread at a time, and all of a change or none of it.

A mutation first checks its arguments and computes everything that it will store, as a list of writes; `commit` then
stores them in one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import starmap
from operator import setitem
from threading import Lock
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Write = tuple[Array, Any, Any]
"""An array, an index and what to store there."""


class Guarded(Protocol):
    """Anything whose mutations share a lock."""

    _lock: Lock


Self = TypeVar("Self", bound=Guarded)
P = ParamSpec("P")
R = TypeVar("R")


def commit(writes: Iterable[Write]) -> None:
    """Store every write, in order.

    The loop runs in C: Python runs signal handlers between byte codes only, so a Ctrl-C comes before the first
    write or after the last.
    """
    deque(starmap(setitem, writes), maxlen=0)


def exclusive(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """Refuse the method with RuntimeError while another one holds the object's lock.

    Of two threads that find the lock free at the same instant the second waits for the first.
    """

    @wraps(method)
    def guarded(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._lock.locked():
            raise RuntimeError(f"{method.__name__} called in the middle of another mutation of the same pool")
        # Nothing interrupts a with statement between taking a lock and its body, nor on the way out.
        with self._lock:
            return method(self, *args, **kwargs)

    return guarded


class Tally:
    """Counts how often each of the integers 0..size-1 occurs, in time that does not depend on size."""

    def __init__(self, size: int) -> None:
        self._last = np.zeros(size, np.int64)

    def __call__(self, values: Array) -> tuple[Array, Array]:
        """The last place and the number of occurrences of each value.

        Returns
        -------
        last : (n,) int64
            Where values[i] occurs last; i itself for exactly one of equal values.
        counts : (n,) int64
            How often values[i] occurs, at i = last[i]; 0 elsewhere.
        """
        last = self._last_places(values, np.arange(len(values)))
        return last, np.bincount(last, minlength=len(values))

    def repeated(self, values: Array) -> Array:
        """Which values occur again further on, (n,) bool."""
        places = np.arange(len(values))
        return self._last_places(values, places) != places

    def _last_places(self, values: Array, places: Array) -> Array:
        # An index that repeats stores the last of its values, and only what was just stored is read back.
        self._last[values] = places
        return self._last[values]
