"""Tally: how often each of some integers occurs."""

from __future__ import annotations

import numpy as np

from ..arrays import Array


class Tally:
    """Counts how often each of the integers 0..size-1 occurs, in time that does not depend on size."""

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
