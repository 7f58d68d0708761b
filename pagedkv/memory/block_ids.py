"""Block ids: those of no block, and of two arrays together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
NO_BLOCKS = np.empty(0, np.int64)


def joined(first: Int64Array, second: Int64Array) -> Int64Array:
    """The ids of one array, and then of the other: no copy where one is empty, so do not write to it."""
    if not len(second):
        return first
    return np.concatenate([first, second]) if len(first) else second
