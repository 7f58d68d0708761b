"""Chains: for each row of a sequence table, what is known of its tokens and which of its blocks can be found."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...commit import Write
from .digests import DIGEST, Digests

Int64Array = npt.NDArray[np.int64]


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
        self._roots = np.zeros(max_seqs, DIGEST)

    def roots(self, rows: Int64Array) -> Digests:
        """The root digests of rows."""
        return self._roots[rows]

    def plan_start(self, row: int, num_known: int, num_found: int, root: bytes) -> list[Write]:
        """Start a sequence in a row."""
        return [
            (self.num_known, row, num_known),
            (self.num_found, row, num_found),
            (self._roots, np.array([row]), np.frombuffer(root, DIGEST)),
        ]

    def plan_known(self, rows: Int64Array, num_known: Int64Array) -> list[Write]:
        """Store how many of each row's first tokens are known."""
        return [(self.num_known, rows, num_known)]

    def plan_found(self, rows: Int64Array, num_found: Int64Array) -> list[Write]:
        """Store how many of each row's first blocks can be found."""
        return [(self.num_found, rows, num_found)]

    def plan_shorten(self, rows: Int64Array, lens: Int64Array, num_full: Int64Array) -> list[Write]:
        """Cut each row down to at most `lens` tokens and `num_full` full blocks."""
        return [
            (self.num_known, rows, np.minimum(self.num_known[rows], lens)),
            (self.num_found, rows, np.minimum(self.num_found[rows], num_full)),
        ]

    def plan_copy(self, rows: Int64Array, parents: Int64Array) -> list[Write]:
        """Make each row like its parent."""
        return [
            (self.num_known, rows, self.num_known[parents]),
            (self.num_found, rows, self.num_found[parents]),
            (self._roots, rows, self._roots[parents]),
        ]

    def plan_clear(self) -> list[Write]:
        """Let no block of any row be found, now or later."""
        rows = np.arange(len(self.num_known))
        return [(state, rows, np.zeros_like(rows)) for state in (self.num_known, self.num_found)]
