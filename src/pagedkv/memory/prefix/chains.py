"""Chains: for each row of a sequence table, what is known of its tokens and which of its blocks can be found."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...commit import Write

Int64Array = npt.NDArray[np.int64]
_HALVES = np.arange(2)  # of a digest, in 64 bits each


class Chains:
    """How many of its first tokens are known by their ids, how many of its first blocks can be found, and its root.

    Parameters
    ----------
    max_seqs : int
        Rows of the table.
    """

    def __init__(self, max_seqs: int) -> None:
        self.num_known = np.zeros(max_seqs, np.int64)
        self.num_found = np.zeros(max_seqs, np.int64)
        self._roots = np.zeros(2 * max_seqs, np.int64)

    def roots(self, rows: Int64Array) -> Int64Array:
        """The root digests of rows, (n, 2) int64."""
        return self._roots.reshape(-1, 2)[rows]

    def plan_start(self, rows: Int64Array, num_known: int, num_found: int, root: bytes) -> list[Write]:
        """One row, (1,) int64, begins a sequence."""
        return [
            *self.plan_known(rows, np.array([num_known])),
            *self.plan_found(rows, np.array([num_found])),
            (self._roots, 2 * rows + _HALVES, np.frombuffer(root, np.int64)),
        ]

    def plan_known(self, rows: Int64Array, num_known: Int64Array) -> list[Write]:
        """So many of the first tokens of each row are known."""
        return [(self.num_known, rows, num_known)]

    def plan_found(self, rows: Int64Array, num_found: Int64Array) -> list[Write]:
        """So many of the first blocks of each row can be found."""
        return [(self.num_found, rows, num_found)]

    def plan_shorten(self, rows: Int64Array, lens: Int64Array, num_full: Int64Array) -> list[Write]:
        """Each row has so many tokens, and full blocks, at most."""
        return [
            (self.num_known, rows, np.minimum(self.num_known[rows], lens)),
            (self.num_found, rows, np.minimum(self.num_found[rows], num_full)),
        ]

    def plan_copy(self, rows: Int64Array, parents: Int64Array) -> list[Write]:
        """Each row is as another one is."""
        halves = (2 * rows[:, None] + _HALVES).reshape(-1)
        return [
            (self.num_known, rows, self.num_known[parents]),
            (self.num_found, rows, self.num_found[parents]),
            (self._roots, halves, self.roots(parents).reshape(-1)),
        ]

    def plan_clear(self) -> list[Write]:
        """No row's blocks can be found, now or later."""
        rows = np.arange(len(self.num_known))
        return [(state, rows, np.zeros_like(rows)) for state in (self.num_known, self.num_found)]
