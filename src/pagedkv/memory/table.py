"""SequenceTable: the block table and the length of every sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..commit import Write, commit
from .checks import MAX_INT32, MAX_INT64, as_int, as_ints, require
from .copy_on_write import UNUSED, plan_writable
from .guard import Guarded, consistent, exclusive
from .handles import NO_HANDLE, Handles, Int64Array
from .pool import BlockPool

_EMPTY_ENTRY = np.array([UNUSED], np.int32)


class Appended(NamedTuple):
    """What `SequenceTable.append` handed out.

    Attributes
    ----------
    slots : (num_new_tokens,) int64
        Where the new tokens go, in the order of the sequences.
    copies : (m, 2) int64
        Source and destination of every block that must be copied before the slots are written.
    """

    slots: Int64Array
    copies: Int64Array


class SequenceTable(Guarded):
    """Block tables and lengths of sequences that share the blocks of one pool.

    A sequence is named by its handle, an int that is never reused once the sequence is freed. Methods on many
    sequences take one handle, a list or tuple of them, or a 1-D int64 array, and do a handful of array operations
    whatever the number.

    Every method changes all or nothing. Mutations of one pool exclude each other: a call from a second thread in
    the middle of one raises RuntimeError. Reads wait for the other thread's call, and return what held before it or
    what holds after it. A table cannot be copied or pickled: TypeError.

    Parameters
    ----------
    pool : BlockPool
        Where blocks come from. `check` assumes that the table is its only user.
    block_size : int
        P, tokens per block.
    max_seqs : int
        Sequences alive at a time.
    max_blocks : int
        Blocks of one sequence, so that its length is at most max_blocks * P, and that at most 2**31 - 1. The table
        takes max_seqs * max_blocks * 4 bytes.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here.

    Examples
    --------
    >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=3, max_blocks=5)
    >>> prompt = table.add(6)
    >>> table.slots(prompt, 4, 6)
    array([4, 5])
    >>> [sample] = table.fork(prompt, 1)
    >>> table.append([prompt, sample])
    Appended(slots=array([10,  6]), copies=array([[1, 2]]))
    >>> table.block_tables([prompt, sample])
    array([[0, 2],
           [0, 1]], dtype=int32)
    """

    def __init__(self, pool: BlockPool, block_size: int, max_seqs: int, max_blocks: int) -> None:
        if not isinstance(pool, BlockPool):
            raise TypeError(f"pool must be a BlockPool, got {type(pool).__name__}")
        block_size = as_int("block_size", block_size, minimum=1, maximum=MAX_INT32)
        max_seqs = as_int("max_seqs", max_seqs, minimum=1)
        max_blocks = as_int("max_blocks", max_blocks, minimum=1)
        if max_blocks * block_size > MAX_INT32:
            raise ValueError(f"max_blocks * block_size must be at most 2**31 - 1, got {max_blocks} * {block_size}")
        self.pool = pool
        self.block_size = block_size
        self.max_seqs = max_seqs
        self.max_blocks = max_blocks
        self._blocks = np.full((max_seqs, max_blocks), UNUSED, np.int32)
        self._entries = self._blocks.reshape(-1)
        self._lens = np.zeros(max_seqs, np.int64)
        self._handles = Handles(max_seqs)
        self._guard = pool._guard

    @property
    def num_seqs(self) -> int:
        """Sequences alive."""
        return self.max_seqs - self._handles.num_free

    @property
    @consistent
    def num_tokens(self) -> int:
        """The lengths of all sequences together."""
        return int(self._lens.sum())

    @property
    def max_seq_len(self) -> int:
        """Tokens that one sequence can have: max_blocks * P."""
        return self.max_blocks * self.block_size

    @exclusive
    def add(self, num_tokens: int) -> int:
        """Start a sequence with room for num_tokens tokens.

        Parameters
        ----------
        num_tokens : int
            Its length, at least 0. `slots` says where the tokens go.

        Returns
        -------
        int
            The handle of the sequence.

        Raises
        ------
        ValueError
            Longer than a row of the table.
        CapacityError
            max_seqs sequences are alive.
        OutOfBlocksError
            Too few blocks are free.
        """
        seq, writes = self._plan_add(num_tokens)
        commit(writes)
        return seq

    @exclusive
    def append(self, seqs: Any, n: Any = 1) -> Appended:
        """Add n tokens to the end of each sequence.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.
        n : int, or (num_seqs,) ints
            New tokens of every sequence, or of each; at least 0.

        Returns
        -------
        Appended
            The slots of the new tokens, and the blocks to copy before they are written: a partial last block that
            another sequence shares is replaced by a copy, never written. Of the sequences of one call that share a
            block every one copies, except the last if no other sequence holds it.

        Raises
        ------
        ValueError
            A sequence would be longer than a row of the table, or is named twice.
        OutOfBlocksError
            Too few blocks are free.
        KeyError
            A sequence that was freed or never was.
        """
        appended, writes = self._plan_append(seqs, n)
        commit(writes)
        return appended

    @exclusive
    def fork(self, seq: int, n: int = 1) -> list[int]:
        """Start n sequences with the tokens of another, sharing all its blocks, the partial last one too.

        Parameters
        ----------
        seq : int
            The handle of the sequence to share.
        n : int
            How many, at least 0.

        Returns
        -------
        list of int
            The handles of the new sequences.

        Raises
        ------
        CapacityError
            Fewer than n rows of the table are free.
        KeyError
            A sequence that was freed or never was.
        """
        row = self._row(seq)
        rows, handles, writes = self._handles.plan_issue(as_int("n", n))
        length = self._lens[row : row + 1]
        blocks = self._blocks[row, : self._num_blocks(int(length[0]))]
        entries = np.arange(len(blocks))[:, None] + rows * self.max_blocks
        commit(
            [
                *self.pool._plan_retain(blocks.astype(np.int64), times=len(rows)),
                *writes,
                (self._lens, rows, length.repeat(len(rows))),
                (self._entries, entries.reshape(-1), blocks.repeat(len(rows))),
            ]
        )
        return handles

    @exclusive
    def truncate(self, seqs: Any, length: Any) -> None:
        """Shorten sequences to their first tokens, releasing the blocks past the end.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.
        length : int, or (num_seqs,) ints
            The new length of every sequence, or of each: from 0 to what it is.

        Raises
        ------
        ValueError
            A length that is negative or more than the sequence has, or a sequence named twice.
        KeyError
            A sequence that was freed or never was.
        """
        rows = self._handles.find_distinct(seqs)
        lens = self._lens[rows]
        length = self._per_seq("length", length, len(rows))
        longer = length > lens
        if longer.any():
            raise ValueError(
                f"length must be at most the {lens[longer][0]} tokens of the sequence, got {length[longer][0]}"
            )
        commit([*self._plan_drop(rows, self._num_blocks(length)), (self._lens, rows, length)])

    @exclusive
    def free(self, seqs: Any) -> None:
        """End sequences and release their blocks; their handles are never valid again.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.

        Raises
        ------
        ValueError
            A sequence is named twice.
        KeyError
            A sequence that was freed or never was.
        """
        rows = self._handles.find_distinct(seqs)
        dropped = self._plan_drop(rows, np.zeros_like(rows))
        commit([*dropped, (self._lens, rows, np.zeros_like(rows)), *self._handles.plan_retire(rows)])

    @consistent
    def slots(self, seq: int, start: int, stop: int) -> Int64Array:
        """Slots of the tokens start..stop-1 of a sequence.

        Returns
        -------
        (stop - start,) int64
            block_id * P + offset.

        Raises
        ------
        ValueError
            Not 0 <= start <= stop <= length.
        KeyError
            A sequence that was freed or never was.
        """
        row = self._row(seq)
        start, stop = as_int("start", start), as_int("stop", stop)
        if not start <= stop <= self._lens[row]:
            raise ValueError(
                f"start <= stop <= {self._lens[row]}, the length, must hold, got start {start}, stop {stop}"
            )
        logical, offset = np.divmod(np.arange(start, stop), self.block_size)
        return self._blocks[row].take(logical) * np.int64(self.block_size) + offset

    @consistent
    def block_tables(self, seqs: Any) -> npt.NDArray[np.int32]:
        """The block tables of sequences, as a new array.

        Returns
        -------
        (num_seqs, width) int32
            As wide as the longest of these sequences needs, at least 1, so that the cost follows the tokens and not
            the maximum. Entries at or past ceil(length / P) are -1.

        Raises
        ------
        KeyError
            A sequence that was freed or never was.
        """
        return self._tables_of(self._handles.find(seqs))

    @consistent
    def seq_lens(self, seqs: Any) -> npt.NDArray[np.int32]:
        """The lengths of sequences, (num_seqs,) int32, as a new array.

        Raises
        ------
        KeyError
            A sequence that was freed or never was.
        """
        return self._lens_of(self._handles.find(seqs))

    @consistent
    def block_fills(self) -> npt.NDArray[np.int32]:
        """How many slots of each block hold a token of some sequence, (N,) int32."""
        owners, columns = _ragged(np.zeros_like(self._lens), self._num_blocks(self._lens))
        fills = np.zeros(self.pool.num_blocks, np.int32)
        tokens = np.minimum(self._lens[owners] - columns * self.block_size, self.block_size)
        np.maximum.at(fills, self._blocks[owners, columns], tokens.astype(np.int32))
        return fills

    @consistent
    def block_owners(self) -> Int64Array:
        """The handle of a sequence that has each block, (N,) int64; -1 for a block that none has."""
        rows, columns = _ragged(np.zeros_like(self._lens), self._num_blocks(self._lens))
        owners = np.full(self.pool.num_blocks, NO_HANDLE)
        owners[self._blocks[rows, columns]] = self._handles.of(rows)
        return owners

    @consistent
    def check(self) -> None:
        """Raise AssertionError unless every invariant holds, the pool's included.

        A block has as many references as there are entries for it in the table; a sequence has ceil(length / P)
        blocks, all different, and -1 behind them; a row is either free or has the handle of its generation.
        """
        self.pool.check()
        self._handles.check()
        live = self._handles.live
        require((self._lens >= 0).all() and (self._lens <= self.max_seq_len).all(), "a length is out of range")
        require(not self._lens[~live].any(), "a row without a sequence has a length")
        used = np.arange(self.max_blocks) < self._num_blocks(self._lens)[:, None]
        blocks = self._blocks[used]
        require((self._blocks[~used] == UNUSED).all(), "an entry past the end of a sequence is not -1")
        require(((blocks >= 0) & (blocks < self.pool.num_blocks)).all(), "an entry is no block")
        ordered = np.sort(np.where(used, self._blocks, ~np.arange(self.max_blocks)), axis=1)
        require((ordered[:, 1:] != ordered[:, :-1]).all(), "a block occurs twice in one sequence")
        references = np.bincount(blocks, minlength=self.pool.num_blocks)
        require(np.array_equal(references, self.pool.ref_counts), "reference counts differ from the table's entries")

    def _num_blocks(self, length: Any) -> Any:
        return (length + (self.block_size - 1)) // self.block_size

    def _row(self, seq: int) -> int:
        return int(self._handles.find(as_int("seq", seq, minimum=None))[0])

    @staticmethod
    def _per_seq(name: str, value: Any, num_seqs: int) -> Int64Array:
        """One int of at least 0 for each sequence."""
        if isinstance(value, (int, np.integer)):
            return np.full(num_seqs, as_int(name, value, maximum=MAX_INT64))
        values = as_ints(name, value, num_seqs, "num_seqs")
        if values.min(initial=0) < 0:
            raise ValueError(f"{name} must be at least 0, got {values.min()}")
        return values

    def _plan_drop(self, rows: Int64Array, num_kept: Int64Array) -> list[Write]:
        """Release the blocks of each row past its first num_kept."""
        num_held = self._num_blocks(self._lens[rows])
        owners, columns = _ragged(num_kept, num_held - num_kept)
        entries = (rows * self.max_blocks).take(owners) + columns
        blocks = self._entries.take(entries).astype(np.int64)
        return [*self.pool._plan_release(blocks), (self._entries, entries, _EMPTY_ENTRY.repeat(len(entries)))]

    @consistent
    def _batch(self, seqs: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """`block_tables` and `seq_lens` of the same instant."""
        rows = self._handles.find(seqs)
        return self._tables_of(rows), self._lens_of(rows)

    def _tables_of(self, rows: Int64Array) -> npt.NDArray[np.int32]:
        longest = self._lens[rows].max(initial=1)
        return self._blocks[rows, : self._num_blocks(longest)]

    def _lens_of(self, rows: Int64Array) -> npt.NDArray[np.int32]:
        return self._lens[rows].astype(np.int32)

    def _plan_add(self, num_tokens: int) -> tuple[int, list[Write]]:
        num_tokens = as_int("num_tokens", num_tokens)
        if num_tokens > self.max_seq_len:
            raise ValueError(
                f"num_tokens must be at most max_blocks * block_size = {self.max_seq_len}, got {num_tokens}"
            )
        rows, [seq], writes = self._handles.plan_issue(1)
        blocks, allocation = self.pool._plan_allocate(self._num_blocks(num_tokens))
        first = int(rows[0]) * self.max_blocks
        entries = np.arange(first, first + len(blocks))
        return seq, [*allocation, *writes, (self._lens, rows, np.array([num_tokens])), (self._entries, entries, blocks)]

    def _plan_append(self, seqs: Any, n: Any) -> tuple[Appended, list[Write]]:
        rows = self._handles.find_distinct(seqs)
        num_new = self._per_seq("n", n, len(rows))
        lens = self._lens[rows]
        room = self.max_seq_len - lens
        too_long = num_new > room
        if np.count_nonzero(too_long):
            raise ValueError(
                f"n must be at most {room[too_long][0]}, what is left of max_blocks * block_size = {self.max_seq_len} "
                f"for the sequence, got {num_new[too_long][0]}"
            )
        ends = lens + num_new
        first = lens // self.block_size
        if isinstance(n, int) and n == 1:
            # The general case with one token, and so one block to write, for each sequence.
            entries, positions, entry_of_token = rows * self.max_blocks + first, lens, np.arange(len(rows))
        else:
            num_written = np.where(num_new > 0, self._num_blocks(ends) - first, 0)
            owners, columns = _ragged(first, num_written)
            entries = rows[owners] * self.max_blocks + columns
            owners, positions = _ragged(lens, num_new)
            first_entry = np.cumsum(num_written) - num_written
            entry_of_token = (first_entry - first)[owners] + positions // self.block_size

        blocks, copies, writes = plan_writable(self.pool, self._entries, entries)
        slots = blocks[entry_of_token] * self.block_size + positions % self.block_size
        return Appended(slots, copies), [*writes, (self._lens, rows, ends)]


def _ragged(starts: Array, counts: Array) -> tuple[Int64Array, Int64Array]:
    """The integers starts[i], ..., starts[i] + counts[i] - 1 for each i in turn, and the i of each.

    Returns
    -------
    owners, values : (counts.sum(),) int64
    """
    owners = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    return owners, np.arange(len(owners)) + (starts - begins)[owners]
