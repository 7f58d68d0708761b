"""Sequences: block tables and lengths of sequences that share the blocks of one pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import snapshots
from .arguments import MAX_INT32, MAX_INT64, as_int, as_ints, per_seq
from .groups import Group, LayerGroups
from .guard import Guarded, consistent, exclusive
from .handles import NO_HANDLE
from .ids import UNUSED, Int32Array, Int64Array
from .pool import BlockPool
from .prefix.cache import PrefixCache
from .rows import SequenceRows


class Sequences(Guarded):
    """Base of `SequenceTable` and `PagedKVCache`: sequences that share the blocks of one pool.

    A sequence is named by its handle, an int that is never reused once the sequence is freed. Methods on many
    sequences take one handle, a list or tuple of them, or a 1-D int64 array, and do a handful of array operations
    whatever the number.

    Every method changes all or nothing. Mutations of one pool exclude each other: a call from a second thread in
    the middle of one raises RuntimeError. Reads wait for the other thread's call. Sequences cannot be copied or
    pickled: TypeError.

    Parameters
    ----------
    pool : BlockPool
    block_size, max_seqs, max_blocks : int
        As in `SequenceTable`.
    prefix_cache : PrefixCache or None
        Finds full blocks by their tokens.
    groups : LayerGroups or None
        Groups of layers, each with block tables of its own; None for one group without a window.
    keep : int
        Tokens left of the windows that stay.
    num_states : int
        Slots for states of sequences, 0 if they have none; else at least max_seqs.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_seqs: int,
        max_blocks: int,
        *,
        prefix_cache: PrefixCache | None = None,
        groups: LayerGroups | None = None,
        keep: int = 0,
        num_states: int = 0,
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
        self._guard = pool._guard
        self.layer_groups = LayerGroups.of(None, 1, block_size) if groups is None else groups
        self.keep = keep
        tables = prefix_cache, self.layer_groups, keep, num_states
        self._rows = SequenceRows(pool, block_size, max_seqs, max_blocks, *tables)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of layers, each with block tables of its own; one if all layers see the same tokens."""
        return self._rows.groups.groups

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
    def num_free(self) -> int:
        """Blocks that can be handed out, the cached ones included."""
        return self.pool.num_free

    @property
    def max_seq_len(self) -> int:
        """Tokens that one sequence can have, max_blocks * P."""
        return self.max_blocks * self.block_size

    @exclusive
    def fork(self, seqs: Any, n: int = 1, *, last: list[list[int]] | None = None) -> list[int]:
        """Start n copies of each sequence, which share all its blocks, a partly full last one too.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), the sequences to share.
        n : int
            How many of each, at least 0.
        last : list of one list, or None
            Gets what this returns as the sequences start, since an interrupt may come before.

        Returns
        -------
        list of int
            The handles of the num_seqs * n new sequences, in the order of those that they share.

        Raises
        ------
        CapacityError
            Too few rows of the table are free.
        KeyError
            A sequence was freed, or never existed.

        Examples
        --------
        >>> from pagedkv import BlockPool, SequenceTable
        >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=4, max_blocks=4)
        >>> seq = table.add(6)
        >>> samples = table.fork(seq, n=2)
        >>> table.block_tables(samples)
        array([[0, 1],
               [0, 1]], dtype=int32)
        """
        n = as_int("n", n, maximum=MAX_INT64)
        parents = self._rows.handles.find(seqs)
        rows, handles, writes = self._rows.handles.plan_issue(len(parents) * n)
        writes += self._rows.plan_fork(rows, parents, n)
        if last is not None:
            writes.append((last, 0, handles))
        self.pool._commit(writes)
        return handles

    @exclusive
    def reorder(self, seqs: Any, parents: Any) -> None:
        """Let each sequence continue with the tokens of another, as beams do; the handles stay the same.

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
            A sequence was freed, or never existed.

        Examples
        --------
        >>> from pagedkv import BlockPool, SequenceTable
        >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=4, max_blocks=4)
        >>> beams = [table.add(3), table.add(6)]
        >>> table.reorder(beams, parents=[1, 1])
        >>> table.seq_lens(beams)
        array([6, 6], dtype=int32)
        """
        rows = self._rows.handles.find_distinct(seqs)
        parents = as_ints("parents", parents, len(rows), "num_seqs")
        wrong = (parents < 0) | (parents >= len(rows))
        if wrong.any():
            raise IndexError(f"parents must be in 0..num_seqs-1 = 0..{len(rows) - 1}, got {parents[wrong][0]}")
        self.pool._commit(self._rows.plan_reorder(rows, rows[parents]))

    @exclusive
    def truncate(self, seqs: Any, length: Any) -> None:
        """Shorten sequences to their first tokens, and release the blocks past the end.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.
        length : int, or (num_seqs,) ints
            The new length of every sequence, or of each: from 0 to what it is.

        Raises
        ------
        ValueError
            A length that is negative or more than the sequence has, or so short that a query would see what has been
            released behind a window; with states, one for which there is none; or a sequence named twice.
        KeyError
            A sequence was freed, or never existed.

        Examples
        --------
        >>> from pagedkv import BlockPool, SequenceTable
        >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=4, max_blocks=4)
        >>> seq = table.add(6)
        >>> table.truncate(seq, 4)
        >>> table.seq_lens(seq), table.num_free
        (array([4], dtype=int32), 7)
        """
        rows = self._rows.handles.find_distinct(seqs)
        lens = self._rows.lens[rows]
        length = per_seq("length", length, len(rows))
        longer = length > lens
        if longer.any():
            i = int(longer.argmax())
            raise ValueError(
                f"length must be at most the {lens[i]} tokens of sequence {self._rows.handles.of(rows)[i]}, got "
                f"{length[i]}"
            )
        if self._rows.windows is not None:
            shortest = self._rows.windows.shortest(self._rows.lines_of(rows))
            if (shorter := (length != 0) & (length < shortest)).any():
                i = int(shorter.argmax())
                raise ValueError(
                    f"length must be 0 or at least {shortest[i]} for sequence {self._rows.handles.of(rows)[i]}, since "
                    f"what lies before the window has been released, got {length[i]}: a cache made with keep=n goes "
                    "back n tokens more"
                )
        if self._rows.states is not None:
            snapshots.require_lens(self._rows, rows, length)
        self.pool._commit(self._rows.plan_drop(rows, length))

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
            A sequence was freed, or never existed.

        Examples
        --------
        >>> from pagedkv import BlockPool, SequenceTable
        >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=4, max_blocks=4)
        >>> seq = table.add(6)
        >>> table.free(seq)
        >>> table.num_seqs, table.num_free
        (0, 8)
        """
        self.pool._commit(self._rows.plan_free(seqs))

    @consistent
    def slots(self, seq: int, start: int, stop: int) -> Any:
        """Slots of the tokens start..stop-1 of a sequence.

        Returns
        -------
        (stop - start,) int64
            block_id * P + offset; of a `PagedKVCache` in its array module. With several groups (num_groups, stop -
            start). -1 where a window has passed the token.

        Raises
        ------
        ValueError
            Not 0 <= start <= stop <= length.
        KeyError
            A sequence was freed, or never existed.

        Examples
        --------
        >>> from pagedkv import BlockPool, SequenceTable
        >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=4, max_blocks=4)
        >>> seq = table.add(6)
        >>> table.slots(seq, 3, 6)
        array([3, 4, 5])
        """
        rows = self._rows.handles.find(as_int("seq", seq, minimum=None))
        start, stop = as_int("start", start), as_int("stop", stop)
        length = self._rows.lens[rows[0]]
        if not start <= stop <= length:
            raise ValueError(
                f"start <= stop <= {length}, the length of sequence {seq}, must hold, got start {start}, stop {stop}"
            )
        slots = self._rows.slots(rows, start, stop)
        return slots if len(slots) > 1 else slots[0]

    @consistent
    def block_tables(self, seqs: Any) -> npt.NDArray[np.int32]:
        """The block tables of sequences, as a new array on the host.

        Returns
        -------
        (num_seqs, width) int32
            As wide as the longest of these sequences needs, at least 1, so that the cost follows the tokens and not
            the maximum. With several groups (num_groups, num_seqs, width). Entries at or past ceil(length / P), and
            those that a window has passed, are -1.

        Raises
        ------
        KeyError
            A sequence was freed, or never existed.

        Examples
        --------
        >>> from pagedkv import BlockPool, SequenceTable
        >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=4, max_blocks=4)
        >>> seqs = [table.add(6), table.add(3)]
        >>> table.block_tables(seqs)
        array([[ 0,  1],
               [ 2, -1]], dtype=int32)
        """
        return self._rows.tables_of(self._rows.handles.find(seqs))[0]

    @consistent
    def seq_lens(self, seqs: Any) -> npt.NDArray[np.int32]:
        """The lengths of sequences, (num_seqs,) int32, as a new array on the host.

        Raises
        ------
        KeyError
            A sequence was freed, or never existed.

        Examples
        --------
        >>> from pagedkv import BlockPool, SequenceTable
        >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=4, max_blocks=4)
        >>> table.seq_lens([table.add(6), table.add(3)])
        array([6, 3], dtype=int32)
        """
        return self._rows.lens[self._rows.handles.find(seqs)].astype(np.int32)

    @consistent
    def block_fills(self) -> npt.NDArray[np.int32]:
        """How many slots of each block hold a token of some sequence, (N,) int32.

        Examples
        --------
        >>> from pagedkv import BlockPool, SequenceTable
        >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=4, max_blocks=4)
        >>> seq = table.add(6)
        >>> table.block_fills()
        array([4, 2, 0, 0, 0, 0, 0, 0], dtype=int32)
        """
        lines, columns = self._rows.held()
        fills = np.zeros(self.pool.num_blocks, np.int32)
        lens = self._rows.lens[lines % self.max_seqs]
        tokens = np.minimum(lens - columns * self.block_size, self.block_size)
        np.maximum.at(fills, self._rows.blocks[lines, columns], tokens.astype(np.int32))
        return fills

    @consistent
    def block_owners(self) -> npt.NDArray[np.int64]:
        """The handle of a sequence that holds each block, (N,) int64; -1 for a block that none holds.

        Examples
        --------
        >>> from pagedkv import BlockPool, SequenceTable
        >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=4, max_blocks=4)
        >>> seq = table.add(6)
        >>> (table.block_owners() == seq).tolist()
        [True, True, False, False, False, False, False, False]
        """
        lines, columns = self._rows.held()
        owners = np.full(self.pool.num_blocks, NO_HANDLE)
        owners[self._rows.blocks[lines, columns]] = self._rows.handles.of(lines % self.max_seqs)
        return owners

    @consistent
    def block_groups(self) -> npt.NDArray[np.int64]:
        """The index in `groups` of the group that each block belongs to, (N,) int64; -1 for a block that none holds.

        Examples
        --------
        >>> from pagedkv import PagedKVCache
        >>> cache = PagedKVCache(2, 6, block_size=4, num_kv_heads=1, head_dim=8, windows=[2, None])
        >>> seq, _ = cache.add(6)
        >>> cache.block_groups()
        array([ 0,  0,  1,  1, -1, -1])
        """
        lines, columns = self._rows.held()
        groups = np.full(self.pool.num_blocks, UNUSED, np.int64)
        groups[self._rows.blocks[lines, columns]] = lines // self.max_seqs
        return groups

    @consistent
    def check(self) -> None:
        """Raise AssertionError unless every invariant holds, the pool's included.

        A block has as many references as there are entries for it in the table; a sequence has ceil(length / P)
        blocks in each group, less those that a window has passed, all different, and -1 elsewhere; a row is either free
        or has the handle of its generation. With a prefix cache: a block that can be found is in its index, behind the
        block that it follows; a block waits for eviction if it can be found and has no references.

        Examples
        --------
        >>> from pagedkv import BlockPool, SequenceTable
        >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=4, max_blocks=4)
        >>> seq = table.add(6)
        >>> table.check()
        """
        self._rows.check()

    def _release_passed(self, rows: Int64Array, n: Any = 0, tokens: Int32Array | None = None) -> None:
        """Release the blocks that no query behind the tokens that rows have now will see.

        If `n` or `tokens`, which an append is to add, are wrong, raise what it raises, and release nothing.
        """
        if writes := self._rows.plan_pass(rows):
            self._rows.lens_after(rows, n, tokens)
            self.pool._commit(writes)

    @consistent
    def _batch(self, seqs: Any, query_lens: Any) -> tuple[Int32Array, int, Int32Array, Int64Array | None]:
        """`block_tables`, the longest length, `seq_lens` and the given query_lens, read at one instant."""
        rows = self._rows.handles.find(seqs)
        tables, longest, lens = self._rows.tables_of(rows)
        if query_lens is None:
            return tables, longest, lens, None
        query_lens = per_seq("query_lens", query_lens, len(rows))
        longer = query_lens > lens
        if np.count_nonzero(longer):
            i = int(longer.argmax())
            raise ValueError(
                f"query_lens must be at most the {lens[i]} tokens of sequence {self._rows.handles.of(rows)[i]}, got "
                f"{query_lens[i]}"
            )
        return tables, longest, lens, query_lens
