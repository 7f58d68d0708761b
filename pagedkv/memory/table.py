"""SequenceTable: the block table and the length of every sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .arguments import MAX_INT32, MAX_INT64, as_int
from .guard import Guarded, consistent, exclusive
from .pool import BlockPool
from .prefix.cache import PrefixCache
from .prefix.prompt import Prompt
from .rows.handles import Int64Array
from .rows.rows import Rows


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
        grows with the longest sequence: it begins with 16 columns, or with 4 entries for each block of the pool.
    prefix_cache : PrefixCache or None
        Finds full blocks by their tokens; for `PagedKVCache`.

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

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_seqs: int,
        max_blocks: int,
        *,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
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
        self._rows = Rows(pool, block_size, max_seqs, max_blocks, prefix_cache)
        self._guard = pool._guard

    def __repr__(self) -> str:
        sizes = f"block_size={self.block_size}, max_seqs={self.max_seqs}, max_blocks={self.max_blocks}"
        return f"SequenceTable({sizes}; {self.num_seqs} sequences, {self.pool.num_free} blocks free)"

    @property
    def num_seqs(self) -> int:
        """Sequences alive."""
        return self.max_seqs - self._rows.handles.num_free

    @property
    @consistent
    def num_tokens(self) -> int:
        """The lengths of all sequences together."""
        return int(self._rows.lens.sum())

    @property
    def max_seq_len(self) -> int:
        """Tokens that one sequence can have, max_blocks * P."""
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
        seq, _, _, writes = self._rows.plan_add(Prompt(as_int("num_tokens", num_tokens)))
        self.pool._commit(writes)
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
            The slots of the new tokens, and the blocks to copy before they are written: a sequence gets a copy in place
            of a partial last block that it shares. When several sequences of one call share a block, each of them
            copies it, except the last if no other sequence holds it.

        Raises
        ------
        ValueError
            A sequence would be longer than a row of the table, or is named twice.
        OutOfBlocksError
            Too few blocks are free.
        KeyError
            A sequence that was freed or never was.
        """
        slots, copies, writes = self._rows.plan_append(seqs, n)
        appended = Appended(slots, copies[:])  # a caller may resize its own
        self.pool._commit(writes)
        return appended

    @exclusive
    def fork(self, seqs: Any, n: int = 1) -> list[int]:
        """Start n sequences like each of the given ones, sharing all blocks, the partial last ones too.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), the sequences to share.
        n : int
            How many of each, at least 0.

        Returns
        -------
        list of int
            The handles of the num_seqs * n new sequences, in the order of those that they share.

        Raises
        ------
        CapacityError
            Too few rows of the table are free.
        KeyError
            A sequence that was freed or never was.
        """
        handles, writes = self._rows.plan_fork(seqs, as_int("n", n, maximum=MAX_INT64))
        self.pool._commit(writes)
        return handles

    @exclusive
    def reorder(self, seqs: Any, parents: Any) -> None:
        """Let each sequence go on with the tokens of another, as beams do; the handles stay, and no row is needed.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.
        parents : (num_seqs,) ints
            ``seqs[i]`` gets the tokens that ``seqs[parents[i]]`` has now, and shares all its blocks.

        Raises
        ------
        IndexError
            A parent is not in 0..num_seqs-1.
        ValueError
            A sequence is named twice, or there are not as many parents.
        KeyError
            A sequence that was freed or never was.
        """
        self.pool._commit(self._rows.plan_reorder(seqs, parents))

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
        self.pool._commit(self._rows.plan_truncate(seqs, length))

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
        self.pool._commit(self._rows.plan_free(seqs))

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
        row = self._rows.find_one(seq)
        start, stop = as_int("start", start), as_int("stop", stop)
        length = self._rows.lens[row]
        if not start <= stop <= length:
            raise ValueError(
                f"start <= stop <= {length}, the length of sequence {seq}, must hold, got start {start}, stop {stop}"
            )
        return self._rows.slots_of(row, start, stop)

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
        return self._rows.tables_of(self._rows.handles.find(seqs))[0]

    @consistent
    def seq_lens(self, seqs: Any) -> npt.NDArray[np.int32]:
        """The lengths of sequences, (num_seqs,) int32, as a new array.

        Raises
        ------
        KeyError
            A sequence that was freed or never was.
        """
        return self._rows.lens_of(self._rows.handles.find(seqs))

    @consistent
    def block_fills(self) -> npt.NDArray[np.int32]:
        """How many slots of each block hold a token of some sequence, (N,) int32."""
        return self._rows.block_fills()

    @consistent
    def block_owners(self) -> Int64Array:
        """For each block the handle of a sequence that has it, (N,) int64; -1 if none does."""
        return self._rows.block_owners()

    @consistent
    def check(self) -> None:
        """Raise AssertionError unless every invariant holds, the pool's included.

        A block has as many references as there are entries for it in the table; a sequence has ceil(length / P)
        blocks, all different, and -1 behind them; a row is either free or has the handle of its generation. With a
        prefix cache: a block that can be found is in its index, behind the block that it follows; a block waits for
        eviction if it can be found and has no references.
        """
        self._rows.check()

    @consistent
    def can_add(self, num_tokens: int, *, reserve: int = 0) -> bool:
        """Whether `add` has room for a sequence, and `reserve` blocks stay free besides."""
        prompt = Prompt(as_int("num_tokens", num_tokens))
        return self._rows.can_add(prompt, as_int("reserve", reserve))

    @consistent
    def _batch(
        self, seqs: Any, query_lens: Any
    ) -> tuple[npt.NDArray[np.int32], int, npt.NDArray[np.int32], Int64Array | None]:
        """`block_tables`, the longest length, `seq_lens` and the given query_lens, all of the same instant."""
        rows = self._rows.handles.find(seqs)
        tables, longest, lens = self._rows.tables_of(rows)
        if query_lens is None:
            return tables, longest, lens, None
        query_lens = self._rows.per_seq("query_lens", query_lens, len(rows))
        longer = query_lens > lens
        if np.count_nonzero(longer):
            i = int(longer.argmax())
            raise ValueError(
                f"query_lens must be at most the {lens[i]} tokens of sequence {self._rows.handles.of(rows)[i]}, got "
                f"{query_lens[i]}"
            )
        return tables, longest, lens, query_lens
