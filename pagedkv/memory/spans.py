"""Spans: the integers of many ranges, one after the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arrays import Array

Int64Array = npt.NDArray[np.int64]


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
