"""RowState: the blocks, the length and the chain of each sequence, and what can be read off them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..arguments import MAX_INT64, as_int, as_ints
from ..invariants import must_hold
from ..pool import BlockPool
from ..prefix.cache import PrefixCache
from ..prefix.chains import Chains
from ..spans import owned_spans
from .copy_on_write import UNUSED
from .handles import NO_HANDLE, Handles, Int64Array
from .recent import Recent

Int32Array = npt.NDArray[np.int32]
_ENTRIES_PER_BLOCK = 4  # in a new table, all rows together
_MIN_COLUMNS = 16


class RowState:
    """The state of a SequenceTable, one row for each sequence, without its guard.

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
        self.prefix_cache = prefix_cache
        if prefix_cache is not None:  # or else this may be another table over the pool of one that has it
            pool._prefix_cache = prefix_cache
        num_columns = max(_MIN_COLUMNS, -(-_ENTRIES_PER_BLOCK * pool.num_blocks // max_seqs))
        self.blocks = np.full((max_seqs, min(max_blocks, num_columns)), UNUSED, np.int32)
        self.lens = np.zeros(max_seqs, np.int64)
        self.handles = Handles(max_seqs)
        self.chains = Chains(max_seqs)
        self._recent: list[Recent | None] = [None]

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

    def lens_of(self, rows: Int64Array) -> Int32Array:
        """The lengths of rows."""
        return self.lens[rows].astype(np.int32)

    def tables_of(self, rows: Int64Array) -> tuple[Int32Array, int, Int32Array]:
        """The block tables of rows, as wide as the longest needs, the length of that one, and all lengths."""
        recent = self._recent_of(rows)
        if recent is None or recent.tables is None:
            lens = self.lens_of(rows)
            longest = int(lens.max(initial=0))
            return self.blocks[rows, : self.num_blocks(longest or 1)], longest, lens
        return recent.tables.copy(), recent.longest, recent.lens.astype(np.int32)

    def slots_of(self, row: int, start: int, stop: int) -> Int64Array:
        """The slots of some tokens of a row."""
        logical, offset = np.divmod(np.arange(start, stop), self.block_size)
        return self.blocks[row].take(logical) * np.int64(self.block_size) + offset

    def block_fills(self) -> Int32Array:
        """How many slots of each block hold a token of some sequence, (N,)."""
        owners, columns = owned_spans(np.zeros_like(self.lens), self.num_blocks(self.lens))
        fills = np.zeros(self.pool.num_blocks, np.int32)
        tokens = np.minimum(self.lens[owners] - columns * self.block_size, self.block_size)
        np.maximum.at(fills, self.blocks[owners, columns], tokens.astype(np.int32))
        return fills

    def block_owners(self) -> Int64Array:
        """For each block the handle of a sequence that has it, (N,); -1 if none does."""
        rows, columns = owned_spans(np.zeros_like(self.lens), self.num_blocks(self.lens))
        owners = np.full(self.pool.num_blocks, NO_HANDLE)
        owners[self.blocks[rows, columns]] = self.handles.of(rows)
        return owners

    def wasted_slots(self) -> int:
        """Slots of used blocks that hold no token of any sequence."""
        full = self.lens // self.block_size
        fills = self.lens - full * self.block_size
        rows = fills.nonzero()[0]  # only the last block of a sequence is partly full
        blocks, fills = self._entries.take(rows * self.blocks.shape[1] + full.take(rows)), fills.take(rows)
        alone = self.pool._refs.take(blocks) == 1
        wasted = int(np.count_nonzero(alone)) * self.block_size - int(fills[alone].sum())
        if not alone.all():
            # A shared block wastes the slots past its longest owner's end, unless one of its owners fills it.
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
        must_hold((self.lens >= 0).all() and (self.lens <= self.max_seq_len).all(), "a length is out of range")
        must_hold(not self.lens[~live].any(), "a row without a sequence has a length")
        must_hold(self.num_blocks(self.lens.max()) <= self.blocks.shape[1], "a sequence is longer than its row")
        used = np.arange(self.blocks.shape[1]) < self.num_blocks(self.lens)[:, None]
        blocks = self.blocks[used]
        must_hold((self.blocks[~used] == UNUSED).all(), "an entry past the end of a sequence is not -1")
        must_hold(((blocks >= 0) & (blocks < self.pool.num_blocks)).all(), "an entry is no block")
        ordered = np.sort(np.where(used, self.blocks, ~np.arange(self.blocks.shape[1])), axis=1)
        must_hold((ordered[:, 1:] != ordered[:, :-1]).all(), "a block occurs twice in one sequence")
        references = np.bincount(blocks, minlength=self.pool.num_blocks)
        must_hold(np.array_equal(references, self.pool.ref_counts), "reference counts differ from the table's entries")
        recent = self._recent[0]
        if recent is not None and recent.change == self.pool._num_changes[0]:
            self._check_recent(recent)
        chains = self.chains
        must_hold((chains.num_known <= self.lens).all(), "more tokens are known than there are")
        must_hold((chains.num_found * self.block_size <= chains.num_known).all(), "a block is found by unknown tokens")
        if self.prefix_cache is not None:
            rows = np.flatnonzero(chains.num_found)
            counts, roots = chains.num_found[rows].tolist(), chains.roots(rows)
            for blocks, num_found, root in zip(self.blocks[rows], counts, roots, strict=True):
                found = blocks[:num_found].astype(np.int64)
                must_hold(self.prefix_cache.follows(found, root.tobytes()), "a block that can be found is not")

    def _check_recent(self, recent: Recent) -> None:
        rows, last = recent.rows, recent.lens - 1
        must_hold(np.array_equal(recent.lens, self.lens[rows]), "the last step has left other lengths")
        blocks = self.blocks[rows, last // self.block_size].astype(np.int64)
        must_hold((self.pool._refs[blocks] == 1).all(), "the last step has left a block that is shared")
        slots = blocks * self.block_size + last % self.block_size
        must_hold(np.array_equal(recent.slots, slots), "the last step has left other slots")
        must_hold(recent.longest == recent.lens.max(), "the last step has left another longest sequence")
        full = np.flatnonzero(recent.lens % self.block_size == 0)
        at_end = full, rows[full], recent.lens[full] // self.block_size
        must_hold(
            all(map(np.array_equal, (recent.full, recent.full_rows, recent.full_columns), at_end)),
            "the last step has left other full blocks",
        )
        if self.prefix_cache is not None:
            known, found = self.chains.num_known[rows], self.chains.num_found[rows]
            must_hold(
                not recent.is_known or np.array_equal(known, recent.lens), "the last step has left unknown tokens"
            )
            num_late, is_last = known // self.block_size - found, known % self.block_size == 0
            expected = is_last.astype(np.int64) if recent.late else np.zeros_like(found)
            must_hold(recent.late is None or (num_late <= expected).all(), "the last step has left out a full block")
        if recent.tables is not None:
            tables = self.blocks[rows, : self.num_blocks(recent.longest)]
            must_hold(np.array_equal(recent.tables, tables), "the last step has left other block tables")

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

    def _recent_of(self, rows: Int64Array) -> Recent | None:
        """What the last step left for exactly these rows, if nothing has changed since."""
        recent = self._recent[0]
        # Handles returns the very same array of rows as long as callers name the same sequences.
        if recent is None or recent.rows is not rows or recent.change != self.pool._num_changes[0]:
            return None
        return recent
