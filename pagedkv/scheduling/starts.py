"""Starts: how a request gets its sequence."""

from __future__ import annotations

from ..cache import PagedKVCache
from ..memory.guard import Guarded, exclusive
from ..memory.prefix.prompt import Added, Prompt
from ..memory.rows.handles import NO_HANDLE


class Starts(Guarded):
    """Starts sequences of a cache with what is found of their tokens: the others are appended chunk by chunk.

    Parameters
    ----------
    cache : PagedKVCache

    Attributes
    ----------
    last : list of int
        The handle of the sequence that was started last, alone in it.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache, self._guard = cache, cache._guard
        self.last = [NO_HANDLE]

    @exclusive
    def start(self, prompt: Prompt, reserve: int, *, again: bool) -> Added:
        """Start a sequence, if there is room for all tokens of the prompt, and for so many blocks besides.

        `again` if it is that of a request that was preempted.

        Raises
        ------
        CapacityError
            No row of the table is free.
        OutOfBlocksError
            There is no room.
        """
        return self._cache._start(prompt, reserve, self.last, again=again)
