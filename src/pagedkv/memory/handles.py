"""Rows: which rows of a sequence table are taken, and the handles by which callers know them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError
from .checks import refuse_bools, require
from .transaction import Tally, Write

Int64Array = npt.NDArray[np.int64]
NO_HANDLE = -1


class Rows:
    """A stack of free rows, and a handle for each of the others.

    A handle is generation << bits | row, and the generation of a row goes up each time that it is freed, so that no
    handle is ever given out twice.

    Parameters
    ----------
    max_rows : int
        Rows of the table.
    """

    def __init__(self, max_rows: int) -> None:
        self._bits = max_rows.bit_length()
        # Rows are looked up clipped to the last entry, the one for handles with a row that does not exist. Neither
        # its 0 nor NO_HANDLE, for rows that are free, is equal to a handle that leads to it.
        self._handles = np.full(max_rows + 1, NO_HANDLE)
        self._handles[max_rows] = 0
        self._generations = np.ones(max_rows, np.int64)
        self._free = np.arange(max_rows)[::-1].copy()
        self._num_free = np.array([max_rows])
        self._tally = Tally(max_rows)

    @property
    def num_free(self) -> int:
        """Rows that can be taken."""
        return int(self._num_free[0])

    @property
    def live(self) -> npt.NDArray[np.bool]:
        """Which rows are taken, (max_rows,) bool."""
        return self._handles[:-1] != NO_HANDLE

    def find(self, seqs: Any) -> Int64Array:
        """The rows of an int, a list or tuple of ints or an int64 array of handles; (num_seqs,) int64.

        Raises
        ------
        KeyError
            A handle that is no longer valid, or never was.
        TypeError, ValueError
            Not handles.
        """
        handles = _as_array(seqs)
        rows = handles & ((1 << self._bits) - 1)
        unknown = self._handles.take(rows, mode="clip") != handles
        if np.count_nonzero(unknown):
            refuse_bools("seqs", seqs)
            raise KeyError(f"no sequence {handles[unknown][0]}: it was freed or never added")
        return rows

    def find_distinct(self, seqs: Any) -> Int64Array:
        """What `find` gives, with ValueError for a handle that is named twice."""
        rows = self.find(seqs)
        repeated = self._tally.repeated(rows)
        if np.count_nonzero(repeated):
            raise ValueError(f"seqs must name each sequence once, got {self._handles[rows[repeated][0]]} twice")
        return rows

    def plan_take(self, n: int) -> tuple[Int64Array, list[int], list[Write]]:
        """Take n free rows: the rows, their handles, and what to store.

        Raises
        ------
        CapacityError
            Fewer than n rows are free.
        """
        if n > self.num_free:
            raise CapacityError(f"{n} more sequences asked for, {self.num_free} of {len(self._free)} rows are free")
        rest = self.num_free - n
        rows = self._free[rest : self.num_free][::-1].copy()
        handles = self._generations[rows] << self._bits | rows
        return rows, handles.tolist(), [(self._num_free, 0, rest), (self._handles, rows, handles)]

    def plan_give_back(self, rows: Int64Array) -> list[Write]:
        """Free rows, which are distinct and taken, and end the life of their handles: what to store."""
        top = self.num_free + len(rows)
        return [
            (self._handles, rows, NO_HANDLE),
            (self._generations, rows, self._generations[rows] + 1),
            (self._free, slice(self.num_free, top), rows[::-1]),
            (self._num_free, 0, top),
        ]

    def check(self) -> None:
        """Raise AssertionError unless each row is either free once or has the handle of its generation."""
        require(0 <= self.num_free <= len(self._free), f"{self.num_free} of {len(self._free)} rows are free")
        free = self._free[: self.num_free]
        require(np.array_equal(np.sort(free), np.flatnonzero(~self.live)), "free rows and rows without a handle differ")
        expected = self._generations << self._bits | np.arange(len(self._free))
        require((self._handles[:-1][self.live] == expected[self.live]).all(), "a handle is not that of its generation")
        require(self._handles[-1] == 0, "the entry for handles of no row has changed")


def _as_array(seqs: Any) -> Int64Array:
    if isinstance(seqs, np.ndarray):
        if seqs.ndim != 1:
            raise ValueError(f"seqs must have shape (num_seqs,), got {seqs.shape}")
        if seqs.dtype != np.int64:
            raise TypeError(f"seqs must have dtype int64, got {seqs.dtype}")
        return seqs
    if not isinstance(seqs, (list, tuple)):
        seqs = (seqs,)
    try:
        # numpy.array would round floats and take the dtype of the widest.
        return np.frombuffer(array("q", seqs), np.int64)
    except TypeError:
        wrong = next(seq for seq in seqs if not isinstance(seq, (int, np.integer)))
        raise TypeError(
            f"seqs must be handles (an int, a list or tuple of ints, or an int64 array), got {type(wrong).__name__}"
        ) from None
    except OverflowError:
        raise KeyError(f"no sequence {max(seqs, key=abs)}: it was freed or never added") from None
