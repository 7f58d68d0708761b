"""How the manager changes its state: all of a change or none of it.

A mutation first checks its arguments and computes everything that it will store, as a list of writes; `commit` then
stores them in one call that cannot fail.
"""

from __future__ import annotations

from collections import deque
from itertools import starmap
from operator import setitem
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Write = tuple[Array, Any, Any]
"""What to store where, in one of two forms, for which NumPy allocates nothing and converts nothing:

* a 1-D array, an int64 array of indices in range, and as many values in an array of the first one's dtype;
* an int64 array of one element, 0 and an int.
"""


def commit(writes: list[Write]) -> None:
    """Store every write, in order.

    No store fails, because none allocates. The loop runs in C: Python runs signal handlers between byte codes only, so
    a Ctrl-C comes before the first write or after the last.
    """
    deque(starmap(setitem, writes), maxlen=0)


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
        last = self._last_places(values, np.arange(len(values)))
        return last, np.bincount(last, minlength=len(values))

    def repeated(self, values: Array) -> Array:
        """Which values occur again further on, (n,) bool."""
        places = np.arange(len(values))
        return self._last_places(values, places) != places

    def _last_places(self, values: Array, places: Array) -> Array:
        # An index that repeats stores the last of its values, and only what was just stored is read back.
        self._last[values] = places
        return self._last.take(values)
