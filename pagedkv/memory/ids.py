"""Helpers for arrays of block ids and rows: join, spread over ranges, count, check."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arrays import Array

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
NO_BLOCKS = np.empty(0, np.int64)
UNUSED = -1  # an entry of a table that is no block


def joined(first: Int64Array, second: Int64Array) -> Int64Array:
    """Concatenate two arrays; if one is empty, return the other itself, so do not write to the result."""
    if not len(second):
        return first
    return np.concatenate([first, second]) if len(first) else second


def spans(starts: Array, counts: Array) -> Int64Array:
    """The integers starts[i], ..., starts[i] + counts[i] - 1 for each i in turn, (counts.sum(),) int64."""
    if len(counts) and not np.count_nonzero(counts != counts[0]):
        return np.asarray(np.add.outer(starts, np.arange(counts[0])).reshape(-1))
    values = (starts - counts.cumsum() + counts).repeat(counts)
    values += np.arange(len(values))
    return values


def owned_spans(starts: Array, counts: Array) -> tuple[Int64Array, Int64Array]:
    """The integers that `spans` returns, with the i of each.

    Returns
    -------
    owners, values : (counts.sum(),) int64
    """
    return np.arange(len(counts)).repeat(counts), spans(starts, counts)


class Tally:
    """Counts occurrences of integers from 0 to size - 1, in time that does not depend on size."""

    def __init__(self, size: int) -> None:
        self._last = np.zeros(size, np.int64)

    def __call__(self, values: Array) -> tuple[Array, Array]:
        """The last place and the number of occurrences of each value.

        Returns
        -------
        last : (n,) int64
            Where values[i] occurs last; i itself for exactly one of equal values.
        counts : (n,) int64
            How often values[i] occurs, at i = last[i]; 0 elsewhere.
        """
        last = self.last_places(values)
        return last, np.bincount(last, minlength=len(values))

    def last_places(self, values: Array) -> Array:
        """Where values[i] occurs last, (n,) int64."""
        # A store with repeated indices keeps the last value, and this reads back only what it has just stored.
        self._last[values] = np.arange(len(values))
        return self._last.take(values)

    def repeated(self, values: Array) -> Array:
        """Which values occur again further on, (n,) bool."""
        return np.asarray(self.last_places(values) != np.arange(len(values)))

    def among(self, values: Array, others: Array) -> Array:
        """Which values, all different, are among others, (n,) bool."""
        return self.repeated(np.concatenate([values, others]))[: len(values)]


def must_hold(holds: bool | np.bool, otherwise: str) -> None:
    """Raise AssertionError, with or without python -O, unless an invariant holds; `otherwise` says what is wrong."""
    if not holds:
        raise AssertionError(otherwise)
