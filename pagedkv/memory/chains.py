"""Chains: which tokens of each sequence are known, and which of its blocks the prefix cache can find."""

from __future__ import annotations

import numpy as np

from ..commit import Write
from .ids import NO_BLOCKS, Int32Array, Int64Array, must_hold, spans
from .pool import BlockPool
from .prefix.cache import PrefixCache
from .prefix.digests import DIGEST
from .prefix.index import NO_BLOCK
from .prefix.prompt import Prompt

_WORTH_A_COPY = 2  # copy a block if at least one token in this many is found


class Chains:
    """For each row: how many of its first tokens are known by their ids, how many of its first blocks can be found.

    A chain begins with the root digest of the sequence's salt. Methods called `plan_...` change nothing: they return
    what to store.

    Parameters
    ----------
    cache : PrefixCache
    pool : BlockPool
    max_seqs : int
        Rows of the table.
    """

    def __init__(self, cache: PrefixCache, pool: BlockPool, max_seqs: int) -> None:
        self.cache, self._pool = cache, pool
        self.num_known = np.zeros(max_seqs, np.int64)
        self.num_found = np.zeros(max_seqs, np.int64)
        self._roots, self._salts = np.zeros(max_seqs, DIGEST), np.full(max_seqs, None)

    def share(self, prompt: Prompt) -> tuple[int, Int64Array, Int64Array]:
        """Look up a prompt: how many tokens are found, the blocks to share, and the block to copy in part, if any."""
        if prompt.tokens is None:
            return 0, NO_BLOCKS, NO_BLOCKS
        found, size = self.cache.find(prompt.tokens, prompt.root), self.cache.block_size
        if not len(found):
            return 0, NO_BLOCKS, NO_BLOCKS
        num_found = len(found) * size
        if num_found < prompt.num_tokens:
            block, num_more = self.cache.find_part(int(found[-1]), prompt.tokens[num_found:-1])
        else:  # the last token is computed again, into a copy of its block, which others may find meanwhile
            found, block, num_more = found[:-1], int(found[-1]), size - 1
            num_found -= size
        # The pool evicts no block in use, and none at all while it has blank ones.
        num_new = -(-prompt.num_tokens // size) - len(found)
        stays = num_new <= self._pool._num_blank or self._pool._refs[block]
        if _WORTH_A_COPY * num_more < size or not stays:
            return num_found, found, NO_BLOCKS
        return num_found + num_more, found, np.array([block])

    def plan_start(self, row: int, num_known: int, num_found: int, prompt: Prompt) -> list[Write]:
        """Start a sequence in a row."""
        index = np.array([row])
        return [
            (self.num_known, row, num_known),
            (self.num_found, row, num_found),
            (self._roots, index, np.frombuffer(prompt.root, DIGEST)),
            (self._salts, index, np.array([prompt.salt], object)),
        ]

    def plan_tokens(
        self, rows: Int64Array, num_known: Int64Array, slots: Int64Array, tokens: Int32Array
    ) -> list[Write]:
        """Put tokens into slots, and set how many tokens of each row are known."""
        return [(self.cache.tokens, slots, tokens), (self.num_known, rows, num_known)]

    def plan_shorten(self, rows: Int64Array, lens: Int64Array) -> list[Write]:
        """Cut each row down to `lens` tokens."""
        return [
            (self.num_known, rows, np.minimum(self.num_known[rows], lens)),
            (self.num_found, rows, np.minimum(self.num_found[rows], lens // self.cache.block_size)),
        ]

    def plan_copy(self, rows: Int64Array, parents: Int64Array) -> list[Write]:
        """Copy the chain of each row's parent."""
        return [(state, rows, state[parents]) for state in (self.num_known, self.num_found, self._roots, self._salts)]

    def plan_clear(self) -> list[Write]:
        """Make the tokens of all rows unknown, so that none of their blocks is ever found."""
        rows = np.arange(len(self.num_known))
        return [(state, rows, np.zeros_like(rows)) for state in (self.num_known, self.num_found)]

    def uncommitted(self, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The rows with full blocks that `commit` has yet to store, and from which column to which, exclusive."""
        first, full = self.num_found[rows], self.num_known[rows] // self.cache.block_size
        uncommitted = (full > first).nonzero()[0]
        return rows[uncommitted], first[uncommitted], full[uncommitted]

    def plan_store(
        self, blocks: Int32Array, rows: Int64Array, first: Int64Array, full: Int64Array
    ) -> tuple[bool, list[Write]]:
        """Make the blocks in columns first..full-1 of each row findable.

        Where a block with the same tokens can be found already, the row takes that one instead.

        Parameters
        ----------
        blocks : (max_seqs, num_columns) int32
            The table.
        rows, first, full : (num_rows,) int64
            There is at least one row, and at least one column of each.

        Returns
        -------
        keep_theirs : bool
            Whether all rows keep their own blocks.
        writes : list
        """
        table, cache = blocks.reshape(-1), self.cache
        counts = full - first if np.count_nonzero(full - first > 1) else None
        entries = rows * blocks.shape[1] + first
        above, roots, salts = table[entries - 1].astype(np.int64), None, None
        if not first[first.argmin()]:
            above[first == 0], roots, salts = NO_BLOCK, self._roots[rows], self._salts[rows]
        if counts is not None:
            entries = spans(entries, counts)
        uncommitted = table[entries].astype(np.int64)
        stored = cache.to_store(uncommitted, counts, above, roots, salts, self._pool._refs)
        if len(stored.blocks) == len(uncommitted):
            return True, [*self._pool._plan(stored=stored)[1], (self.num_found, rows, full)]
        other = (stored.kept != uncommitted) & (stored.kept != NO_BLOCK)
        owners = np.arange(len(rows)).repeat(full - first)
        found = first + np.bincount(owners, stored.kept != NO_BLOCK, len(rows)).astype(np.int64)
        known = np.where(found < full, found * cache.block_size, self.num_known[rows])
        return False, [
            *self._pool._plan(dropped=uncommitted[other], gained=stored.kept[other], stored=stored)[1],
            (table, entries[other], stored.kept[other].astype(np.int32)),
            (self.num_known, rows, known),
            (self.num_found, rows, found),
        ]

    def check(self, lens: Int64Array, blocks: Int32Array) -> None:
        """Raise AssertionError unless every block that should be found is, and no more tokens are known than exist."""
        must_hold((self.num_known <= lens).all(), "more tokens are known than there are")
        must_hold(
            (self.num_found * self.cache.block_size <= self.num_known).all(), "a block is found by unknown tokens"
        )
        for row in self.num_found.nonzero()[0]:
            found = blocks[row, : self.num_found[row]].astype(np.int64)
            must_hold(self.cache.follows(found, self._roots[row].tobytes()), "a block that can be found is not")
