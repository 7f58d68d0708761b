"""SequenceRows: arrays with a row for each sequence, and what each call changes in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from ..commit import Write
from .append import NO_COPIES, UNUSED, LastStep, pairs, plan_writable, require_one_each
from .arguments import per_seq
from .chains import Chains
from .handles import Handles
from .ids import NO_BLOCKS, Int32Array, Int64Array, joined, must_hold, owned_spans, spans
from .pool import BlockPool
from .prefix.cache import PrefixCache
from .prefix.prompt import Prompt

P = ParamSpec("P")
_EMPTY_ENTRY = np.array([UNUSED], np.int32)
_IN_ORDER: Any = slice(None)
_ENTRIES_PER_BLOCK = 4  # in a new table, all rows together
_MIN_COLUMNS = 16


class StartPlan(NamedTuple):
    """How a sequence starts: its handle, how many of its tokens are found, the copies to make, and what to store."""

    seq: int
    num_cached: int
    copies: Int64Array
    writes: list[Write]


class AppendPlan(NamedTuple):
    """How sequences grow: the slots of the new tokens, the copies to make, and what to store."""

    slots: Int64Array
    copies: Int64Array
    writes: list[Write]


Plan = TypeVar("Plan", StartPlan, AppendPlan)


class SequenceRows:
    """The block table and the length of each sequence, one row each; `chains` has what is known of their tokens.

    Methods called `plan_...` change nothing: they return what to store. Each public call stores one such plan.

    Parameters
    ----------
    pool : BlockPool
    block_size, max_seqs, max_blocks : int
    prefix_cache : PrefixCache or None
        Without one there are no chains.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, max_seqs: int, max_blocks: int, prefix_cache: PrefixCache | None
    ) -> None:
        self.pool, self.block_size, self.max_blocks = pool, block_size, max_blocks
        num_columns = max(_MIN_COLUMNS, -(-_ENTRIES_PER_BLOCK * pool.num_blocks // max_seqs))
        self.blocks = np.full((max_seqs, min(max_blocks, num_columns)), UNUSED, np.int32)
        self.lens = np.zeros(max_seqs, np.int64)
        self.handles = Handles(max_seqs)
        self.chains: Chains | None = None
        if prefix_cache is not None:  # otherwise another cache over the same pool may have set one
            pool._prefix_cache = prefix_cache
            self.chains = Chains(prefix_cache, pool, max_seqs)
        self._last_step: list[LastStep | None] = [None]

    @property
    def max_len(self) -> int:
        """Tokens that a row has room for."""
        return self.max_blocks * self.block_size

    @property
    def entries(self) -> Int32Array:
        """All rows one after the other, as a view."""
        return self.blocks.reshape(-1)

    def num_blocks(self, length: Any) -> Any:
        """Blocks that a sequence of some length needs, or each of several."""
        return (length + (self.block_size - 1)) // self.block_size

    def held(self) -> tuple[Int64Array, Int64Array]:
        """The row and the column of each entry that is a block."""
        return owned_spans(np.zeros_like(self.lens), self.num_blocks(self.lens))

    def tables_of(self, rows: Int64Array) -> tuple[Int32Array, int, Int32Array]:
        """The block tables of rows, as wide as the longest sequence needs, its length, and all lengths."""
        last_step = self.last_step_of(rows)
        if last_step is None or last_step.tables is None:
            lens = self.lens[rows].astype(np.int32)
            longest = int(lens.max(initial=0))
            return self.blocks[rows, : self.num_blocks(longest or 1)], longest, lens
        return last_step.tables.copy(), last_step.longest, last_step.lens.astype(np.int32)

    def last_step_of(self, rows: Int64Array) -> LastStep | None:
        """The record of the last step, if it was one of exactly these rows and nothing has changed since."""
        last_step = self._last_step[0]
        # Handles returns the same array object as long as callers name the same sequences.
        if last_step is None or last_step.rows is not rows or last_step.change != self.pool._num_changes[0]:
            return None
        return last_step

    def share(self, prompt: Prompt) -> tuple[int, Int64Array, Int64Array]:
        """As `Chains.share`; without a prefix cache nothing is found."""
        return (0, NO_BLOCKS, NO_BLOCKS) if self.chains is None else self.chains.share(prompt)

    def can_add(self, prompt: Prompt, reserve: int) -> bool:
        """Whether a sequence fits and leaves `reserve` blocks free."""
        needed = self.num_taken(prompt.num_tokens, self.share(prompt)[1]) + reserve
        return prompt.num_tokens <= self.max_len and needed <= self.pool.num_free and self.handles.num_free > 0

    def num_taken(self, num_tokens: int, shared: Int64Array) -> int:
        """Free blocks that a sequence takes: new ones, and shared ones without references, which count as free."""
        return int(self.num_blocks(num_tokens)) - len(shared) + int(np.count_nonzero(self.pool._refs[shared] == 0))

    def plan_add(self, prompt: Prompt, reserve: int | None = None, *, preempted: bool = False) -> StartPlan:
        """Start a sequence.

        With `reserve` it starts with the found tokens alone, if all would fit with that many blocks to spare. A
        `preempted` request mostly finds its own tokens, so they are counted separately.
        """
        num_tokens = prompt.num_tokens
        if num_tokens > self.max_len:
            raise ValueError(f"num_tokens must be at most max_blocks * block_size = {self.max_len}, got {num_tokens}")
        [row], [seq], writes = self.handles.plan_issue(1)
        num_cached, shared, copied = self.share(prompt)
        if reserve is not None:
            self.pool._require(self.num_taken(num_tokens, shared) + reserve, self.pool.num_free)
            num_tokens = num_cached
        new_blocks, allocation = self.pool._plan(self.num_blocks(num_tokens) - len(shared), gained=shared, num_seqs=1)
        writes += [*allocation, *self.plan_row(int(row), num_tokens, joined(shared, new_blocks))]
        if self.chains is not None:
            tokens = prompt.tokens
            if tokens is not None:
                cache = self.chains.cache
                writes += cache.plan_tokens(new_blocks, tokens[len(shared) * self.block_size : num_tokens])
                writes += cache.plan_count(prompt.num_tokens, num_cached, preempted=preempted)
            num_known = 0 if tokens is None else num_tokens
            writes += self.chains.plan_start(int(row), num_known, len(shared), prompt)
        return StartPlan(seq, num_cached, pairs(copied, new_blocks[: len(copied)]), writes)

    def plan_copying(
        self, read: Callable[[Int64Array], object], plan: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs
    ) -> Plan:
        """Call `plan` with the arguments, for a caller who makes its copies before it stores its writes.

        Blocks that the copies overwrite stop being findable first: an interrupted copy must not leave a findable block
        with wrong contents. `read` gets the copies before that; if it raises what copying would raise, nothing changes.
        """
        while True:
            planned = plan(*args, **kwargs)
            if self.chains is None or not len(planned.copies):
                return planned
            destinations = planned.copies[:, 1]
            findable = destinations[self.chains.cache.is_findable(destinations)]
            if not len(findable):
                return planned
            read(planned.copies)
            self.pool._commit(self.pool._plan(forgotten=findable)[1])

    def plan_pin(self, prompt: Prompt) -> tuple[int, int, list[Write]]:
        """Plan a sequence of the blocks that a prompt finds, and no others: its handle, its length and the writes."""
        [row], [seq], writes = self.handles.plan_issue(1)
        if self.chains is None or prompt.tokens is None:
            raise ValueError("a pin keeps what can be found, and a cache with prefix_cache=False finds nothing")
        blocks = self.chains.cache.find(prompt.tokens, prompt.root)
        if not len(blocks):
            raise ValueError(
                f"tokens must begin with a full block of {self.block_size} that can be found: commit a sequence with "
                f"them first, got {len(prompt.tokens)} tokens"
            )
        length = len(blocks) * self.block_size
        writes += self.pool._plan(gained=blocks, num_seqs=1)[1]
        writes += self.plan_row(int(row), length, blocks)
        return seq, length, [*writes, *self.chains.plan_start(int(row), length, len(blocks), prompt)]

    def plan_row(self, row: int, length: int, blocks: Int64Array) -> list[Write]:
        """Give a free row its length and its blocks."""
        table, grown = self.with_columns(len(blocks))
        first = row * table.shape[1]
        entries = np.arange(first, first + len(blocks))
        return [*grown, (self.lens, row, length), (table.reshape(-1), entries, blocks.astype(np.int32))]

    def with_columns(self, num_columns: int) -> tuple[Int32Array, list[Write]]:
        """A table with at least num_columns columns, and what to store if it is a wider one."""
        num_rows, before = self.blocks.shape
        if num_columns <= before:
            return self.blocks, []
        wide = np.full((num_rows, min(self.max_blocks, max(num_columns, 2 * before))), UNUSED, np.int32)
        wide[:, :before] = self.blocks
        return wide, [(vars(self), "blocks", wide)]

    def plan_append(self, seqs: Any, n: Any, tokens: Int32Array | None = None) -> AppendPlan:
        """Add n tokens to the end of each sequence."""
        rows, is_step, size = self.handles.find_distinct(seqs), type(n) is int and n == 1, self.block_size
        last_step = self.last_step_of(rows) if is_step else None
        if (
            last_step is not None
            and last_step.longest < self.blocks.shape[1] * size
            and (tokens is None or last_step.is_known)
        ):
            return self.plan_next(last_step, tokens)
        lens = self.lens[rows]
        num_new: Any = 1 if is_step else per_seq("n", n, len(rows))
        ends = lens + (1 if is_step else np.minimum(num_new, self.max_len + 1))
        longest = int(ends.max(initial=0))
        if longest > self.max_len:
            i = int((ends > self.max_len).argmax())
            raise ValueError(
                f"n must be at most {self.max_len - lens[i]}, what is left of max_blocks * block_size = "
                f"{self.max_len} for sequence {self.handles.of(rows)[i]}, got {1 if is_step else num_new[i]}"
            )
        num_columns = self.num_blocks(longest)
        if num_columns > self.blocks.shape[1]:  # do not widen the table if the pool lacks blocks
            num_added = int((self.num_blocks(ends) - self.num_blocks(lens)).sum())
            self.pool._require(num_added, self.pool.num_free)
        table, grown = self.with_columns(num_columns)
        first = lens // size
        if is_step:
            # As the general case below, with one token, and so one block to write, for each sequence.
            entries, positions, entry_of_token = rows * table.shape[1] + first, lens, _IN_ORDER
        else:
            num_written = np.where(num_new > 0, self.num_blocks(ends) - first, 0)
            entries = spans(rows * table.shape[1] + first, num_written)
            owners, positions = owned_spans(lens, num_new)
            first_entry = np.cumsum(num_written) - num_written
            entry_of_token = (first_entry - first)[owners] + positions // size

        blocks, copies, writes = plan_writable(self.pool, table.reshape(-1), entries)
        slots = blocks[entry_of_token] * size + positions % size
        writes = [*grown, *writes, (self.lens, rows, ends)]
        require_one_each(tokens, slots)
        all_known = False
        if self.chains is not None:
            if len(copies):
                writes += self.chains.cache.plan_copy(copies)
            if tokens is not None:
                known = self.chains.num_known[rows]
                are_known = known == lens
                all_known = np.count_nonzero(are_known) == len(rows)
                writes += self.chains.plan_tokens(rows, known + are_known * num_new, slots, tokens)
        if is_step and len(rows):
            change = self.pool._num_changes[0] + 1
            after = LastStep.after(change, rows, ends, slots, longest, size, False, all_known)
            writes.append((self._last_step, 0, after))
        return AppendPlan(slots, copies, writes)

    def plan_next(self, last_step: LastStep, tokens: Int32Array | None) -> AppendPlan:
        """`plan_append` of one token each to the sequences of the last step: most of them go on in their block."""
        slots, tables, writes = last_step.next(self.pool, self.blocks, self.block_size)
        require_one_each(tokens, slots)
        rows, ends, is_known = last_step.rows, last_step.lens + 1, tokens is not None
        writes.append((self.lens, rows, ends))
        if tokens is not None and self.chains is not None:
            writes += self.chains.plan_tokens(rows, ends, slots, tokens)
        change, all_stored = self.pool._num_changes[0] + 1, last_step.uncommitted is False and is_known
        after = LastStep.after(
            change, rows, ends, slots, last_step.longest + 1, self.block_size, all_stored, is_known, tables
        )
        writes.append((self._last_step, 0, after))
        return AppendPlan(slots, NO_COPIES, writes)

    def plan_commit(self, rows: Int64Array) -> list[Write]:
        """Make the full blocks of rows findable; where one with the same tokens exists, the row takes that one."""
        if self.chains is None:
            return []
        last_step, seen = self.last_step_of(rows), []
        if last_step is not None:
            seen = [(self._last_step, 0, LastStep(self.pool._num_changes[0] + 1, False, *last_step[2:]))]
        if last_step is None or last_step.uncommitted is None:
            rows, first, full = self.chains.uncommitted(rows)
        elif last_step.uncommitted:
            rows, first, full = last_step.full_rows, last_step.full_columns - 1, last_step.full_columns
        else:
            return []
        if not len(rows):
            return seen
        keep_theirs, writes = self.chains.plan_store(self.blocks, rows, first, full)
        return [*writes, *seen] if keep_theirs else writes

    def plan_fork(self, rows: Int64Array, parents: Int64Array, n: int) -> list[Write]:
        """Make n free rows like each parent in turn."""
        num_seqs = len(parents) if self.handles.differ(parents) else 0
        width, counts = self.blocks.shape[1], self.num_blocks(self.lens[parents])
        blocks = self.entries.take(spans(parents * width, counts))
        writes = self.pool._plan(gained=blocks.astype(np.int64), times=n, num_seqs=num_seqs)[1]
        if n != 1:
            parents, counts = parents.repeat(n), counts.repeat(n)
            blocks = self.entries.take(spans(parents * width, counts))
        entries = spans(rows * width, counts)
        return [*writes, (self.entries, entries, blocks), *self._plan_lens_of(rows, parents)]

    def plan_reorder(self, rows: Int64Array, sources: Int64Array) -> list[Write]:
        """Replace each row by a copy of its source."""
        rows, sources = rows[rows != sources], sources[rows != sources]
        lens = self.lens[[rows, sources]]
        width = int(self.num_blocks(lens.max(initial=0)))
        before, after = self.blocks[rows, :width], self.blocks[sources, :width]
        dropped, gained = (blocks[blocks != UNUSED].astype(np.int64) for blocks in (before, after))
        entries = rows[:, None] * self.blocks.shape[1] + np.arange(width)
        return [
            *self.pool._plan(dropped=dropped, gained=gained)[1],
            (self.entries, entries.reshape(-1), after.reshape(-1)),
            *self._plan_lens_of(rows, sources),
        ]

    def _plan_lens_of(self, rows: Int64Array, parents: Int64Array) -> list[Write]:
        """Give each row the length of its parent, and what is known of its tokens."""
        known = [] if self.chains is None else self.chains.plan_copy(rows, parents)
        return [(self.lens, rows, self.lens[parents]), *known]

    def plan_drop(self, rows: Int64Array, lens: Int64Array, forgotten: Int64Array = NO_BLOCKS) -> list[Write]:
        """Shorten each row to its first `lens` tokens, and release the blocks past them."""
        num_kept = self.num_blocks(lens)
        entries = spans(rows * self.blocks.shape[1] + num_kept, self.num_blocks(self.lens[rows]) - num_kept)
        blocks = self.entries.take(entries).astype(np.int64)
        return [
            *self.pool._plan(dropped=blocks, forgotten=forgotten, num_seqs=len(rows))[1],
            (self.entries, entries, _EMPTY_ENTRY.repeat(len(entries))),
            (self.lens, rows, lens),
            *([] if self.chains is None else self.chains.plan_shorten(rows, lens)),
        ]

    def plan_free(self, seqs: Any, forgotten: Int64Array = NO_BLOCKS) -> list[Write]:
        """End sequences, and make the blocks `forgotten` unfindable."""
        rows = self.handles.find_distinct(seqs)
        return [*self.plan_drop(rows, np.zeros_like(rows), forgotten), *self.handles.plan_retire(rows)]

    def plan_reset(self, seqs: Any) -> list[Write]:
        """End sequences, and make all blocks unfindable."""
        if self.chains is None:
            return self.plan_free(seqs)
        cache = self.chains.cache
        return [*self.plan_free(seqs, cache.findable()), *self.chains.plan_clear(), *cache.plan_cleared()]

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds, the pool's included."""
        self.pool.check()
        self.handles.check()
        lens, table = self.lens, self.blocks
        must_hold((lens >= 0).all() and (lens <= self.max_len).all(), "a length is out of range")
        must_hold(not lens[~self.handles.live].any(), "a row without a sequence has a length")
        must_hold(self.num_blocks(lens.max()) <= table.shape[1], "a sequence is longer than its row")
        used = np.arange(table.shape[1]) < self.num_blocks(lens)[:, None]
        blocks = table[used]
        must_hold((table[~used] == UNUSED).all(), "an entry past the end of a sequence is not -1")
        must_hold(((blocks >= 0) & (blocks < self.pool.num_blocks)).all(), "an entry is no block")
        ordered = np.sort(np.where(used, table, ~np.arange(table.shape[1])), axis=1)
        must_hold((ordered[:, 1:] != ordered[:, :-1]).all(), "a block occurs twice in one sequence")
        references = np.bincount(blocks, minlength=self.pool.num_blocks)
        must_hold(np.array_equal(references, self.pool.ref_counts), "reference counts differ from the table's entries")
        last_step = self._last_step[0]
        if last_step is not None and last_step.change == self.pool._num_changes[0]:
            last_step.check(self.pool, lens, table, self.block_size, self.chains)
        if self.chains is not None:
            self.chains.check(lens, table)
