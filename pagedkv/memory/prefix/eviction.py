"""Eviction: which unused block loses its contents first."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...commit import Write
from ..ids import Int64Array, Tally, joined, must_hold

_AWAY = -1
_GONE = np.array([_AWAY])


class Eviction(Protocol):
    """The order in which blocks without references that can still be found lose their contents.

    Both methods change nothing themselves: they return what `commit` is to store, in the forms that `Write` names. A
    call of the memory manager makes at most one call of each, never both.
    """

    def plan_enter(self, blocks: Int64Array) -> list[Write]:
        """Take in blocks, (n,) int64, that just lost their last reference; the last block of a sequence comes first."""

    def plan_leave(self, blocks: Int64Array, num_evicted: int) -> tuple[Int64Array, list[Write]]:
        """Drop blocks that are used again; choose, drop and return others to evict, (num_evicted,) int64."""

    def check(self, blocks: Int64Array) -> None:
        """Raise AssertionError unless it holds exactly these blocks, given in ascending order."""


class LRU:
    """Evicts the least recently used block first: a ring of blocks in the order in which they came.

    A block that leaves stays in the ring but loses its place in `_places`, and later scans skip it. A full ring is
    packed, which takes O(N) for every N or more blocks that came.

    Parameters
    ----------
    num_blocks : int
        N, the blocks of the pool.

    Examples
    --------
    >>> from pagedkv import PagedKVCache
    >>> from pagedkv.memory import LRU
    >>> cache = PagedKVCache(1, num_blocks=8, block_size=4, num_kv_heads=1, head_dim=8, eviction=LRU)  # the default
    """

    def __init__(self, num_blocks: int) -> None:
        self._ring = np.zeros(1 << (2 * num_blocks - 1).bit_length(), np.int64)
        self._first, self._end = np.array([0]), np.array([0])  # counted from the first block that ever came
        self._places = np.full(num_blocks, _AWAY)
        self._tally = Tally(num_blocks)

    def plan_enter(self, blocks: Int64Array) -> list[Write]:
        """Append blocks to the ring."""
        first, end, writes = int(self._first[0]), int(self._end[0]), []
        if end + len(blocks) - first > len(self._ring):
            blocks = np.concatenate([self._waiting(first, end)[0], blocks])
            writes = [(self._first, 0, end)]
        places = np.arange(end, end + len(blocks))
        return [
            *writes,
            (self._ring, places & (len(self._ring) - 1), blocks),
            (self._places, blocks, places),
            (self._end, 0, end + len(blocks)),
        ]

    def plan_leave(self, blocks: Int64Array, num_evicted: int) -> tuple[Int64Array, list[Write]]:
        """Drop blocks that are used again, and evict the first num_evicted of the others, or all if there are fewer."""
        first = stop = int(self._first[0])
        end, size = int(self._end[0]), num_evicted
        evicted = places = np.empty(0, np.int64)
        while len(evicted) < num_evicted and stop < end:
            stop = min(first + size + len(blocks), end)
            evicted, places = self._waiting(first, stop)
            if len(blocks):
                others = ~self._tally.among(evicted, blocks)
                evicted, places = evicted[others], places[others]
            evicted, places = evicted[:num_evicted], places[:num_evicted]
            size *= 2
        gone = joined(blocks, evicted)
        writes: list[Write] = [(self._places, gone, _GONE.repeat(len(gone)))]
        if len(evicted):
            writes.append((self._first, 0, int(places[-1]) + 1))
        return evicted, writes

    def check(self, blocks: Int64Array) -> None:
        """Raise AssertionError unless exactly these blocks, in ascending order, are in the ring."""
        waiting = np.sort(self.waiting())
        must_hold(np.array_equal(waiting, blocks), "other blocks than those that can be evicted wait for it")
        must_hold(np.array_equal(np.flatnonzero(self._places != _AWAY), blocks), "a block waits that cannot be evicted")

    def waiting(self) -> Int64Array:
        """The blocks that wait, the least recently used one first, (n,) int64."""
        return self._waiting(int(self._first[0]), int(self._end[0]))[0]

    def _waiting(self, first: int, end: int) -> tuple[Int64Array, Int64Array]:
        """The blocks in a stretch of the ring that have not left, and their places."""
        places = np.arange(first, end)
        blocks = self._ring.take(places & (len(self._ring) - 1))
        here = self._places[blocks] == places
        if np.count_nonzero(here) == len(here):
            return blocks, places
        return blocks[here], places[here]
