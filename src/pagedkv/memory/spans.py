"""Spans: the integers of many ranges, one after the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arrays import Array

Int64Array = npt.NDArray[np.int64]


def ragged(starts: Array, counts: Array) -> tuple[Int64Array, Int64Array]:
    """The integers starts[i], ..., starts[i] + counts[i] - 1 for each i in turn, and the i of each.

    Returns
    -------
    owners, values : (counts.sum(),) int64
    """
    if len(counts) == 1:
        start, count = int(starts[0]), int(counts[0])
        return np.zeros(count, np.int64), np.arange(start, start + count)
    owners = np.arange(len(counts)).repeat(counts)
    begins = counts.cumsum() - counts
    return owners, np.arange(len(owners)) + (starts - begins).take(owners)
