"""SequenceTable: the sequences of a pool, for callers who have K and V in arrays of their own."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import starts
from .arguments import as_int
from .guard import consistent, exclusive
from .ids import Int64Array
from .prefix.prompt import Prompt
from .sequences import Sequences


class Appended(NamedTuple):
    """The slots and copies that `SequenceTable.append` returns.

    Attributes
    ----------
    slots : (num_new_tokens,) int64
        Slots of the new tokens, in the order of the sequences; with several groups (num_groups, num_new_tokens).
    copies : (m, 2) int64
        Source and destination of every block that must be copied before the slots are written.
    """

    slots: Int64Array
    copies: Int64Array


class SequenceTable(Sequences):
    """Block tables and lengths of sequences that share the blocks of one pool.

    A sequence is named by its handle, an int that is never reused once the sequence is freed. Methods on many
    sequences take one handle, a list or tuple of them, or a 1-D int64 array, and do a handful of array operations
    whatever the number.

    Every method changes all or nothing. Mutations of one pool exclude each other: a call from a second thread in
    the middle of one raises RuntimeError. Reads wait for the other thread's call. A table cannot be copied or
    pickled: TypeError.

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
    groups : LayerGroups or None
        Groups of layers, each with block tables of its own: `append` releases the blocks that their windows have
        passed. None if every layer sees all tokens.
    keep : int
        Tokens that stay left of the windows, so that `truncate` can take back as many.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here.

    Examples
    --------
    >>> from pagedkv import BlockPool, SequenceTable
    >>> table = SequenceTable(BlockPool(8), block_size=4, max_seqs=3, max_blocks=5)
    >>> table.can_add(6)
    True
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

    def __repr__(self) -> str:
        sizes = f"block_size={self.block_size}, max_seqs={self.max_seqs}, max_blocks={self.max_blocks}"
        return f"SequenceTable({sizes}; {self.num_seqs} sequences, {self.pool.num_free} blocks free)"

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
        plan = starts.plan_add(self._rows, Prompt(as_int("num_tokens", num_tokens)))
        self.pool._commit(plan.writes)
        return plan.seq

    @exclusive
    def append(self, seqs: Any, n: Any = 1) -> Appended:
        """Add n tokens to the end of each sequence.

        With windows, the blocks that they have passed before the new tokens come back first, even if too few blocks
        are free then.

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
            A sequence was freed, or never existed.
        """
        rows = self._rows.handles.find_distinct(seqs)
        self._release_passed(rows, n)
        plan = self._rows.plan_append(rows, n)
        appended = Appended(plan.slots, plan.copies[:])  # a view, since a caller may resize its array
        self.pool._commit(plan.writes)
        return appended

    @consistent
    def can_add(self, num_tokens: int, *, reserve: int = 0) -> bool:
        """Whether `add` has room for a sequence and leaves `reserve` blocks free."""
        prompt = Prompt(as_int("num_tokens", num_tokens))
        return starts.can_add(self._rows, prompt, as_int("reserve", reserve))
