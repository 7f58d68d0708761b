"""HashIndex: a hash table from digests to blocks."""

from __future__ import annotations

from struct import Struct

import numpy as np

from ...commit import Write
from ..ids import Int64Array, must_hold
from .digests import DIGEST, Digests

NO_BLOCK = -1  # an empty slot
_REMOVED = -2  # a slot whose block is gone; a probe goes on past it
_ROOM = 32  # slots per block, at least
_FULL = 16  # at most one slot in 16 is filled
_FEW = 24  # digests that take less time one by one
_NO_DIGESTS, _NO_PLACES = np.empty(0, DIGEST), np.empty(0, np.int64)
_REMOVED_SLOT, _NO_PLACE = np.array([_REMOVED], np.int32), np.array([NO_BLOCK])
_TWO_BOOLS = np.dtype(np.int16)
_KEY = Struct("=qq")


class HashIndex:
    """Finds blocks by their 128-bit digests: a hash table in arrays, with open addressing and linear probing.

    Before more than a sixteenth of the slots are filled, those of removed blocks included, the table is rebuilt: O(N)
    for every N or more blocks put into it. Array operations probe all digests once; for the few that need another
    probe, scalars take less time.

    Parameters
    ----------
    num_blocks : int
        N.
    """

    def __init__(self, num_blocks: int) -> None:
        num_slots = 1 << (_ROOM * num_blocks - 1).bit_length()
        self._slots = np.full(num_slots, NO_BLOCK, np.int32)
        self._num_filled = np.array([0])
        self._digests = np.zeros(num_blocks, DIGEST)
        self._keys = _keys(self._digests)
        self._places = np.full(num_blocks, NO_BLOCK, np.int64)
        # Scalar indexing of memoryviews takes half as long as that of arrays.
        self._views = self._slots.data, self._keys.reshape(-1).data

    def digests(self, blocks: Int64Array) -> Digests:
        """The digests under which blocks last entered the index, or that `plan_name` gave them."""
        return self._digests.take(blocks)

    def plan_name(self, blocks: Int64Array, digests: Digests) -> list[Write]:
        """Give digests to blocks that are not in the index."""
        return [(self._digests, blocks, digests)]

    def find_one(self, digest: bytes) -> int:
        """The block with a digest, or NO_BLOCK."""
        return self._probe(*_KEY.unpack(digest))[0]

    def find(self, digests: Digests) -> tuple[Int64Array, Int64Array]:
        """Look up digests, and where each of them is or could be put.

        Returns
        -------
        blocks : (n,) int64
            The block of each, or NO_BLOCK.
        places : (n,) int64
            Its slot, or the empty one where the search ended.
        """
        mask, keys = len(self._slots) - 1, _keys(digests)
        places = keys[:, 0] & mask
        blocks = self._slots.take(places).astype(np.int64)
        others = (blocks != NO_BLOCK).nonzero()[0]
        while len(others) > _FEW:
            taken = blocks.take(others)
            differs = self._keys.take(taken, axis=0, mode="clip") != keys.take(others, axis=0)
            others = others[(differs.view(_TWO_BOOLS)[:, 0] != 0) | (taken == _REMOVED)]
            places[others] = behind = places.take(others) + 1 & mask
            blocks[others] = taken = self._slots.take(behind)
            others = others[taken != NO_BLOCK]
        if len(others):
            for i, key in zip(others.tolist(), keys.take(others, axis=0).tolist(), strict=True):
                blocks[i], places[i] = self._probe(*key)
        return blocks, places

    @staticmethod
    def are_distinct(places: Int64Array) -> bool:
        """Whether all slots are different."""
        ordered = np.sort(places)
        return not np.count_nonzero(ordered[1:] == ordered[:-1])

    def distinct_slots(self, places: Int64Array) -> Int64Array:
        """Choose different slots for digests, of the slots where `find` ended: for equal ones, empty slots behind."""
        return _distinct_slots(self._views[0], places)

    def _probe(self, first: int, second: int) -> tuple[int, int]:
        slots, keys = self._views
        mask = len(slots) - 1
        place = first & mask
        while (block := slots[place]) != NO_BLOCK and not (
            block >= 0 and keys[2 * block] == first and keys[2 * block + 1] == second
        ):
            place = place + 1 & mask
        return block, place

    def plan(
        self, removed: Int64Array, put: Int64Array, digests: Digests = _NO_DIGESTS, places: Int64Array = _NO_PLACES
    ) -> list[Write]:
        """Take blocks out, and put others in under digests that no block has.

        Parameters
        ----------
        removed, put : (m,), (n,) int64
            Blocks, each named once; the first ones are in the index, the others not.
        digests : (n,) DIGEST
            Those of `put`, all different.
        places : (n,) int64
            The slots for them, from `distinct_slots`.
        """
        writes: list[Write] = []
        if len(removed):
            writes = [
                (self._slots, self._places.take(removed), _REMOVED_SLOT.repeat(len(removed))),
                (self._places, removed, _NO_PLACE.repeat(len(removed))),
            ]
        if not len(put):
            return writes
        writes.append((self._digests, put, digests))
        # An existing digest keeps its slot; its old block is among `removed`.
        num_empty = np.count_nonzero(self._slots.take(places) == NO_BLOCK) if len(removed) else len(put)
        num_filled = int(self._num_filled[0]) + int(num_empty)
        if num_filled <= len(self._slots) // _FULL:
            writes.append((self._slots, places, put.astype(np.int32)))
        else:
            kept = self._places != NO_BLOCK
            kept[removed] = False
            low = np.concatenate([self._keys[kept, 0], _keys(digests)[:, 0]])
            put = np.concatenate([np.flatnonzero(kept), put])
            num_filled, fresh = len(put), np.full_like(self._slots, NO_BLOCK)
            places = _distinct_slots(fresh.data, low & (len(fresh) - 1))
            fresh[places] = put
            writes.append((self._slots, np.arange(len(fresh)), fresh))
        return [*writes, (self._places, put, places), (self._num_filled, 0, num_filled)]

    def check(self, blocks: Int64Array) -> None:
        """Raise AssertionError unless exactly these blocks, in ascending order, are found by their digests."""
        must_hold(np.array_equal(np.flatnonzero(self._places != NO_BLOCK), blocks), "the index has other blocks")
        must_hold(np.array_equal(self._slots[self._places[blocks]], blocks), "the index has a block in another place")
        must_hold(np.array_equal(self.find(self.digests(blocks))[0], blocks), "the index does not find a block")
        filled = np.count_nonzero(self._slots != NO_BLOCK)
        must_hold(filled == self._num_filled[0], "the index counts its slots wrongly")


def _keys(digests: Digests) -> Int64Array:
    """View digests as two integers each, (n, 2) int64."""
    return digests.view(np.int64).reshape(-1, 2)


def _distinct_slots(slots: memoryview, places: Int64Array) -> Int64Array:
    """Make places different: keep the first of equal ones, and move the others to empty slots."""
    order = places.argsort(kind="stable")
    ordered = places.take(order)
    again = order[1:][ordered[1:] == ordered[:-1]].tolist()
    if not again:
        return places
    chosen, mask, places = {*ordered.tolist()}, len(slots) - 1, places.copy()
    for i in again:
        place = int(places[i])
        while place in chosen or slots[place] != NO_BLOCK:
            place = place + 1 & mask
        chosen.add(place)
        places[i] = place
    return places
