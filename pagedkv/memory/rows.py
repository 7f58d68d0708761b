"""SequenceRows: arrays with a row for each sequence, and what each call changes in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from ..commit import Write
from .append import NO_COPIES, LastStep, plan_writable, require_one_each
from .arguments import per_seq
from .chains import Chains
from .groups import LayerGroups
from .handles import Handles
from .ids import NO_BLOCKS, UNUSED, Int32Array, Int64Array, joined, must_hold, owned_spans, spans
from .pool import BlockPool
from .prefix.cache import PrefixCache
from .states import StateSlots
from .windows import Windows

P = ParamSpec("P")
_EMPTY_ENTRY = np.array([UNUSED], np.int32)
_IN_ORDER: Any = slice(None)
_ENTRIES_PER_BLOCK = 4  # in a new table, all rows together
_MIN_COLUMNS = 16


class AppendPlan(NamedTuple):
    """How sequences grow: the slots of the new tokens in each group, the copies to make, and what to store."""

    slots: Int64Array
    copies: Int64Array
    writes: list[Write]


class HasCopies(Protocol):
    """A plan that copies blocks."""

    @property
    def copies(self) -> Int64Array:
        """Source and destination of each copy, (m, 2)."""


Plan = TypeVar("Plan", bound=HasCopies)


class SequenceRows:
    """The block tables and the length of each sequence, one row each; `chains` has what is known of their tokens.

    The table has a line for each row and group of layers: line g * max_seqs + row. With one group lines are rows.

    Methods called `plan_...` change nothing: they return what to store. Each public call stores one such plan.

    Parameters
    ----------
    pool : BlockPool
    block_size, max_seqs, max_blocks : int
    prefix_cache : PrefixCache or None
        Without one there are no chains.
    groups : LayerGroups
    keep : int
        Tokens left of the windows that stay.
    num_states : int
        Slots for states of sequences, 0 if they have none; else at least max_seqs.

    Attributes
    ----------
    blocks : (num_groups * max_seqs, num_columns) int32
        The table; UNUSED where a line holds no block.
    lens : (max_seqs,) int64
    windows : Windows or None
        None if no layer has a window.
    states : StateSlots or None
        None if sequences have no states.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_seqs: int,
        max_blocks: int,
        prefix_cache: PrefixCache | None,
        groups: LayerGroups,
        keep: int,
        num_states: int = 0,
    ) -> None:
        self.pool, self.block_size, self.max_blocks = pool, block_size, max_blocks
        self.num_groups = len(groups.groups)
        num_lines = self.num_groups * max_seqs
        num_columns = max(_MIN_COLUMNS, -(-_ENTRIES_PER_BLOCK * pool.num_blocks // num_lines))
        self.blocks = np.full((num_lines, min(max_blocks, num_columns)), UNUSED, np.int32)
        self.lens = np.zeros(max_seqs, np.int64)
        self.handles = Handles(max_seqs, ": max_seqs and state_memory set the limit" if num_states == max_seqs else "")
        self.windows = Windows(groups, max_seqs, keep) if groups.has_windows else None
        self.groups, self.keep = groups, keep
        self._first_lines = np.arange(self.num_groups)[:, None] * max_seqs
        self.states = StateSlots(num_states, max_seqs, block_size, prefix_cache) if num_states else None
        self.chains: Chains | None = None
        if prefix_cache is not None:  # otherwise another cache over the same pool may have set one
            pool._prefix_cache = prefix_cache
            self.chains = Chains(prefix_cache, pool, max_seqs, groups, self.states)
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
        """Columns that a sequence of some length needs, or each of several: blocks of each group, if none is passed."""
        return (length + (self.block_size - 1)) // self.block_size

    def lines_of(self, rows: Int64Array) -> Int64Array:
        """The lines of rows, group by group, (num_groups * num_rows,)."""
        return rows if self.num_groups == 1 else np.asarray((self._first_lines + rows).reshape(-1))

    def of_lines(self, of_rows: Int64Array) -> Int64Array:
        """For each of their lines what rows have."""
        return of_rows if self.num_groups == 1 else np.concatenate([of_rows] * self.num_groups)

    def by_group(self, of_lines: Any) -> Any:
        """An array of lines with an axis for the groups in front, if there are several."""
        return of_lines if self.num_groups == 1 else of_lines.reshape(self.num_groups, -1, *of_lines.shape[1:])

    def first(self, lines: Int64Array) -> Int64Array:
        """The first column that each line holds."""
        return np.zeros_like(lines) if self.windows is None else self.windows.first[lines]

    def held(self, rows: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        """The line and the column of each entry that is a block, of some rows or of all."""
        rows = np.arange(len(self.lens)) if rows is None else rows
        lines = self.lines_of(rows)
        first = self.first(lines)
        owners, columns = owned_spans(first, self.of_lines(self.num_blocks(self.lens[rows])) - first)
        return lines[owners], columns

    def tables_of(self, rows: Int64Array) -> tuple[Int32Array, int, Int32Array]:
        """The block tables of rows, as wide as the longest sequence needs, its length, and all lengths."""
        last_step = self.last_step_of(rows)
        if last_step is None or last_step.tables is None:
            lens = self.lens[rows].astype(np.int32)
            longest = int(lens.max(initial=0))
            return self.by_group(self.blocks[self.lines_of(rows), : self.num_blocks(longest or 1)]), longest, lens
        return self.by_group(last_step.tables.copy()), last_step.longest, last_step.lens.astype(np.int32)

    def last_step_of(self, rows: Int64Array) -> LastStep | None:
        """The record of the last step, if it was one of exactly these rows and nothing has changed since."""
        last_step = self._last_step[0]
        # Handles returns the same array object as long as callers name the same sequences.
        if last_step is None or last_step.rows is not rows or last_step.change != self.pool._num_changes[0]:
            return None
        return last_step

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

    def with_columns(self, num_columns: int) -> tuple[Int32Array, list[Write]]:
        """A table with at least num_columns columns, and what to store if it is a wider one."""
        num_rows, before = self.blocks.shape
        if num_columns <= before:
            return self.blocks, []
        wide = np.full((num_rows, min(self.max_blocks, max(num_columns, 2 * before))), UNUSED, np.int32)
        wide[:, :before] = self.blocks
        return wide, [(vars(self), "blocks", wide)]

    def lens_after(self, rows: Int64Array, n: Any, tokens: Int32Array | None) -> tuple[Any, Int64Array]:
        """How many tokens each row gets from `plan_append`, and its length then.

        Raises
        ------
        ValueError
            `n` or `tokens` are wrong.
        """
        lens, is_step = self.lens[rows], type(n) is int and n == 1
        num_new: Any = 1 if is_step else per_seq("n", n, len(rows))
        ends = lens + (1 if is_step else np.minimum(num_new, self.max_len + 1))
        if ends.max(initial=0) > self.max_len:
            i = int((ends > self.max_len).argmax())
            raise ValueError(
                f"n must be at most {self.max_len - lens[i]}, what is left of max_blocks * block_size = "
                f"{self.max_len} for sequence {self.handles.of(rows)[i]}, got {1 if is_step else num_new[i]}"
            )
        if tokens is not None:
            require_one_each(tokens, len(rows) if is_step else int(num_new.sum()))
        return num_new, ends

    def plan_append(self, rows: Int64Array, n: Any, tokens: Int32Array | None = None) -> AppendPlan:
        """Add n tokens to the end of each row."""
        is_step, size = type(n) is int and n == 1, self.block_size
        last_step = self.last_step_of(rows) if is_step else None
        if (
            last_step is not None
            and last_step.longest < self.blocks.shape[1] * size
            and (tokens is None or last_step.is_known)
        ):
            return self.plan_next(last_step, tokens)
        lens = self.lens[rows]
        num_new, ends = self.lens_after(rows, n, tokens)
        longest = int(ends.max(initial=0))
        num_columns = self.num_blocks(longest)
        if num_columns > self.blocks.shape[1]:  # do not widen the table if the pool lacks blocks
            num_added = self.num_groups * int((self.num_blocks(ends) - self.num_blocks(lens)).sum())
            self.pool._require(num_added, self.pool.num_free)
        table, grown = self.with_columns(num_columns)
        lines, positions, first = self.lines_of(rows), self.of_lines(lens), self.of_lines(lens // size)
        if is_step:
            # As the general case below, with one token, and so one block to write, for each line.
            entries, entry_of_token = lines * table.shape[1] + first, _IN_ORDER
        else:
            num_written = self.of_lines(np.where(num_new > 0, self.num_blocks(ends) - lens // size, 0))
            entries = spans(lines * table.shape[1] + first, num_written)
            owners, positions = owned_spans(positions, self.of_lines(num_new))
            first_entry = np.cumsum(num_written) - num_written
            entry_of_token = (first_entry - first)[owners] + positions // size

        blocks, copies, writes = plan_writable(self.pool, table.reshape(-1), entries)
        slots = self.by_group(blocks[entry_of_token] * size + positions % size)
        writes = [*grown, *writes, (self.lens, rows, ends)]
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
            after = LastStep.after(change, rows, lines, ends, slots, longest, size, False, all_known)
            writes.append((self._last_step, 0, after))
        return AppendPlan(slots, copies, writes)

    def plan_next(self, last_step: LastStep, tokens: Int32Array | None) -> AppendPlan:
        """`plan_append` of one token each to the sequences of the last step: most of them go on in their block."""
        slots, tables, writes = last_step.next(self.pool, self.blocks, self.block_size)
        slots = self.by_group(slots)
        require_one_each(tokens, len(last_step.rows))
        rows, ends, is_known = last_step.rows, last_step.lens + 1, tokens is not None
        writes.append((self.lens, rows, ends))
        if tokens is not None and self.chains is not None:
            writes += self.chains.plan_tokens(rows, ends, slots, tokens)
        change, all_stored = self.pool._num_changes[0] + 1, last_step.uncommitted is False and is_known
        longest, lines, size = last_step.longest + 1, last_step.lines, self.block_size
        after = LastStep.after(change, rows, lines, ends, slots, longest, size, all_stored, is_known, tables)
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
            num_full = len(last_step.full) // self.num_groups  # lines of the first group are rows
            rows, full = last_step.full_lines[:num_full], last_step.full_columns[:num_full]
            first = full - 1
        else:
            return []
        if not len(rows):
            return seen
        keep_theirs, writes = self.chains.plan_store(self.blocks, rows, first, full)
        return [*writes, *seen] if keep_theirs else writes

    def plan_pass(self, rows: Int64Array) -> list[Write]:
        """Release the blocks that no query of rows sees any more, once the queries of all their tokens are computed.

        A plan of its own, which can do no harm if the call that comes behind it fails: the pool hands out no block that
        the same plan drops.
        """
        if self.windows is None:
            return []
        last_step = self.last_step_of(rows)
        if last_step is not None and (last_step.released or not len(last_step.full)):
            return []
        if last_step is None:
            at, lines, done = _IN_ORDER, self.lines_of(rows), self.lens[rows]
        else:  # windows are counted from block boundaries, so that only full blocks move them
            at, lines = last_step.full, last_step.full_lines
            done = last_step.full_columns[: len(at) // self.num_groups] * self.block_size
        before, after = self.windows.first[lines], self.windows.after(lines, done)
        passing = (after > before).nonzero()[0]
        if not len(passing):
            if last_step is not None:
                self._last_step[0] = last_step._replace(released=True)
            return []
        ended = [] if self.chains is None else self.chains.plan_pass(lines, after)
        lines, before, after = lines[passing], before[passing], after[passing]
        entries = spans(lines * self.blocks.shape[1] + before, after - before)
        empty, blocks = _EMPTY_ENTRY.repeat(len(entries)), self.entries.take(entries).astype(np.int64)
        writes = self.pool._plan(dropped=blocks, passed=True, num_seqs=len(rows))[1]
        writes += [(self.entries, entries, empty), *self.windows.plan(lines, after)]
        if ended:
            return [*writes, *ended]
        if last_step is not None:
            if (tables := last_step.tables) is not None:
                entries = spans(at[passing] * tables.shape[1] + before, after - before)
                writes.append((tables.reshape(-1), entries, empty))
            writes.append((self._last_step, 0, last_step._replace(change=last_step.change + 1, released=True)))
        return writes

    def plan_fork(self, rows: Int64Array, parents: Int64Array, n: int) -> list[Write]:
        """Make n free rows like each parent in turn."""
        num_seqs = len(parents) if self.handles.differ(parents) else 0
        lines, columns = self.held(parents)
        blocks = self.entries.take(lines * self.blocks.shape[1] + columns).astype(np.int64)
        writes = self.pool._plan(gained=blocks, times=n, num_seqs=num_seqs)[1]
        return [*writes, *self._plan_lines_of(rows, parents.repeat(n))]

    def plan_reorder(self, rows: Int64Array, sources: Int64Array) -> list[Write]:
        """Replace each row by a copy of its source."""
        rows, sources = rows[rows != sources], sources[rows != sources]
        dropped, gained = (
            self.entries.take(lines * self.blocks.shape[1] + columns).astype(np.int64)
            for lines, columns in (self.held(rows), self.held(sources))
        )
        return [*self.pool._plan(dropped=dropped, gained=gained)[1], *self._plan_lines_of(rows, sources)]

    def _plan_lines_of(self, rows: Int64Array, sources: Int64Array) -> list[Write]:
        """Give each row the blocks and the length of its source, and what is known of its tokens."""
        num_columns = int(self.num_blocks(self.lens[joined(rows, sources)].max(initial=0)))
        lines, other_lines = self.lines_of(rows), self.lines_of(sources)
        entries = spans(lines * self.blocks.shape[1], np.full(len(lines), num_columns))
        writes: list[Write] = [
            (self.entries, entries, self.blocks[other_lines, :num_columns].reshape(-1)),
            (self.lens, rows, self.lens[sources]),
        ]
        if self.windows is not None:
            writes += self.windows.plan(lines, self.windows.first[other_lines])
        if self.states is not None:
            writes += self.states.plan_copy(rows, sources)
        return writes if self.chains is None else [*writes, *self.chains.plan_copy(rows, sources)]

    def plan_drop(self, rows: Int64Array, lens: Int64Array, forgotten: Int64Array = NO_BLOCKS) -> list[Write]:
        """Shorten each row to its first `lens` tokens, and release the blocks past them."""
        lines = self.lines_of(rows)
        num_kept = self.of_lines(self.num_blocks(lens))
        first = num_kept if self.windows is None else np.maximum(num_kept, self.windows.first[lines])
        entries = spans(lines * self.blocks.shape[1] + first, self.of_lines(self.num_blocks(self.lens[rows])) - first)
        blocks = self.entries.take(entries).astype(np.int64)
        writes = [
            *self.pool._plan(dropped=blocks, forgotten=forgotten, num_seqs=len(rows))[1],
            (self.entries, entries, _EMPTY_ENTRY.repeat(len(entries))),
            (self.lens, rows, lens),
        ]
        if self.windows is not None:
            writes += self.windows.plan(lines, np.where(num_kept > 0, self.windows.first[lines], 0))
        if self.states is not None:
            writes += self.states.plan_shorten(rows, lens, self.ends(rows, lens))
        return writes if self.chains is None else [*writes, *self.chains.plan_shorten(rows, lens)]

    def plan_free(self, seqs: Any, forgotten: Int64Array = NO_BLOCKS) -> list[Write]:
        """End sequences, and make the blocks `forgotten` unfindable."""
        rows = self.handles.find_distinct(seqs)
        writes = [*self.plan_drop(rows, np.zeros_like(rows), forgotten), *self.handles.plan_retire(rows)]
        return writes if self.states is None else [*writes, *self.states.plan_end(rows)]

    def slots(self, row: Int64Array, start: int, stop: int) -> Int64Array:
        """The slots of some tokens of a row, (1,) int64, in each group; UNUSED where a window has passed them."""
        logical, offset = np.divmod(np.arange(start, stop), self.block_size)
        blocks = self.entries.take(self.lines_of(row)[:, None] * self.blocks.shape[1] + logical)
        return np.where(blocks == UNUSED, UNUSED, blocks * np.int64(self.block_size) + offset)

    def ends(self, rows: Int64Array, lens: Int64Array) -> Int64Array:
        """The block of the leading group in which the first `lens` tokens of each row end, UNUSED if there is none."""
        lines = self.lines_of(rows).reshape(self.num_groups, -1)[self.groups.leader]
        columns = np.maximum(lens - 1, 0) // self.block_size
        return np.where(lens > 0, self.entries.take(lines * self.blocks.shape[1] + columns), UNUSED).astype(np.int64)

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
        columns, ends = np.arange(table.shape[1]), self.of_lines(self.num_blocks(lens))
        must_hold((table[columns >= ends[:, None]] == UNUSED).all(), "an entry past the end of a sequence is not -1")
        passed = columns < self.first(np.arange(len(table)))[:, None]
        must_hold((table[passed] == UNUSED).all(), "an entry that a window has passed is not -1")
        used = ~passed & (columns < ends[:, None])
        blocks = table[used]
        must_hold(((blocks >= 0) & (blocks < self.pool.num_blocks)).all(), "an entry is no block")
        ordered = np.sort(np.where(used, table, ~np.arange(table.shape[1])), axis=1)
        must_hold((ordered[:, 1:] != ordered[:, :-1]).all(), "a block occurs twice in one sequence")
        references = np.bincount(blocks, minlength=self.pool.num_blocks)
        must_hold(np.array_equal(references, self.pool.ref_counts), "reference counts differ from the table's entries")
        last_step = self._last_step[0]
        if last_step is not None and last_step.change == self.pool._num_changes[0]:
            last_step.check(self.pool, lens, table, self.block_size, self.chains)
        if self.windows is not None:
            self.windows.check(lens)
        if self.states is not None:
            self.states.check(lens, self.handles.live)
        if self.chains is not None:
            self.chains.check(lens, table)
