"""Guard: a pool, and all that share it, run one call at a time, whatever threads and signal handlers do."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from threading import Lock, get_ident
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar
from weakref import WeakSet


class Guard:
    """A lock that knows which thread holds it.

    Attributes
    ----------
    lock : threading.Lock
    holder : int or None
        The thread that holds it.
    changing : bool
        Whether the holder is in a mutation.
    is_forked : bool
        Whether this process was forked from the one that made the guard. Another thread may have been in the middle of
        a call then, and does not exist in the child.
    """

    __slots__ = ("__weakref__", "changing", "holder", "is_forked", "lock")

    def __init__(self) -> None:
        self.lock = Lock()
        self.holder: int | None = None
        self.changing = self.is_forked = False
        _guards.add(self)


_guards: WeakSet[Guard] = WeakSet()


def _mark_forked() -> None:
    for guard in _guards:
        guard.is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


class Guarded:
    """Base class of objects whose calls share a guard."""

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


def exclusive(method: Method[Self, P, R]) -> Method[Self, P, R]:
    """Guard a mutation: RuntimeError in the middle of another mutation, or of a read in the same thread.

    It waits for reads of other threads.
    """
    return _guarded(method, changes=True, nests=False)


def consistent(method: Method[Self, P, R]) -> Method[Self, P, R]:
    """Guard a read: it waits for a call of another thread.

    In the middle of a call of the same thread, as in a signal handler, it sees the state before that call or after it.
    """
    return _guarded(method, changes=False, nests=True)


def exclusive_read(method: Method[Self, P, R]) -> Method[Self, P, R]:
    """Guard a read that updates buffers of its own: as `consistent`, but RuntimeError in a call of the same thread."""
    return _guarded(method, changes=False, nests=False)


def _guarded(method: Method[Self, P, R], changes: bool, nests: bool) -> Method[Self, P, R]:
    @wraps(method)
    def guarded(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        guard, thread = self._guard, get_ident()
        if guard.is_forked:
            raise RuntimeError(
                f"{method.__name__} called in a child of the process that made this pool: make a new pool in the child"
            )
        if guard.holder == thread or (changes and guard.changing):
            if nests:
                return method(self, *args, **kwargs)
            middle = "mutation" if guard.changing else "call"
            raise RuntimeError(f"{method.__name__} called in the middle of another {middle} of the same pool")
        spare = (thread, thread, thread)
        # No interrupt comes between taking the lock of a with statement and its body, nor on the way out.
        with guard.lock:
            guard.holder, guard.changing = thread, changes
            try:
                return method(self, *args, **kwargs)
            finally:
                guard.holder, guard.changing = None, False
                # CPython needs a tuple of three to call __exit__; without memory it reuses this one.
                del spare

    return guarded
