"""How the manager changes its state: one call at a time, and all of a change or none of it.

A mutation first checks its arguments and computes everything that it will store, as a list of writes; `commit` then
stores them in one call that cannot fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from itertools import starmap
from operator import setitem
from threading import Lock, get_ident
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Write = tuple[Array, Any, Any]
"""What to store where, in one of two forms, for which NumPy allocates nothing and converts nothing:

* a 1-D array, an int64 array of indices in range, and as many values in an array of the first one's dtype;
* an int64 array of one element, 0 and an int.
"""


class Guard:
    """A lock that knows which thread holds it.

    Attributes
    ----------
    lock : threading.Lock
    holder : int or None
        The thread that holds it.
    changing : bool
        Whether it holds it for a mutation.
    """

    __slots__ = ("changing", "holder", "lock")

    def __init__(self) -> None:
        self.lock = Lock()
        self.holder: int | None = None
        self.changing = False


class Guarded:
    """Anything whose calls share a guard."""

    _guard: Guard

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copy and pickle: both copies would hand out the same blocks."""
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} cannot be copied or pickled, since both would own the same blocks: make a new {kind}, and add "
            f"the sequences again"
        )


Self = TypeVar("Self", bound=Guarded)
P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Self, P], R]


def commit(writes: list[Write]) -> None:
    """Store every write, in order.

    No store fails, because none allocates. The loop runs in C: Python runs signal handlers between byte codes only, so
    a Ctrl-C comes before the first write or after the last.
    """
    deque(starmap(setitem, writes), maxlen=0)


def exclusive(method: Method[Self, P, R]) -> Method[Self, P, R]:
    """A mutation: refused with RuntimeError in the middle of another one, and of a read in the same thread.

    It waits for the reads of other threads.
    """
    return _guarded(method, changes=True, nests=False)


def consistent(method: Method[Self, P, R]) -> Method[Self, P, R]:
    """A read: waits for the call of another thread.

    In the middle of a call in the same thread, as in a signal handler, it finds the state before that call or after.
    """
    return _guarded(method, changes=False, nests=True)


def alone(method: Method[Self, P, R]) -> Method[Self, P, R]:
    """A read that keeps something: as `consistent`, but refused in the middle of a call in the same thread."""
    return _guarded(method, changes=False, nests=False)


def _guarded(method: Method[Self, P, R], changes: bool, nests: bool) -> Method[Self, P, R]:
    @wraps(method)
    def guarded(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        guard, thread = self._guard, get_ident()
        if guard.holder == thread or (changes and guard.changing):
            if nests:
                return method(self, *args, **kwargs)
            middle = "mutation" if guard.changing else "call"
            raise RuntimeError(f"{method.__name__} called in the middle of another {middle} of the same pool")
        spare = (thread, thread, thread)
        # Nothing interrupts a with statement between taking a lock and its body, nor on the way out.
        with guard.lock:
            guard.holder, guard.changing = thread, changes
            try:
                return method(self, *args, **kwargs)
            finally:
                guard.holder, guard.changing = None, False
                # To call __exit__, CPython needs a tuple of three: without memory it takes this one.
                del spare

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
        return self._last.take(values)
