"""Compiling on a thread that no signal reaches.

Python runs signal handlers in the main thread, between any two of its steps: a KeyboardInterrupt in the middle of a
compilation or an import would leave numba's registries half filled for good. So the main thread only waits, and can be
interrupted. Work that has begun is finished all the same, and the next call finds its result; other work is dropped.
"""

from __future__ import annotations

import atexit
import logging  # noqa: F401 (its hook at a fork is to be registered before the one below, and so to run after it)
import os
from _thread import start_new_thread
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import RLock, get_ident
from typing import Any, Generic, TypeVar, cast

from .progress import erase

T = TypeVar("T")

WAKE_S = 0.1  # a signal that comes just before a wait does not end it

_turn = RLock()  # one compilation at a time, since the overrides of numba-cuda are not thread-safe


class MadeOnce(Generic[T]):
    """Caches the results of a function of hashable arguments, which runs on the compile thread.

    Parameters
    ----------
    make : callable
        Returns anything but None. Its exceptions reach the caller and are not cached.
    most : int
        Results to keep; the oldest is dropped first.

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
        return on_compile_thread(lambda: self._made_of(args)) if found is None else found

    def _made_of(self, args: tuple[Hashable, ...]) -> T:
        if args not in self.made:  # another caller may have been first, or this one was interrupted before
            self.made[args] = self.make(*args)
            if len(self.made) > self._most:
                del self.made[next(iter(self.made))]
        return self.made[args]


def made_once(*, most: int) -> Callable[[Callable[..., T]], MadeOnce[T]]:
    """Decorate a function with a `MadeOnce` of up to `most` results."""
    return lambda make: MadeOnce(make, most=most)


def on_compile_thread(work: Callable[[], T]) -> T:
    """Call `work` on a thread that no signal reaches, and wait for its result."""
    if _turn._is_owned():  # type: ignore[attr-defined]  # work that asks for other work
        return work()
    wanted = [work]
    # Not a Future: an interrupt could leave its condition, written in Python, locked.
    answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    answer = None
    try:
        try:
            start_new_thread(_do_work, (wanted, answers))
        except RuntimeError:  # no further thread can be started, or the interpreter is about to end
            _do_work(wanted, answers)
        while answer is None:
            with suppress(Empty):
                answer = answers.get(timeout=WAKE_S)
    except BaseException:
        wanted.clear()
        erase()
        raise
    result, error = answer
    if error is not None:
        raise error
    return cast("T", result)


def _do_work(wanted: list[Callable[[], Any]], answers: SimpleQueue[tuple[Any, BaseException | None]]) -> None:
    with _turn, _working_directory():
        try:
            work = wanted.pop()
        except IndexError:  # the caller has been interrupted
            return
        try:
            answers.put((work(), None))
        except BaseException as error:
            answers.put((None, error))


@contextmanager
def _working_directory() -> Iterator[None]:
    """Give this thread another working directory if it was deleted: numba names files relative to it."""
    thread, getcwd = get_ident(), os.getcwd
    try:
        getcwd()
    except FileNotFoundError:
        os.getcwd = lambda: os.sep if get_ident() == thread else getcwd()
    try:
        yield
    finally:
        os.getcwd = getcwd


if hasattr(os, "register_at_fork"):
    # A child has no other threads of its parent, so a compilation on one of them would never finish.
    os.register_at_fork(before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release)


@atexit.register
def _finish() -> None:
    """Wait for a compilation: LLVM must not be at work when the process tears its libraries down."""
    with _turn:
        pass
