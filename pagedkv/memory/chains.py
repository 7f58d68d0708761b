"""Chains: which tokens of each sequence are known, and which of its blocks the prefix cache can find."""

from __future__ import annotations

import numpy as np

from ..commit import Write
from .groups import LayerGroups
from .ids import UNUSED, Int32Array, Int64Array, must_hold, spans
from .pool import BlockPool
from .prefix.cache import PrefixCache
from .prefix.digests import DIGEST
from .prefix.hit import NO_HIT, Hit
from .prefix.index import NO_BLOCK
from .prefix.prompt import Prompt
from .states import StateSlots

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
    groups : LayerGroups
    states : StateSlots or None
        Without a snapshot behind them, blocks are no hit then.

    Attributes
    ----------
    num_clears : (1,) int64
        How often all tokens have become unknown: copies of sequences from before must not say what theirs are.
    """

    def __init__(
        self, cache: PrefixCache, pool: BlockPool, max_seqs: int, groups: LayerGroups, states: StateSlots | None = None
    ) -> None:
        self.cache, self._pool, self._groups, self._states = cache, pool, groups, states
        self._num_groups, self._first_line = len(groups.groups), groups.leader * max_seqs
        self._group_starts = (np.arange(self._num_groups)[:, None] - groups.leader) * max_seqs
        self.num_known = np.zeros(max_seqs, np.int64)
        self.num_found = np.zeros(max_seqs, np.int64)
        self.num_clears = np.zeros(1, np.int64)
        self._roots, self.salts = np.zeros(max_seqs, DIGEST), np.full(max_seqs, None)

    def share(self, prompt: Prompt) -> Hit:
        """The longest beginning of a prompt, but for its last token, whose K and V can be used as they are."""
        if prompt.tokens is None:
            return NO_HIT
        found, size = self.cache.find(prompt.tokens, prompt.root), self.cache.block_size
        if not len(found):
            return NO_HIT
        if self._states is not None:  # the state behind a part of a block is nowhere
            found = found[: (prompt.num_tokens - 1) // size]
            with_state = self._states.longest(self._groups, self.cache.columns(found))
            return with_state._replace(num_matched=len(found) * size)
        columns, num_columns, num_found = self.cache.columns(found), len(found), len(found) * size
        if num_found < prompt.num_tokens:
            block, num_more = self.cache.find_part(int(found[-1]), prompt.tokens[num_found:-1])
        else:  # the last token is computed again, into a copy of its block, which others may find meanwhile
            block, num_more, num_columns = int(found[-1]), size - 1, num_columns - 1
        columns = columns[:, :num_columns]
        if _WORTH_A_COPY * num_more >= size:
            copied = self.cache.columns(np.array([block]))[:, 0]
            # The pool evicts no block in use, and none at all while it has blank ones.
            num_new = self._num_groups * (-(-prompt.num_tokens // size) - num_columns)
            stays = num_new <= self._pool._num_blank
            if self._groups.leader_is_full:  # else a new block may end the chain that leads to the one to copy
                stays = stays or np.count_nonzero(self._pool._refs[copied]) == len(copied)
            if stays and not np.count_nonzero(copied == NO_BLOCK):
                hit = Hit.of(self._groups, columns, num_columns * size + num_more, copied)
                if hit is not None:
                    return hit
        return Hit.longest(self._groups, columns)

    def full_blocks(self, prompt: Prompt) -> Hit:
        """The longest beginning of a prompt in full blocks that is found, with all that finding it again takes."""
        assert prompt.tokens is not None
        found = self.cache.columns(self.cache.find(prompt.tokens, prompt.root))
        leader, states = self._groups.leader, self._states
        hit = Hit.longest(self._groups, found) if states is None else states.longest(self._groups, found)
        if not self._groups.leader_is_full and hit.num_columns:  # the chain from the root, though no query sees it
            columns, first = hit.columns.copy(), hit.first.copy()
            columns[leader], first[leader] = found[leader, : hit.num_columns], 0
            hit = hit._replace(columns=columns, first=first, blocks=columns[columns != NO_BLOCK].astype(np.int64))
        return hit

    def plan_start(self, row: int, num_known: int, hit: Hit, prompt: Prompt) -> list[Write]:
        """Start a sequence in a row."""
        index = np.array([row])
        return [
            (self.num_known, row, num_known),
            (self.num_found, row, hit.num_columns),
            (self._roots, index, np.frombuffer(prompt.root, DIGEST)),
            (self.salts, index, np.array([prompt.salt], object)),
            *self.cache.plan_found(hit.blocks),
        ]

    def plan_tokens(
        self, rows: Int64Array, num_known: Int64Array, slots: Int64Array, tokens: Int32Array
    ) -> list[Write]:
        """Put tokens into slots, (num_groups, n) with several groups, and set how many tokens of rows are known."""
        slots = slots if self._num_groups == 1 else slots[self._groups.leader]
        return [(self.cache.tokens, slots, tokens), (self.num_known, rows, num_known)]

    def plan_shorten(self, rows: Int64Array, lens: Int64Array) -> list[Write]:
        """Cut each row down to `lens` tokens."""
        return [
            (self.num_known, rows, np.minimum(self.num_known[rows], lens)),
            (self.num_found, rows, np.minimum(self.num_found[rows], lens // self.cache.block_size)),
        ]

    def plan_copy(self, rows: Int64Array, parents: Int64Array) -> list[Write]:
        """Copy the chain of each row's parent."""
        return [(state, rows, state[parents]) for state in (self.num_known, self.num_found, self._roots, self.salts)]

    def plan_clear(self) -> list[Write]:
        """Make the tokens of all rows unknown, so that none of their blocks is ever found."""
        rows = np.arange(len(self.num_known))
        cleared = [(state, rows, np.zeros_like(rows)) for state in (self.num_known, self.num_found)]
        return [*cleared, (self.num_clears, 0, int(self.num_clears[0]) + 1)]

    def plan_pass(self, lines: Int64Array, first: Int64Array) -> list[Write]:
        """Make the tokens of rows unknown whose chain ends here: a window has passed blocks before they were stored.

        Parameters
        ----------
        lines, first : (num_lines,) int64
            Lines of the table, group by group, and the first column that each of them keeps.
        """
        if self._groups.leader_is_full:
            return []
        rows, first = (x.reshape(self._num_groups, -1)[self._groups.leader] for x in (lines - self._first_line, first))
        ends = first > np.maximum(self.num_found[rows] - 1, 0)
        if not np.count_nonzero(ends):
            return []
        return [(self.num_known, rows[ends], self.num_found[rows[ends]] * self.cache.block_size)]

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
        blocks : (num_groups * max_seqs, num_columns) int32
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
        entries = (rows + self._first_line) * blocks.shape[1] + first
        above, roots, salts = table[entries - 1].astype(np.int64), None, None
        if not first[first.argmin()]:
            above[first == 0], roots, salts = NO_BLOCK, self._roots[rows], self.salts[rows]
        if counts is not None:
            entries = spans(entries, counts)
        uncommitted = table[entries].astype(np.int64)
        entries_of_groups, own = entries, None
        if self._num_groups > 1:
            entries_of_groups = (self._group_starts * blocks.shape[1] + entries).reshape(-1)
            own = table[entries_of_groups].astype(np.int64).reshape(self._num_groups, -1)
        stored = cache.to_store(uncommitted, counts, above, roots, salts, self._pool._refs, own)
        keeps = stored.kept if stored.held is None else stored.held.blocks.reshape(-1)
        theirs = uncommitted if own is None else own.reshape(-1)
        other = (keeps != theirs) & (keeps != NO_BLOCK) & (theirs != UNUSED)
        if len(stored.blocks) == len(uncommitted) and not np.count_nonzero(other):
            return True, [*self._pool._plan(stored=stored)[1], (self.num_found, rows, full)]
        owners = np.arange(len(rows)).repeat(full - first)
        found = first + np.bincount(owners, stored.kept != NO_BLOCK, len(rows)).astype(np.int64)
        known = np.where(found < full, found * cache.block_size, self.num_known[rows])
        are_shared = np.count_nonzero(self._pool._refs[stored.blocks] > 1)
        return False, [
            *self._pool._plan(dropped=theirs[other], gained=keeps[other], stored=stored)[1],
            *(cache.plan_adopted() if are_shared else []),
            (table, entries_of_groups[other], keeps[other].astype(np.int32)),
            (self.num_known, rows, known),
            (self.num_found, rows, found),
        ]

    def check(self, lens: Int64Array, blocks: Int32Array) -> None:
        """Raise AssertionError unless every block that should be found is, and no more tokens are known than exist."""
        must_hold((self.num_known <= lens).all(), "more tokens are known than there are")
        must_hold(
            (self.num_found * self.cache.block_size <= self.num_known).all(), "a block is found by unknown tokens"
        )
        of_groups, rows = blocks.reshape(self._num_groups, len(lens), -1), np.arange(len(lens))
        above = of_groups[self._groups.leader, rows, np.maximum(self.num_found - 1, 0)]
        goes_on = (self.num_known == lens) | (self.num_known // self.cache.block_size > self.num_found)
        must_hold(
            ((above != UNUSED) | ~goes_on | (lens == 0)).all(),
            "a window has passed the block that the next one is stored behind",
        )
        for row in self.num_found.nonzero()[0]:
            columns = of_groups[:, row, : self.num_found[row]].astype(np.int64)
            must_hold(self.cache.follows(columns, self._roots[row].tobytes()), "a block that can be found is not")
