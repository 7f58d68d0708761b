"""HashIndex: the block with a given digest, for many digests at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...commit import Write
from ..checks import require
from ..tally import Tally

Int64Array = npt.NDArray[np.int64]
NO_BLOCK = -1  # an empty slot
_REMOVED = -2  # a slot whose block is gone: what was probed past it is still behind it
_ROOM = 4  # slots for each block, at least


class HashIndex:
    """Blocks by their 128-bit digests: a hash table with open addressing and linear probing, all of it in arrays.

    A lookup or a change of n digests takes a few array operations for each step of the longest probe. At most half of
    the slots are ever filled, those of removed blocks included; then the table is made anew, which is O(N) for every N
    or more blocks put into it.

    Parameters
    ----------
    num_blocks : int
        N.
    """

    def __init__(self, num_blocks: int) -> None:
        num_slots = 1 << (_ROOM * num_blocks - 1).bit_length()
        self._slots = np.full(num_slots, NO_BLOCK, np.int32)
        self._num_filled = np.array([0])
        self._low, self._high = np.zeros(num_blocks, np.int64), np.zeros(num_blocks, np.int64)
        self._places = np.full(num_blocks, NO_BLOCK, np.int64)
        self._tally = Tally(num_slots)

    def digest(self, block: int) -> bytes:
        """The digest under which a block was put in last."""
        return np.array([self._low[block], self._high[block]]).tobytes()

    def find(self, keys: Int64Array) -> Int64Array:
        """The block of each digest, or NO_BLOCK.

        Parameters
        ----------
        keys : (n, 2) int64
            Digests, 8 bytes in each element.

        Returns
        -------
        (n,) int64
        """
        low, high = keys.T
        places = self._homes(low)
        found = np.full(len(keys), NO_BLOCK)
        pending = np.arange(len(keys))
        while len(pending):
            blocks = self._slots.take(places)
            # NO_BLOCK and _REMOVED look at the last blocks, in vain.
            same = (self._low[blocks] == low[pending]) & (self._high[blocks] == high[pending]) & (blocks >= 0)
            found[pending[same]] = blocks[same]
            further = np.flatnonzero(~same & (blocks != NO_BLOCK))
            pending, places = pending[further], self._next(places[further])
        return found

    def plan(self, removed: Int64Array, put: Int64Array, keys: Int64Array) -> list[Write]:
        """Take blocks out, and put others in under digests that no block has.

        Parameters
        ----------
        removed, put : (m,), (n,) int64
            Blocks, each named once; the first ones are in the index, the others not.
        keys : (n, 2) int64
            The digests of `put`, all different.
        """
        low, high = (np.ascontiguousarray(half) for half in keys.T)
        writes: list[Write] = [
            (self._places, removed, np.full(len(removed), NO_BLOCK)),
            (self._low, put, low),
            (self._high, put, high),
        ]
        num_filled = int(self._num_filled[0]) + len(put)
        if num_filled <= len(self._slots) // 2:
            places = self._free_places(self._slots, self._homes(low))
            writes += [
                (self._slots, self._places[removed], np.full(len(removed), _REMOVED, np.int32)),
                (self._slots, places, put.astype(np.int32)),
            ]
        else:
            kept = self._places != NO_BLOCK
            kept[removed] = False
            put, low = np.concatenate([np.flatnonzero(kept), put]), np.concatenate([self._low[kept], low])
            fresh = np.full_like(self._slots, NO_BLOCK)
            places = self._free_places(fresh, self._homes(low))
            fresh[places] = put
            num_filled = len(put)
            writes.append((self._slots, np.arange(len(fresh)), fresh))
        return [*writes, (self._places, put, places), (self._num_filled, 0, num_filled)]

    def check(self, blocks: Int64Array) -> None:
        """Raise AssertionError unless exactly these blocks, in ascending order, are found by their digests."""
        require(np.array_equal(np.flatnonzero(self._places != NO_BLOCK), blocks), "the index has other blocks")
        require(np.array_equal(self._slots[self._places[blocks]], blocks), "the index has a block in another place")
        keys = np.stack([self._low[blocks], self._high[blocks]], axis=1)
        require(np.array_equal(self.find(keys), blocks), "the index does not find a block")
        filled = np.count_nonzero(self._slots != NO_BLOCK)
        require(filled == self._num_filled[0], "the index counts its slots wrongly")

    def _homes(self, low: Int64Array) -> Int64Array:
        return low & (len(self._slots) - 1)

    def _next(self, places: Int64Array) -> Int64Array:
        return (places + 1) & (len(self._slots) - 1)

    def _free_places(self, slots: npt.NDArray[np.int32], homes: Int64Array) -> Int64Array:
        """The first empty slot at or behind each home, all different."""
        places, moved = homes, np.zeros(len(homes), bool)
        while True:
            # Of those that meet in a slot the last one stays: one that was there before.
            order = np.argsort(~moved, kind="stable")
            moved = slots[places] != NO_BLOCK
            moved[order] |= self._tally.repeated(places[order])
            if not np.count_nonzero(moved):
                return places
            places = np.where(moved, self._next(places), places)
