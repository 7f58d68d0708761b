"""Rows: what a call changes in the blocks, the length and the chain of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ...commit import Write
from ..arguments import as_ints
from ..block_ids import NO_BLOCKS, joined
from ..prefix.index import NO_BLOCK
from ..prefix.prompt import Prompt
from ..spans import owned_spans, spans
from .copy_on_write import NO_COPIES, UNUSED, pairs, plan_writable
from .handles import Int64Array
from .recent import Recent
from .state import Int32Array, RowState

P = ParamSpec("P")
Plan = TypeVar("Plan", bound=tuple[Any, ...])
_EMPTY_ENTRY = np.array([UNUSED], np.int32)
_IN_ORDER: Any = slice(None)
_WORTH_A_COPY = 2  # copy a block if at least one token in this many is found


class Rows(RowState):
    """What a call changes in the rows of a SequenceTable.

    Methods called `plan_...` change nothing: they return what to store. A call stores what one of them returns.
    """

    def plan_add(
        self, prompt: Prompt, reserve: int | None = None, *, again: bool = False
    ) -> tuple[int, int, Int64Array, list[Write]]:
        """Start a sequence: its handle, how many of its tokens were found, the copies to make, and what to store.

        With `reserve` it starts with the found tokens alone, if all would fit with that many blocks to spare. `again`
        says that a request had these tokens in the cache before, so that finding them is no hit of another's.
        """
        num_tokens, cache, size = prompt.num_tokens, self.prefix_cache, self.block_size
        if num_tokens > self.max_seq_len:
            raise ValueError(
                f"num_tokens must be at most max_blocks * block_size = {self.max_seq_len}, got {num_tokens}"
            )
        rows, [seq], writes = self.handles.plan_issue(1)
        num_cached, shared, copied = self._share(prompt)
        if reserve is not None:
            self.pool._require(self._num_taken(num_tokens, shared) + reserve, self.pool.num_free)
            num_tokens = num_cached
        new_blocks, allocation = self.pool._plan(self.num_blocks(num_tokens) - len(shared), gained=shared, num_seqs=1)
        blocks = joined(shared, new_blocks)
        table, grown = self._with_columns(len(blocks))
        row = int(rows[0])
        first = row * table.shape[1]
        writes += [
            *grown,
            *allocation,
            (self.lens, row, num_tokens),
            (table.reshape(-1), np.arange(first, first + len(blocks)), blocks.astype(np.int32)),
        ]
        if cache is not None:
            tokens, num_known = prompt.tokens, 0
            if tokens is not None:
                num_known = num_tokens
                writes += cache.plan_tokens(new_blocks, tokens[len(shared) * size : num_tokens])
                writes += cache.plan_count(prompt.num_tokens, num_cached, again=again)
            writes += self.chains.plan_start(row, num_known, len(shared), prompt.root)
        return seq, num_cached, pairs(copied, new_blocks[: len(copied)]), writes

    def to_copy(
        self, read: Callable[[Int64Array], object], plan: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs
    ) -> Plan:
        """Plan copies that run before the commit.

        Blocks that they overwrite stop being findable first: an interrupted copy must not leave a findable block with
        wrong contents. `read` gets the copies before that; if it raises what copying would raise, nothing changes.
        """
        while True:
            planned = plan(*args, **kwargs)
            if self.prefix_cache is None or not len(planned[-2]):
                return planned
            destinations = planned[-2][:, 1]
            findable = destinations[self.prefix_cache.is_findable(destinations)]
            if not len(findable):
                return planned
            read(planned[-2])
            self.pool._commit(self.pool._plan(forgotten=findable)[1])

    def can_add(self, prompt: Prompt, reserve: int) -> bool:
        """Whether a sequence fits with `reserve` blocks to spare."""
        _, shared, _ = self._share(prompt)
        needed = self._num_taken(prompt.num_tokens, shared) + reserve
        return prompt.num_tokens <= self.max_seq_len and needed <= self.pool.num_free and self.handles.num_free > 0

    def num_cached(self, prompt: Prompt) -> int:
        """How many tokens of a prompt `plan_add` would find."""
        return self._share(prompt)[0]

    def plan_hold(self, prompt: Prompt) -> tuple[int, int, list[Write]]:
        """Start a sequence of the blocks that are found, and no more: its handle, its length, and what to store."""
        rows, [seq], writes = self.handles.plan_issue(1)
        row, cache, tokens = int(rows[0]), self.prefix_cache, prompt.tokens
        blocks = NO_BLOCKS if cache is None or tokens is None else cache.find(tokens, prompt.root)
        length = len(blocks) * self.block_size
        table, grown = self._with_columns(len(blocks))
        return (
            seq,
            length,
            [
                *writes,
                *grown,
                *self.pool._plan(gained=blocks, num_seqs=1)[1],
                (self.lens, row, length),
                (table.reshape(-1), row * table.shape[1] + np.arange(len(blocks)), blocks.astype(np.int32)),
                *self.chains.plan_start(row, length, len(blocks), prompt.root),
            ],
        )

    def plan_append(
        self, seqs: Any, n: Any, tokens: Int32Array | None = None
    ) -> tuple[Int64Array, Int64Array, list[Write]]:
        """Add tokens to the end of sequences: their slots, the copies to make, and what to store."""
        rows, is_step = self.handles.find_distinct(seqs), type(n) is int and n == 1
        recent = self._recent_of(rows) if is_step else None
        if (
            recent is not None
            and recent.longest < self.blocks.shape[1] * self.block_size
            and (tokens is None or recent.is_known)
        ):
            return self._plan_next(recent, tokens)
        lens = self.lens[rows]
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
        if num_columns > self.blocks.shape[1]:  # do not widen the table for blocks that the pool lacks
            num_added = int((self.num_blocks(ends) - self.num_blocks(lens)).sum())
            self.pool._require(num_added, self.pool.num_free)
        table, grown = self._with_columns(num_columns)
        first = lens // self.block_size
        if is_step:
            # The general case with one token, and so one block to write, for each sequence.
            entries, positions, entry_of_token = rows * table.shape[1] + first, lens, _IN_ORDER
        else:
            num_written = np.where(num_new > 0, self.num_blocks(ends) - first, 0)
            entries = spans(rows * table.shape[1] + first, num_written)
            owners, positions = owned_spans(lens, num_new)
            first_entry = np.cumsum(num_written) - num_written
            entry_of_token = (first_entry - first)[owners] + positions // self.block_size

        blocks, copies, writes = plan_writable(self.pool, table.reshape(-1), entries)
        slots = blocks[entry_of_token] * self.block_size + positions % self.block_size
        writes = [*grown, *writes, (self.lens, rows, ends)]
        _require_one_each(tokens, slots)
        all_known = False
        if self.prefix_cache is not None:
            if len(copies):
                writes += self.prefix_cache.plan_copy(copies)
            if tokens is not None:
                known = self.chains.num_known[rows]
                are_known = known == lens
                all_known = np.count_nonzero(are_known) == len(rows)
                writes.append((self.prefix_cache.tokens, slots, tokens))
                writes += self.chains.plan_known(rows, known + are_known * num_new)
        if is_step and len(rows):
            is_known = tokens is not None and all_known
            writes.append(self._plan_recent(rows, ends, slots, longest, False, is_known, None))
        return slots, copies, writes

    def _plan_next(self, recent: Recent, tokens: Int32Array | None) -> tuple[Int64Array, Int64Array, list[Write]]:
        """`plan_append` of one token each to the sequences of the last step: most of them go on in their block."""
        rows, full, size = recent.rows, recent.full, self.block_size
        ends, slots = recent.lens + 1, recent.slots + 1
        writes: list[Write] = []
        tables, width = recent.tables, recent.longest // size + 1
        if tables is None:
            tables = self.blocks[rows, :width]
        elif tables.shape[1] < width:
            narrow, tables = tables, np.full((len(rows), width), UNUSED, np.int32)
            tables[:, :-1] = narrow
        if len(full):
            new_blocks, writes = self.pool._plan(len(full))
            slots[full] = new_blocks * size
            columns, ids = recent.full_columns, new_blocks.astype(np.int32)
            writes += [
                (self._entries, recent.full_rows * self.blocks.shape[1] + columns, ids),
                (tables.reshape(-1), full * width + columns, ids),
            ]
        _require_one_each(tokens, slots)
        writes.append((self.lens, rows, ends))
        if tokens is not None and self.prefix_cache is not None:
            writes.append((self.prefix_cache.tokens, slots, tokens))
            writes += self.chains.plan_known(rows, ends)
        is_known = tokens is not None
        are_committed = recent.late is False and is_known
        writes.append(self._plan_recent(rows, ends, slots, recent.longest + 1, are_committed, is_known, tables))
        return slots, NO_COPIES, writes

    def _plan_recent(
        self,
        rows: Int64Array,
        lens: Int64Array,
        slots: Int64Array,
        longest: int,
        are_committed: bool,
        is_known: bool,
        tables: Int32Array | None,
    ) -> Write:
        """Keep what the next step needs of this one; `are_committed` if only its own full blocks wait for `commit`."""
        offsets = lens & self.block_size - 1 if self.block_size.bit_count() == 1 else lens % self.block_size
        change, full = self.pool._num_changes[0] + 1, (offsets == 0).nonzero()[0]
        late = bool(len(full)) if are_committed else None
        at_end = full, rows.take(full), lens.take(full) // self.block_size
        # The caller may write to its slots.
        return (self._recent, 0, Recent(change, late, rows, lens, slots.copy(), longest, *at_end, is_known, tables))

    def plan_fork(self, seqs: Any, n: int) -> tuple[list[int], list[Write]]:
        """Start n sequences like each of some: their handles, and what to store."""
        parents = self.handles.find(seqs)
        rows, handles, writes = self.handles.plan_issue(len(parents) * n)
        num_seqs = len(parents) if self.handles.differ(parents) else 0
        width, counts = self.blocks.shape[1], self.num_blocks(self.lens[parents])
        blocks = self._entries.take(spans(parents * width, counts))
        writes += self.pool._plan(gained=blocks.astype(np.int64), times=n, num_seqs=num_seqs)[1]
        if n != 1:
            parents, counts = parents.repeat(n), counts.repeat(n)
            blocks = self._entries.take(spans(parents * width, counts))
        return handles, [
            *writes,
            (self.lens, rows, self.lens[parents]),
            (self._entries, spans(rows * width, counts), blocks),
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
        """Make full blocks of sequences findable; where another findable block has the same tokens, take that one."""
        rows, cache, chains = self.handles.find_distinct(seqs), self.prefix_cache, self.chains
        if cache is None:
            return []
        recent, seen = self._recent_of(rows), []
        if recent is not None:
            seen = [(self._recent, 0, Recent(recent.change + 1, False, *recent[2:]))]
        counts: Int64Array | None = None
        if recent is None or recent.late is None:
            first, full = chains.num_found[rows], chains.num_known[rows] // self.block_size
            late = (full > first).nonzero()[0]
            if not len(late):
                return seen
            rows, first, full = rows[late], first[late], full[late]
            if np.count_nonzero(full - first > 1):
                counts = full - first
        elif recent.late:
            rows, full = recent.full_rows, recent.full_columns
            first = full - 1
        else:
            return []
        entries = rows * self.blocks.shape[1] + first
        above, roots = self._entries[entries - 1].astype(np.int64), None
        if not first[first.argmin()]:
            above[first == 0], roots = NO_BLOCK, chains.roots(rows)
        if counts is not None:
            entries = spans(entries, counts)
        blocks = self._entries[entries].astype(np.int64)
        stored = cache.to_store(blocks, counts, above, roots, self.pool._refs)
        if len(stored.blocks) == len(blocks):
            return [*self.pool._plan(stored=stored)[1], *chains.plan_found(rows, full), *seen]
        other = (stored.kept != blocks) & (stored.kept != NO_BLOCK)
        owners = np.arange(len(rows)).repeat(full - first)
        found = first + np.bincount(owners, stored.kept != NO_BLOCK, len(rows)).astype(np.int64)
        known = np.where(found < full, found * self.block_size, chains.num_known[rows])
        return [
            *self.pool._plan(dropped=blocks[other], gained=stored.kept[other], stored=stored)[1],
            (self._entries, entries[other], stored.kept[other].astype(np.int32)),
            *chains.plan_known(rows, known),
            *chains.plan_found(rows, found),
        ]

    def _with_columns(self, num_columns: int) -> tuple[Int32Array, list[Write]]:
        """A table with at least num_columns columns, and what to store if it is a wider one."""
        num_rows, before = self.blocks.shape
        if num_columns <= before:
            return self.blocks, []
        wide = np.full((num_rows, min(self.max_blocks, max(num_columns, 2 * before))), UNUSED, np.int32)
        wide[:, :before] = self.blocks
        return wide, [(vars(self), "blocks", wide)]

    def _share(self, prompt: Prompt) -> tuple[int, Int64Array, Int64Array]:
        """How many tokens of a prompt are found, the blocks to share, and the one to copy, if there is one."""
        if self.prefix_cache is None or prompt.tokens is None:
            return 0, NO_BLOCKS, NO_BLOCKS
        found = self.prefix_cache.find(prompt.tokens, prompt.root)
        if not len(found):
            return 0, NO_BLOCKS, NO_BLOCKS
        num_found = len(found) * self.block_size
        if num_found < prompt.num_tokens:
            block, num_more = self.prefix_cache.find_part(int(found[-1]), prompt.tokens[num_found:-1])
        else:  # the last token is computed again, and others may find its block meanwhile: write to a copy
            found, block, num_more = found[:-1], int(found[-1]), self.block_size - 1
            num_found -= self.block_size
        # The pool evicts no block in use, and none at all while it has blank ones.
        num_new = self.num_blocks(prompt.num_tokens) - len(found)
        stays = num_new <= self.pool._num_blank or self.pool._refs[block]
        if _WORTH_A_COPY * num_more < self.block_size or not stays:
            return num_found, found, NO_BLOCKS
        return num_found + num_more, found, np.array([block])

    def _num_taken(self, num_tokens: int, shared: Int64Array) -> int:
        """Free blocks that a sequence takes: new ones, and shared ones without references, which count as free."""
        return int(self.num_blocks(num_tokens)) - len(shared) + int(np.count_nonzero(self.pool._refs[shared] == 0))

    def _plan_drop(self, rows: Int64Array, lens: Int64Array, forgotten: Int64Array = NO_BLOCKS) -> list[Write]:
        """Shorten each row to its first `lens` tokens, and release the blocks past them."""
        num_kept = self.num_blocks(lens)
        entries = spans(rows * self.blocks.shape[1] + num_kept, self.num_blocks(self.lens[rows]) - num_kept)
        blocks = self._entries.take(entries).astype(np.int64)
        return [
            *self.pool._plan(dropped=blocks, forgotten=forgotten, num_seqs=len(rows))[1],
            (self._entries, entries, _EMPTY_ENTRY.repeat(len(entries))),
            (self.lens, rows, lens),
            *self.chains.plan_shorten(rows, lens, lens // self.block_size),
        ]


def _require_one_each(tokens: Int32Array | None, slots: Int64Array) -> None:
    if tokens is not None and len(tokens) != len(slots):
        raise ValueError(
            f"tokens must have shape (num_new_tokens,) = ({len(slots)},), got {tokens.shape}: n says how many each "
            f"sequence gets, one if it is not given"
        )
