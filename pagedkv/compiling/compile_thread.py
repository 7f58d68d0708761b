"""Compiling on a thread that no signal reaches.

Python runs signal handlers in the main thread alone, between any two steps of it: a KeyboardInterrupt in the middle of
a compilation, or of an import, leaves numba's registries half filled for good. Here the caller waits in C and can be
interrupted; what has begun for it is finished all the same, and the next call finds it. What has not begun is dropped.
"""

from __future__ import annotations

import atexit
import logging  # noqa: F401 (its hook at a fork is to be registered before the one below, and so to run after it)
import os
from collections.abc import Callable, Hashable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import RLock
from typing import Any, Generic, TypeVar, cast

from ..thread_start import start_thread
from .progress import erase

T = TypeVar("T")

WAKE_S = 0.1  # the longest that an interrupt waits

_turn = RLock()  # one compilation at a time: the overrides of numba-cuda are not made for two


class MadeOnce(Generic[T]):
    """What a function makes of hashable arguments: made on a thread of its own, once for each, and remembered.

    Parameters
    ----------
    make : callable
        Returns anything but None. What it raises is raised to the caller, and not remembered.
    most : int
        How many results stay; the oldest one is forgotten first.

    Attributes
    ----------
    make : callable
        The function itself.
    made : dict
        Its results by their arguments.
    """

    def __init__(self, make: Callable[..., T], *, most: int) -> None:
        self.make = make
        self.made: dict[tuple[Hashable, ...], T] = {}
        self._most = most

    def __call__(self, *args: Hashable) -> T:
        found = self.made.get(args)
        return apart(lambda: self._made_of(args)) if found is None else found

    def _made_of(self, args: tuple[Hashable, ...]) -> T:
        if args not in self.made:  # another caller may have been first, or this one was interrupted before
            self.made[args] = self.make(*args)
            if len(self.made) > self._most:
                del self.made[next(iter(self.made))]
        return self.made[args]


def made_once(*, most: int) -> Callable[[Callable[..., T]], MadeOnce[T]]:
    """Decorate a function as `MadeOnce`."""
    return lambda make: MadeOnce(make, most=most)


def apart(work: Callable[[], T]) -> T:
    """Do some work on a thread that no signal reaches, and wait for it."""
    if _mine():  # work that asks for other work
        return work()
    answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    wanted = [work]  # by whoever comes first: a thread that is only slow to begin, or the caller in its place

    def run(begun: Callable[[], object]) -> None:
        begun()
        with _turn:
            if not wanted:
                return
            work = wanted.pop()
            try:
                answer.put((work(), None))
            except BaseException as error:
                answer.put((None, error))

    try:
        try:
            start_thread(run)
        except RuntimeError:  # no further thread can be started, or the interpreter is about to end
            run(lambda: None)
        result, error = _next(answer)
    except BaseException:
        wanted.clear()
        erase()
        raise
    if error is not None:
        raise error
    return cast("T", result)


def _next(answers: SimpleQueue[T]) -> T:
    """Wait for an answer, a little at a time: a signal that comes just before a wait does not end it."""
    while True:
        with suppress(Empty):
            return answers.get(timeout=WAKE_S)


def _mine() -> bool:
    return bool(_turn._is_owned())  # type: ignore[attr-defined]


def _wait() -> None:
    """Wait for the compilation in progress and keep others from starting, whatever signal handlers raise meanwhile."""
    raised = None
    while not _mine():
        try:
            _turn.acquire()
        except BaseException as error:
            raised = error
    if raised is not None:
        raise raised


if hasattr(os, "register_at_fork"):
    # A child has no other thread of its parent: what one of them was compiling would never be finished, and what it
    # held would never be released.
    os.register_at_fork(before=_wait, after_in_parent=_turn.release, after_in_child=_turn.release)


@atexit.register
def _finish() -> None:
    """LLVM must not be at work when the process tears its libraries down."""
    with _turn:
        pass
