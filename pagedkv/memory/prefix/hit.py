"""Hit: the blocks that a prompt finds, in each group of layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..groups import LayerGroups
from ..ids import NO_BLOCKS, Int64Array
from .index import NO_BLOCK


class Hit(NamedTuple):
    """A beginning of a prompt whose K and V need not be computed again.

    Attributes
    ----------
    num_tokens : int
        Its length.
    num_columns : int
        Full blocks in it, those that windows have passed included.
    columns : (num_groups, num_columns) int64
        The blocks to share; NO_BLOCK before `first`.
    first : (num_groups,) int64
        The first column that the query behind it sees; empty without windows.
    blocks : (n,) int64
        All blocks of `columns`.
    copied : (num_groups,) int64
        The block behind them that holds the rest of the tokens and is copied, if there are more; else empty.
    num_matched : int
        With states: how many tokens are in blocks that are found, though no snapshot may be behind them.
    """

    num_tokens: int
    num_columns: int
    columns: Int64Array
    first: Int64Array
    blocks: Int64Array
    copied: Int64Array
    num_matched: int = 0

    @classmethod
    def of(cls, groups: LayerGroups, found: Int64Array, num_tokens: int, copied: Int64Array) -> Hit | None:
        """The hit of num_tokens tokens in columns, unless a group lacks a block that the query behind it sees.

        `found`, (num_groups, num_columns), has NO_BLOCK where a group lacks the block.
        """
        num_columns = found.shape[1]
        if not groups.has_windows:
            first, blocks = NO_BLOCKS, found.reshape(-1)
        else:
            first = groups.seen_columns(num_tokens)
            seen = np.arange(num_columns) >= first[:, None]
            blocks, found = found[seen], np.where(seen, found, NO_BLOCK)
        if len(groups.groups) > 1 and np.count_nonzero(blocks == NO_BLOCK):
            return None
        return cls(num_tokens, num_columns, found, first, blocks, copied)

    @classmethod
    def longest(cls, groups: LayerGroups, found: Int64Array) -> Hit:
        """The longest hit in full blocks, `found` as in `of`.

        A gap of a group ends the hits whose last query sees it; where the window has passed it, longer ones begin.
        """
        num_columns = found.shape[1]
        if len(groups.groups) > 1 and np.count_nonzero(gaps := found == NO_BLOCK):
            columns = np.arange(num_columns)
            last_gap = np.maximum.accumulate(np.where(gaps, columns, -1), axis=1)
            possible = (last_gap < groups.seen_columns((columns + 1) * groups.block_size)).all(axis=0)
            num_columns = int((possible * (columns + 1)).max(initial=0))
        if not num_columns:
            return NO_HIT
        hit = cls.of(groups, found[:, :num_columns], num_columns * groups.block_size, NO_BLOCKS)
        assert hit is not None
        return hit


NO_HIT = Hit(0, 0, np.empty((0, 0), np.int64), NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)
