"""Starts: how a request gets its sequence."""

from __future__ import annotations

from ..cache import PagedKVCache
from ..memory.guard import Guarded, exclusive
from ..memory.prefix.prompt import Added, Prompt


class Starts(Guarded):
    """Starts sequences of a cache with what is found of their tokens: the others are appended chunk by chunk.

    Parameters
    ----------
    cache : PagedKVCache
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache, self._guard = cache, cache._guard

    @exclusive
    def start(self, prompt: Prompt, reserve: int) -> Added:
        """Start a sequence, if there is room for all tokens of the prompt, and for so many blocks besides.

        Raises
        ------
        CapacityError
            No row of the table is free.
        OutOfBlocksError
            There is no room.
        """
        cache, rows = self._cache, self._cache.table._rows
        seq, num_cached, copies, writes = rows.to_copy(rows.plan_add, prompt, reserve)
        added = Added(seq, num_cached)
        cache._copy(copies)
        try:
            cache.pool._commit(writes)
        except BaseException:
            # A listener raises after the sequence has started, and nobody would know its handle.
            cache.pool._commit(rows.plan_free(seq))
            raise
        return added
