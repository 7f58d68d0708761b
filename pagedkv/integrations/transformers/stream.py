"""Stream: an iterator over the output of one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from .request import EngineRequest

Item = TypeVar("Item")


class Stream(Iterator[Item]):
    """Iterates over the tokens of a request, or over its text.

    Parameters
    ----------
    request : EngineRequest
    items : sequence
        Its output so far, which grows.
    compute : callable
        Runs a step of the engine.
    abort : callable
        Aborts the request now or later; may be called at any time, also by the garbage collector.

    Attributes
    ----------
    request : EngineRequest
    """

    _is_open = False  # for `__del__` if an interrupt ends `__init__`

    def __init__(
        self, request: EngineRequest, items: Sequence[Item], compute: Callable[[], None], abort: Callable[[], None]
    ) -> None:
        self.request, self._items, self._compute, self._abort = request, items, compute, abort
        self._num_given = 0
        self._is_open = True

    def __next__(self) -> Item:
        while self._is_open and self._num_given == len(self._items) and not self.request.reason:
            self._compute()
        if not self._is_open or (self._num_given == len(self._items) and self.request.reason != "error"):
            raise StopIteration
        if self._num_given == len(self._items):
            raise FloatingPointError(self.request.message)
        item = self._items[self._num_given]
        self._num_given += 1
        return item

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if self._is_open and not self.request.reason:
            self._abort()
        self._is_open = False

    def __del__(self) -> None:
        self.close()
