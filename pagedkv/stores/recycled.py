"""RecycledMemory: memory for blocks that a store returns."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import finalize

import numpy as np
import numpy.typing as npt

_MOST_FREE = 2**27  # bytes
_PAGE = 4096  # bytes
_LEAST = 2**16  # of a piece that is worth keeping


class RecycledMemory:
    """Memory for blocks that come from a store, used again once nobody has these blocks any more.

    New memory is slow: the system clears each of its pages when it is first written, which can take several times as
    long as the copy. Any thread may call it.
    """

    def __init__(self) -> None:
        self._free: dict[int, npt.NDArray[np.uint8]] = {}

    def room(self, size: int) -> memoryview:
        """Memory that nobody else has, as long as the caller keeps any part of it."""
        # Copies, for the collector may run _take_back in the middle of a loop.
        for key, memory in self._free.copy().items():
            if size <= len(memory) <= 2 * size and self._free.pop(key, None) is not None:
                break
        else:
            memory = np.empty(size, np.uint8)
            memory[::_PAGE] = 0  # NIXL is slow to write to pages that are not there yet
        lent = memory[:size]
        finalize(lent, self._take_back, memory).atexit = False
        return lent.data

    def room_for(self, places: Sequence[tuple[int, int] | None]) -> list[memoryview | None]:
        """Memory for blocks whose slots and sizes are given, in one piece; None where there is no block."""
        room = self.room(sum(place[1] for place in places if place is not None))
        views, end = list[memoryview | None](), 0
        for place in places:
            if place is not None:
                end += place[1]
            views.append(None if place is None else room[end - place[1] : end])
        return views

    def _take_back(self, memory: npt.NDArray[np.uint8]) -> None:
        if len(memory) >= _LEAST and sum(map(len, self._free.copy().values())) + len(memory) <= _MOST_FREE:
            self._free[id(memory)] = memory
