"""Rows: the blocks, the length and the chain of each sequence, and what a call changes in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..commit import Write
from .checks import MAX_INT64, as_int, as_ints, require
from .copy_on_write import UNUSED, pairs, plan_writable
from .handles import NO_HANDLE, Handles, Int64Array
from .pool import NO_BLOCKS, BlockPool
from .prefix.cache import PrefixCache
from .prefix.chains import Chains
from .prefix.index import NO_BLOCK
from .prefix.prompt import Prompt

Int32Array = npt.NDArray[np.int32]
P = ParamSpec("P")
Plan = TypeVar("Plan", bound=tuple[Any, ...])
_EMPTY_ENTRY = np.array([UNUSED], np.int32)
_ENTRIES_PER_BLOCK = 4  # of a table that nothing has made wider yet, together for all sequences
_MIN_COLUMNS = 16
_IN_ORDER: Any = slice(None)
_WORTH_A_COPY = 2  # so many tokens that are found in a block fill it


class Rows:
    """The state of a SequenceTable, one row for each sequence, without its guard.

    Methods called `plan_...` change nothing: they return what is to be stored. Of each, a call uses one.

    Parameters
    ----------
    pool : BlockPool
    block_size, max_seqs, max_blocks : int
    prefix_cache : PrefixCache or None
    """

    def __init__(
        self, pool: BlockPool, block_size: int, max_seqs: int, max_blocks: int, prefix_cache: PrefixCache | None
    ) -> None:
        self.pool, self.block_size, self.max_blocks = pool, block_size, max_blocks
        self.prefix_cache = pool._prefix_cache = prefix_cache
        num_columns = max(_MIN_COLUMNS, -(-_ENTRIES_PER_BLOCK * pool.num_blocks // max_seqs))
        self.blocks = np.full((max_seqs, min(max_blocks, num_columns)), UNUSED, np.int32)
        self._offsets = np.arange(block_size)
        self.lens = np.zeros(max_seqs, np.int64)
        self.handles = Handles(max_seqs)
        self.chains = Chains(max_seqs)

    @property
    def max_seq_len(self) -> int:
        """Tokens that one sequence can have."""
        return self.max_blocks * self.block_size

    def num_blocks(self, length: Any) -> Any:
        """Blocks of a sequence, or of each."""
        return (length + (self.block_size - 1)) // self.block_size

    def find_one(self, seq: int) -> int:
        """The row of a sequence."""
        return int(self.handles.find(as_int("seq", seq, minimum=None))[0])

    def tables_of(self, rows: Int64Array) -> Int32Array:
        """The block tables of rows, as wide as the longest needs."""
        return self.blocks[rows, : self.num_blocks(self.lens[rows].max(initial=1))]

    def lens_of(self, rows: Int64Array) -> Int32Array:
        """The lengths of rows."""
        return self.lens[rows].astype(np.int32)

    def slots_of(self, row: int, start: int, stop: int) -> Int64Array:
        """The slots of some tokens of a row."""
        logical, offset = np.divmod(np.arange(start, stop), self.block_size)
        return self.blocks[row].take(logical) * np.int64(self.block_size) + offset

    def plan_add(self, prompt: Prompt, reserve: int | None = None) -> tuple[int, int, Int64Array, list[Write]]:
        """Start a sequence: its handle, how many of its tokens were found, the copies to make, and what to store.

        With `reserve` it starts with those that were found, if all tokens have room and so many blocks stay free.
        """
        num_tokens, cache, size = prompt.num_tokens, self.prefix_cache, self.block_size
        if num_tokens > self.max_seq_len:
            raise ValueError(
                f"num_tokens must be at most max_blocks * block_size = {self.max_seq_len}, got {num_tokens}"
            )
        rows, [seq], writes = self.handles.plan_issue(1)
        num_cached, shared, copied, forgotten = self._share(prompt)
        if reserve is not None:
            self.pool._require(self._num_taken(num_tokens, shared) + reserve, self.pool.num_free)
            num_tokens = num_cached
            if size == 1:  # the last token has a block of its own
                shared, copied, forgotten = shared[:num_cached], NO_BLOCKS, NO_BLOCKS
        new_blocks, allocation = self.pool._plan(
            self.num_blocks(num_tokens) - len(shared), gained=shared, forgotten=forgotten
        )
        blocks = np.concatenate([shared, new_blocks])
        table, grown = self._with_columns(len(blocks))
        first = int(rows[0]) * table.shape[1]
        writes += [
            *grown,
            *allocation,
            (self.lens, rows, np.array([num_tokens])),
            (table.reshape(-1), np.arange(first, first + len(blocks)), blocks.astype(np.int32)),
        ]
        if cache is not None:
            tokens, num_known = prompt.tokens, 0
            if tokens is not None:
                start, num_known = len(shared) * size, num_tokens
                slots = blocks[len(shared) :, None] * size + self._offsets
                writes += [(cache.tokens, slots.reshape(-1)[: num_tokens - start], tokens[start:num_tokens])]
                writes += cache.plan_count(prompt.num_tokens, num_cached)
            writes += self.chains.plan_start(rows, num_known, len(shared) - len(forgotten), prompt.root)
        return seq, num_cached, pairs(copied, new_blocks[: len(copied)]), writes

    def to_copy(
        self, read: Callable[[Int64Array], object], plan: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs
    ) -> Plan:
        """A plan of which copies are made before it is stored: where they go, nothing can be found any longer.

        Otherwise a copy that is cut short would leave a block that can be found with contents of another one. `read`
        gets the copies before: where it raises, as the copying would before it has written anything, nothing changes.
        """
        while True:
            planned = plan(*args, **kwargs)
            destinations = planned[-2][:, 1]
            if self.prefix_cache is None or not len(destinations):
                return planned
            findable = destinations[self.prefix_cache.is_findable(destinations)]
            if not len(findable):
                return planned
            read(planned[-2])
            self.pool._commit(self.pool._plan(forgotten=findable)[1])

    def can_add(self, prompt: Prompt, reserve: int) -> bool:
        """Whether there is room for a sequence, and for so many blocks more."""
        _, shared, _, _ = self._share(prompt)
        needed = self._num_taken(prompt.num_tokens, shared) + reserve
        return prompt.num_tokens <= self.max_seq_len and needed <= self.pool.num_free and self.handles.num_free > 0

    def num_cached(self, prompt: Prompt) -> int:
        """How many of the tokens of a prompt would be found."""
        return self._share(prompt)[0]

    def plan_hold(self, prompt: Prompt) -> tuple[int, int, list[Write]]:
        """Start a sequence of the blocks that are found, and no more: its handle, its length, and what to store."""
        rows, [seq], writes = self.handles.plan_issue(1)
        cache, tokens = self.prefix_cache, prompt.tokens
        blocks = NO_BLOCKS if cache is None or tokens is None else cache.find(tokens, prompt.root)
        length = len(blocks) * self.block_size
        table, grown = self._with_columns(len(blocks))
        return (
            seq,
            length,
            [
                *writes,
                *grown,
                *self.pool._plan(gained=blocks)[1],
                (self.lens, rows, np.array([length])),
                (table.reshape(-1), int(rows[0]) * table.shape[1] + np.arange(len(blocks)), blocks.astype(np.int32)),
                *self.chains.plan_start(rows, length, len(blocks), prompt.root),
            ],
        )

    def plan_append(
        self, seqs: Any, n: Any, tokens: Int32Array | None = None
    ) -> tuple[Int64Array, Int64Array, list[Write]]:
        """Add tokens to the end of sequences: their slots, the copies to make, and what to store."""
        rows = self.handles.find_distinct(seqs)
        lens, is_step = self.lens[rows], type(n) is int and n == 1
        num_new: Any = 1 if is_step else self.per_seq("n", n, len(rows))
        ends = lens + (1 if is_step else np.minimum(num_new, self.max_seq_len + 1))
        longest = int(ends.max(initial=0))
        if longest > self.max_seq_len:
            i = int((ends > self.max_seq_len).argmax())
            raise ValueError(
                f"n must be at most {self.max_seq_len - lens[i]}, what is left of max_blocks * block_size = "
                f"{self.max_seq_len} for sequence {self.handles.of(rows)[i]}, got {1 if is_step else num_new[i]}"
            )
        num_columns = self.num_blocks(longest)
        if num_columns > self.blocks.shape[1]:  # no wider table for blocks that are not there
            num_added = int((self.num_blocks(ends) - self.num_blocks(lens)).sum())
            self.pool._require(num_added, self.pool.num_free)
        table, grown = self._with_columns(num_columns)
        first = lens // self.block_size
        if is_step:
            # The general case with one token, and so one block to write, for each sequence.
            entries, positions, entry_of_token = rows * table.shape[1] + first, lens, _IN_ORDER
        else:
            num_written = np.where(num_new > 0, self.num_blocks(ends) - first, 0)
            owners, columns = ragged(first, num_written)
            entries = rows[owners] * table.shape[1] + columns
            owners, positions = ragged(lens, num_new)
            first_entry = np.cumsum(num_written) - num_written
            entry_of_token = (first_entry - first)[owners] + positions // self.block_size

        blocks, copies, writes = plan_writable(self.pool, table.reshape(-1), entries)
        slots = blocks[entry_of_token] * self.block_size + positions % self.block_size
        writes = [*grown, *writes, (self.lens, rows, ends)]
        if tokens is not None and len(tokens) != len(slots):
            raise ValueError(f"tokens must have shape (num_new_tokens,) = ({len(slots)},), got {tokens.shape}")
        if self.prefix_cache is not None:
            if len(copies):
                writes += self.prefix_cache.plan_copy(copies)
            if tokens is not None:
                known = self.chains.num_known[rows]
                writes.append((self.prefix_cache.tokens, slots, tokens))
                writes += self.chains.plan_known(rows, known + (known == lens) * num_new)
        return slots, copies, writes

    def plan_fork(self, seqs: Any, n: int) -> tuple[list[int], list[Write]]:
        """Start n sequences like each of some: their handles, and what to store."""
        parents = self.handles.find(seqs).repeat(n)
        rows, handles, writes = self.handles.plan_issue(len(parents))
        lens = self.lens[parents]
        owners, columns = ragged(np.zeros_like(lens), self.num_blocks(lens))
        blocks = self.blocks[parents[owners], columns]
        return handles, [
            *self.pool._plan(gained=blocks.astype(np.int64))[1],
            *writes,
            (self.lens, rows, lens),
            (self._entries, rows[owners] * self.blocks.shape[1] + columns, blocks),
            *self.chains.plan_copy(rows, parents),
        ]

    def plan_reorder(self, seqs: Any, parents: Any) -> list[Write]:
        """Let each sequence have the tokens of another of them."""
        rows = self.handles.find_distinct(seqs)
        parents = as_ints("parents", parents, len(rows), "num_seqs")
        wrong = (parents < 0) | (parents >= len(rows))
        if wrong.any():
            raise IndexError(f"parents must be in 0..num_seqs-1 = 0..{len(rows) - 1}, got {parents[wrong][0]}")
        sources = rows[parents]
        rows, sources = rows[rows != sources], sources[rows != sources]
        lens = self.lens[sources]
        width = int(self.num_blocks(max(lens.max(initial=0), self.lens[rows].max(initial=0))))
        before, after = self.blocks[rows, :width], self.blocks[sources, :width]
        held = [blocks[blocks != UNUSED].astype(np.int64) for blocks in (before, after)]
        entries = rows[:, None] * self.blocks.shape[1] + np.arange(width)
        return [
            *self.pool._plan(dropped=held[0], gained=held[1])[1],
            (self._entries, entries.reshape(-1), after.reshape(-1)),
            (self.lens, rows, lens),
            *self.chains.plan_copy(rows, sources),
        ]

    def plan_truncate(self, seqs: Any, length: Any) -> list[Write]:
        """Shorten sequences."""
        rows = self.handles.find_distinct(seqs)
        lens = self.lens[rows]
        length = self.per_seq("length", length, len(rows))
        longer = length > lens
        if longer.any():
            i = int(longer.argmax())
            raise ValueError(
                f"length must be at most the {lens[i]} tokens of sequence {self.handles.of(rows)[i]}, got {length[i]}"
            )
        return self._plan_drop(rows, length)

    def plan_take_back(self, seqs: Any, n: Any) -> list[Write]:
        """Shorten sequences by as many tokens as `plan_append` has added."""
        rows = self.handles.find_distinct(seqs)
        return self._plan_drop(rows, self.lens[rows] - self.per_seq("n", n, len(rows)))

    def plan_free(self, seqs: Any) -> list[Write]:
        """End sequences."""
        rows = self.handles.find_distinct(seqs)
        return [*self._plan_drop(rows, np.zeros_like(rows)), *self.handles.plan_retire(rows)]

    def plan_reset(self, seqs: Any) -> list[Write]:
        """End sequences, and let no block be found any longer."""
        rows, cache = self.handles.find_distinct(seqs), self.prefix_cache
        findable = NO_BLOCKS if cache is None else cache.findable()
        return [
            *self._plan_drop(rows, np.zeros_like(rows), findable),
            *self.handles.plan_retire(rows),
            *self.chains.plan_clear(),
            *(cache.plan_cleared() if cache is not None else []),
        ]

    def plan_commit(self, seqs: Any) -> list[Write]:
        """Let the full blocks of sequences be found, those that were found before replaced by what was there."""
        rows, cache, chains = self.handles.find_distinct(seqs), self.prefix_cache, self.chains
        if cache is None:
            return []
        first, full = chains.num_found[rows], chains.num_known[rows] // self.block_size
        late = np.flatnonzero(full > first)
        if not len(late):
            return []
        rows, first, full = rows[late], first[late], full[late]
        counts = full - first
        entries = rows * self.blocks.shape[1] + first
        above = self._entries[entries - 1].astype(np.int64)
        above[first == 0] = NO_BLOCK
        owners = np.arange(len(rows))
        if counts.max() > 1:
            owners, entries = ragged(entries, counts)
        blocks = self._entries[entries].astype(np.int64)
        stored = cache.to_store(blocks, counts, above, chains.roots(rows), self.pool._refs)
        if len(stored.blocks) == len(blocks):
            return [*self.pool._plan(stored=stored)[1], *chains.plan_found(rows, full)]
        other = (stored.kept != blocks) & (stored.kept != NO_BLOCK)
        found = first + np.bincount(owners, stored.kept != NO_BLOCK, len(rows)).astype(np.int64)
        known = np.where(found < full, found * self.block_size, chains.num_known[rows])
        return [
            *self.pool._plan(dropped=blocks[other], gained=stored.kept[other], stored=stored)[1],
            (self._entries, entries[other], stored.kept[other].astype(np.int32)),
            *chains.plan_known(rows, known),
            *chains.plan_found(rows, found),
        ]

    def block_fills(self) -> Int32Array:
        """How many slots of each block hold a token of some sequence, (N,)."""
        owners, columns = ragged(np.zeros_like(self.lens), self.num_blocks(self.lens))
        fills = np.zeros(self.pool.num_blocks, np.int32)
        tokens = np.minimum(self.lens[owners] - columns * self.block_size, self.block_size)
        np.maximum.at(fills, self.blocks[owners, columns], tokens.astype(np.int32))
        return fills

    def block_owners(self) -> Int64Array:
        """The handle of a sequence that has each block, (N,); -1 for a block that none has."""
        rows, columns = ragged(np.zeros_like(self.lens), self.num_blocks(self.lens))
        owners = np.full(self.pool.num_blocks, NO_HANDLE)
        owners[self.blocks[rows, columns]] = self.handles.of(rows)
        return owners

    def wasted_slots(self) -> int:
        """Slots of used blocks that hold no token of any sequence."""
        # Only the last block of a sequence is partly full.
        rows = np.flatnonzero(self.lens % self.block_size)
        columns, fills = np.divmod(self.lens[rows], self.block_size)
        blocks = self.blocks[rows, columns]
        alone = self.pool._refs[blocks] == 1
        wasted = int((self.block_size - fills[alone]).sum())
        if not alone.all():
            # A shared one wastes what the longest of its owners leaves, unless somebody has it in full.
            blocks, owners = np.unique(blocks[~alone], return_inverse=True)
            longest = np.zeros(len(blocks), np.int64)
            np.maximum.at(longest, owners, fills[~alone])
            all_partial = np.bincount(owners, minlength=len(blocks)) == self.pool._refs[blocks]
            wasted += int((self.block_size - longest)[all_partial].sum())
        return wasted

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds, the pool's included."""
        self.pool.check()
        self.handles.check()
        live = self.handles.live
        require((self.lens >= 0).all() and (self.lens <= self.max_seq_len).all(), "a length is out of range")
        require(not self.lens[~live].any(), "a row without a sequence has a length")
        require(self.num_blocks(self.lens.max()) <= self.blocks.shape[1], "a sequence is longer than its row")
        used = np.arange(self.blocks.shape[1]) < self.num_blocks(self.lens)[:, None]
        blocks = self.blocks[used]
        require((self.blocks[~used] == UNUSED).all(), "an entry past the end of a sequence is not -1")
        require(((blocks >= 0) & (blocks < self.pool.num_blocks)).all(), "an entry is no block")
        ordered = np.sort(np.where(used, self.blocks, ~np.arange(self.blocks.shape[1])), axis=1)
        require((ordered[:, 1:] != ordered[:, :-1]).all(), "a block occurs twice in one sequence")
        references = np.bincount(blocks, minlength=self.pool.num_blocks)
        require(np.array_equal(references, self.pool.ref_counts), "reference counts differ from the table's entries")
        chains = self.chains
        require((chains.num_known <= self.lens).all(), "more tokens are known than there are")
        require((chains.num_found * self.block_size <= chains.num_known).all(), "a block is found by unknown tokens")
        if self.prefix_cache is not None:
            roots = chains.roots(np.arange(len(self.lens)))
            for blocks, num_found, root in zip(self.blocks, chains.num_found.tolist(), roots, strict=True):
                found = blocks[:num_found].astype(np.int64)
                require(self.prefix_cache.follows(found, root.tobytes()), "a block that can be found is not")

    @staticmethod
    def per_seq(name: str, value: Any, num_seqs: int) -> Int64Array:
        """One int of at least 0 for each sequence."""
        if isinstance(value, (int, np.integer)):
            return np.full(num_seqs, as_int(name, value, maximum=MAX_INT64))
        values = as_ints(name, value, num_seqs, "num_seqs")
        if values.min(initial=0) < 0:
            raise ValueError(f"{name} must be at least 0, got {values.min()}")
        return values

    @property
    def _entries(self) -> Int32Array:
        return self.blocks.reshape(-1)

    def _with_columns(self, num_columns: int) -> tuple[Int32Array, list[Write]]:
        """The table with at least so many columns, and what makes a wider one the table."""
        num_rows, before = self.blocks.shape
        if num_columns <= before:
            return self.blocks, []
        wide = np.full((num_rows, min(self.max_blocks, max(num_columns, 2 * before))), UNUSED, np.int32)
        wide[:, :before] = self.blocks
        return wide, [(vars(self), "blocks", wide)]

    def _share(self, prompt: Prompt) -> tuple[int, Int64Array, Int64Array, Int64Array]:
        """How many tokens of a prompt are found, and the blocks to share, to copy, and to make unfindable."""
        if self.prefix_cache is None or prompt.tokens is None:
            return 0, NO_BLOCKS, NO_BLOCKS, NO_BLOCKS
        found = self.prefix_cache.find(prompt.tokens, prompt.root)
        num_found = len(found) * self.block_size
        if not num_found:
            return 0, found, NO_BLOCKS, NO_BLOCKS
        if num_found < prompt.num_tokens:
            block, num_more = self.prefix_cache.find_part(int(found[-1]), prompt.tokens[num_found:-1])
            # Nothing evicts a block that is in use, nor any while others are blank.
            num_new = self.num_blocks(prompt.num_tokens) - len(found)
            stays = num_new <= self.pool._num_blank or self.pool._refs[block]
            if _WORTH_A_COPY * num_more < self.block_size or not stays:
                return num_found, found, NO_BLOCKS, NO_BLOCKS
            return num_found + num_more, found, np.array([block]), NO_BLOCKS
        # The last token is computed again, into a block that can be found: its only owner takes it over.
        if self.pool._refs[found[-1]]:
            return num_found - 1, found[:-1], found[-1:], NO_BLOCKS
        return num_found - 1, found, NO_BLOCKS, found[-1:]

    def _num_taken(self, num_tokens: int, shared: Int64Array) -> int:
        """Free blocks that a sequence takes which shares some: those that nobody uses are free, too."""
        return int(self.num_blocks(num_tokens)) - len(shared) + int(np.count_nonzero(self.pool._refs[shared] == 0))

    def _plan_drop(self, rows: Int64Array, lens: Int64Array, forgotten: Int64Array = NO_BLOCKS) -> list[Write]:
        """Release the blocks of each row past its first tokens, of which so many stay."""
        num_kept = self.num_blocks(lens)
        owners, columns = ragged(num_kept, self.num_blocks(self.lens[rows]) - num_kept)
        entries = (rows * self.blocks.shape[1]).take(owners) + columns
        blocks = self._entries.take(entries).astype(np.int64)
        return [
            *self.pool._plan(dropped=blocks, forgotten=forgotten)[1],
            (self._entries, entries, _EMPTY_ENTRY.repeat(len(entries))),
            (self.lens, rows, lens),
            *self.chains.plan_shorten(rows, lens, lens // self.block_size),
        ]


def ragged(starts: Array, counts: Array) -> tuple[Int64Array, Int64Array]:
    """The integers starts[i], ..., starts[i] + counts[i] - 1 for each i in turn, and the i of each.

    Returns
    -------
    owners, values : (counts.sum(),) int64
    """
    owners = np.arange(len(counts)).repeat(counts)
    begins = counts.cumsum() - counts
    return owners, np.arange(len(owners)) + (starts - begins).take(owners)
