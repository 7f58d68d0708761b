"""The copies that a cp.async has started: what they read, and where they store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..translation.mem_op import MemOp

_MOST_BYTES = 16  # of a copy


@dataclass(eq=False)
class Copies:
    """The copies of one instruction, one for each of its lanes.

    Attributes
    ----------
    load, store : MemOp
    lanes : ndarray of int64
    offsets : ndarray of int64
        Where they begin to store, in shared memory.
    sources, amounts : ndarray of int64
        Where they begin to read, in global memory, and how many bytes.
    data : ndarray of uint8
        What they store, shape (copies, bytes).
    group : ndarray of int64
        The group of each copy, counted by its thread.
    """

    load: MemOp
    store: MemOp
    lanes: np.ndarray
    offsets: np.ndarray
    sources: np.ndarray
    amounts: np.ndarray
    data: np.ndarray
    group: np.ndarray

    def where(self, chosen: np.ndarray) -> Copies:
        """The copies that an index picks."""
        columns = (self.lanes, self.offsets, self.sources, self.amounts, self.data, self.group)
        return Copies(self.load, self.store, *(column[chosen] for column in columns))

    @property
    def destination(self) -> np.ndarray:
        """The offset in shared memory of every byte."""
        return self.offsets[:, None] + np.arange(self.data.shape[1])

    def read_from(self, off: np.ndarray, size: int) -> int | None:
        """The index of the first of the `size` bytes at each offset in global memory that a copy reads."""
        first, last = int(off.min()), int(off.max()) + size
        near = np.flatnonzero((self.amounts > 0) & (self.sources < last) & (self.sources + self.amounts > first))
        if not len(near):
            return None
        near = near[np.argsort(self.sources[near])]
        begin, end = self.sources[near], (self.sources + self.amounts)[near]
        low, high = np.searchsorted(begin, off - _MOST_BYTES), np.searchsorted(begin, off + size)
        for j in np.flatnonzero(low < high).tolist():
            if (end[low[j] : high[j]] > off[j]).any():
                return j
        return None
