"""Handles: the ints by which callers name sequences; each stands for a row of the table."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from ..commit import Write
from ..errors import CapacityError
from .arguments import refuse_bools, refuse_mask
from .ids import Int64Array, Tally, must_hold

NO_HANDLE = -1
_RETIRED = np.array([NO_HANDLE])
_INT64 = np.dtype(np.int64)


class Handles:
    """The handles of the rows in use, and a stack of the free rows.

    A handle is generation << bits | row. Freeing a row increments its generation, so no handle is ever issued twice.

    Parameters
    ----------
    max_rows : int
        Rows of the table.
    remedy : str
        What to do when none is free, for messages.
    """

    def __init__(self, max_rows: int, remedy: str = "") -> None:
        self._remedy = remedy
        self._bits = max_rows.bit_length()
        self._row_mask = (1 << self._bits) - 1
        # A lookup clips rows that do not exist to the last entry. Neither its 0 nor the NO_HANDLE of free rows equals a
        # handle that leads there.
        self._issued = np.full(max_rows + 1, NO_HANDLE)
        self._issued[max_rows] = 0
        self._generations = np.ones(max_rows, np.int64)
        self._free = np.arange(max_rows)[::-1].copy()
        self._num_free = np.array([max_rows])
        self._tally = Tally(max_rows)
        # All calls of a step name the same sequences: keep the last distinct ones and their rows.
        self._known: tuple[bytes, Int64Array] | None = None

    @property
    def num_free(self) -> int:
        """How many rows are free."""
        return int(self._num_free[0])

    @property
    def live(self) -> npt.NDArray[np.bool]:
        """Which rows are in use, (max_rows,) bool."""
        return self._issued[:-1] != NO_HANDLE

    def of(self, rows: Int64Array) -> Int64Array:
        """The handles of rows in use, (num_rows,) int64."""
        return self._issued[rows]

    def find(self, seqs: Any) -> Int64Array:
        """Look up the rows of handles: an int, a list or tuple of ints, or an int64 array; (num_seqs,) int64.

        Raises
        ------
        KeyError
            A handle is no longer valid, or never was.
        TypeError, ValueError
            These are not handles.
        """
        known = self._known
        if known is not None and type(seqs) is np.ndarray and seqs.dtype == _INT64 and seqs.ndim == 1:
            if known[0] == seqs.tobytes():
                return known[1]
            known = None
        handles = _as_array(seqs)
        if known is not None and known[0] == handles.tobytes():
            return known[1]
        rows = handles & self._row_mask
        unknown = self._issued.take(rows, mode="clip") != handles
        if np.count_nonzero(unknown):
            refuse_bools("seqs", seqs if isinstance(seqs, (list, tuple)) else (seqs,))
            raise KeyError(f"no sequence {handles[unknown][0]}: it was freed or never added")
        return rows

    def find_distinct(self, seqs: Any) -> Int64Array:
        """As `find`, but raise ValueError for a handle that is named twice."""
        rows = self.find(seqs)
        if self._known is not None and rows is self._known[1]:
            return rows
        if not self.differ(rows):
            repeated = self._tally.repeated(rows)
            raise ValueError(f"seqs must name each sequence once, got {self.of(rows[repeated])[0]} twice")
        self._known = self.of(rows).tobytes(), rows
        return rows

    def differ(self, rows: Int64Array) -> bool:
        """Whether no row is named twice."""
        return len(rows) == 1 or not np.count_nonzero(self._tally.repeated(rows))

    def plan_issue(self, n: int) -> tuple[Int64Array, list[int], list[Write]]:
        """Issue n handles: the rows, the handles, and what to store.

        Raises
        ------
        CapacityError
            Fewer than n rows are free.
        """
        num_free = self.num_free
        if n > num_free:
            raise CapacityError(
                f"{n} more sequences asked for, {num_free} of {len(self._free)} rows are free{self._remedy}"
            )
        rest = num_free - n
        rows = self._free[rest:num_free][::-1].copy()
        handles = self._generations[rows] << self._bits | rows
        return rows, handles.tolist(), [(self._num_free, 0, rest), (self._issued, rows, handles)]

    def plan_retire(self, rows: Int64Array) -> list[Write]:
        """Retire the handles of distinct rows in use, and free the rows."""
        num_free = self.num_free
        top = num_free + len(rows)
        return [
            (vars(self), "_known", None),
            (self._issued, rows, _RETIRED.repeat(len(rows))),
            (self._generations, rows, self._generations[rows] + 1),
            (self._free, np.arange(num_free, top), rows[::-1].copy()),
            (self._num_free, 0, top),
        ]

    def check(self) -> None:
        """Raise AssertionError unless each row is either free once or has the handle of its generation."""
        must_hold(0 <= self.num_free <= len(self._free), f"{self.num_free} of {len(self._free)} rows are free")
        free = self._free[: self.num_free]
        must_hold(
            np.array_equal(np.sort(free), np.flatnonzero(~self.live)), "free rows and rows without a handle differ"
        )
        expected = self._generations << self._bits | np.arange(len(self._free))
        must_hold((self._issued[:-1][self.live] == expected[self.live]).all(), "a handle is not that of its generation")
        must_hold(self._issued[-1] == 0, "the entry for handles of no row has changed")


def _as_array(seqs: Any) -> Int64Array:
    if isinstance(seqs, np.ndarray):
        refuse_mask("seqs", seqs)
        if seqs.ndim != 1:
            raise ValueError(f"seqs must have shape (num_seqs,), got {seqs.shape}")
        if seqs.dtype != _INT64:
            raise TypeError(f"seqs must have dtype int64, got {seqs.dtype}")
        return seqs.copy()  # the caller may change them
    if not isinstance(seqs, (list, tuple)) or hasattr(seqs, "seq"):  # what `add` returns is a tuple
        seqs = (seqs,)
    try:
        # numpy.array would round floats and take the dtype of the widest.
        return np.frombuffer(array("q", seqs), np.int64)
    except TypeError:
        wrong = next(seq for seq in seqs if not isinstance(seq, (int, np.integer)))
        hint = ": pass its .seq" if hasattr(wrong, "seq") else ""
        raise TypeError(
            "seqs must be handles (an int, a list or tuple of ints, or an int64 array), "
            f"got {type(wrong).__name__}{hint}"
        ) from None
    except OverflowError:
        raise KeyError(f"no sequence {max(seqs, key=abs)}: it was freed or never added") from None
