"""Holders: the blocks of other groups of layers that have the same tokens as a block of the leading group."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...commit import Write
from ..groups import LayerGroups
from ..ids import Int64Array
from .digests import Digests
from .index import NO_BLOCK


class Held(NamedTuple):
    """Which blocks of all groups a commit makes findable, or finds.

    Attributes
    ----------
    blocks : (num_groups, n) int64
        The blocks that can be found for each block of the commit; negative where there is none.
    is_new : (num_groups, n) bool
        Which of them become findable; those of the leading group are not among them.
    kept, serials : (n,) int64
        The block of the leading group, and the number of its contents.
    digests : (n,) DIGEST
        Those of its contents.
    """

    blocks: Int64Array
    is_new: npt.NDArray[np.bool]
    kept: Int64Array
    serials: Int64Array
    digests: Digests


class Holders:
    """For each findable block of the leading group, the blocks of the others with the same tokens.

    Contents have a number, the serial. A holder counts as long as it has the serial of the block that it is for: it
    loses it when it is evicted, and the other block has a new one when it holds something else.

    Parameters
    ----------
    groups : LayerGroups
    num_blocks : int

    Attributes
    ----------
    group_of : (num_blocks,) int64
        The group of each findable block.
    """

    def __init__(self, groups: LayerGroups, num_blocks: int) -> None:
        self._leader, self._num_groups = groups.leader, len(groups.groups)
        self._blocks = np.full(self._num_groups * num_blocks, NO_BLOCK)
        self._starts = np.arange(self._num_groups)[:, None] * num_blocks
        self.group_of = np.zeros(num_blocks, np.int64)

    def are_leaders(self, blocks: Int64Array) -> npt.NDArray[np.bool]:
        """Which findable blocks belong to the leading group, (n,) bool."""
        return np.asarray(self.group_of[blocks] == self._leader)

    def of(self, leaders: Int64Array, serials: Int64Array) -> Int64Array:
        """The blocks of all groups for blocks of the leading one, (num_groups, n), NO_BLOCK where there is none.

        `serials` has the number of the contents of each block, (num_blocks,).
        """
        blocks = self._blocks[self._starts + leaders]
        blocks[self._leader] = leaders
        blocks[serials[blocks] != serials[leaders]] = NO_BLOCK
        return blocks

    def hold(
        self,
        own: Int64Array,
        kept: Int64Array,
        kept_serials: Int64Array,
        digests: Digests,
        serials: Int64Array,
        are_all_new: bool,
    ) -> Held:
        """Choose the block of each group that is found from now on: the one found already, or the first of the commit.

        Parameters
        ----------
        own : (num_groups, n) int64
            The blocks that the rows of the commit have now; negative where a window has passed them.
        kept : (n,) int64
            The block of the leading group that is found from now on, or NO_BLOCK.
        kept_serials : (n,) int64
            The serial of each; any where there is no block.
        digests : (n,) DIGEST
        serials : (num_blocks,) int64
            The serials of all blocks before the commit.
        are_all_new : bool
            Whether the blocks of the leading group are stored, each once.
        """
        if are_all_new:  # most commits: each row keeps its own blocks
            is_new = own >= 0
            is_new[self._leader] = False
            return Held(own, is_new, kept, kept_serials, digests)
        found = self.of(kept, serials)
        found[:, serials[kept] != kept_serials] = NO_BLOCK  # those that the commit makes findable have no holders yet
        candidates = np.where(found == NO_BLOCK, np.maximum(own, NO_BLOCK), found)
        candidates[self._leader] = kept
        candidates[:, kept == NO_BLOCK] = NO_BLOCK
        # Without the -1, a group would have the key of block N - 1 in the group before it.
        keys = np.where(kept == NO_BLOCK, NO_BLOCK, self._starts + kept).reshape(-1)
        blocks = candidates.reshape(-1)
        there = (blocks != NO_BLOCK).nonzero()[0]
        if not len(there):
            return Held(candidates, np.zeros_like(candidates, np.bool), kept, kept_serials, digests)
        different, firsts = np.unique(keys[there], return_index=True)
        firsts = there[firsts]
        is_new = np.zeros(len(blocks), np.bool)
        is_new[firsts] = found.reshape(-1)[firsts] == NO_BLOCK
        is_new.reshape(candidates.shape)[self._leader] = False
        if len(firsts) < len(blocks):
            places = different.searchsorted(keys).clip(max=len(different) - 1)
            blocks = np.where(different[places] == keys, blocks[firsts[places]], NO_BLOCK)
        return Held(blocks.reshape(candidates.shape), is_new.reshape(candidates.shape), kept, kept_serials, digests)

    def plan(self, held: Held) -> list[Write]:
        """Name the holders of each block of the leading group, or that there is none.

        What an earlier block had in its place may be a holder in another group now, with the same serial.
        """
        kept = (held.kept != NO_BLOCK).nonzero()[0]
        groups, i = held.is_new.nonzero()
        return [
            (self._blocks, (self._starts + held.kept[kept]).reshape(-1), held.blocks[:, kept].reshape(-1)),
            (self.group_of, held.blocks[groups, i], groups),
        ]
