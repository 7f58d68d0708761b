"""cached_property: an attribute that is computed when it is first looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):
    """As `functools.cached_property`, which in Python 3.11 has a lock for all objects of a class.

    If a process is forked while another thread computes the attribute of one object, the child would wait for ever for
    that of any other. Without the lock, threads that look it up at the same time may each compute it.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...

    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object | None, kind: type) -> T | Self:
        if owner is None:
            return self
        value = vars(owner)[self._compute.__name__] = self._compute(owner)
        return value
