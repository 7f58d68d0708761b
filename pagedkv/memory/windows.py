"""Windows: which blocks of each sequence have been released, since no query to come sees a key in them."""

from __future__ import annotations

import numpy as np

from ..commit import Write
from .groups import LayerGroups
from .ids import Int64Array, must_hold


class Windows:
    """The first column that each line of the table still holds; those before it are passed.

    Parameters
    ----------
    groups : LayerGroups
    max_seqs : int
    keep : int
        Tokens left of the window that stay, for drafts that may be rolled back.

    Attributes
    ----------
    first : (num_groups * max_seqs,) int64
    """

    def __init__(self, groups: LayerGroups, max_seqs: int, keep: int) -> None:
        self._groups, self._keep = groups, keep
        self.first = np.zeros(len(groups.groups) * max_seqs, np.int64)

    def after(self, lines: Int64Array, num_computed: Int64Array) -> Int64Array:
        """The first column of each line once the queries of num_computed tokens of its sequence are computed."""
        return np.maximum(self.first[lines], self._groups.first_columns(num_computed, self._keep).reshape(-1))

    def shortest(self, lines: Int64Array) -> Int64Array:
        """The least length but 0 that each sequence can be truncated to, (num_seqs,)."""
        return self._groups.shortest(self.first[lines].reshape(len(self._groups.groups), -1))

    def plan(self, lines: Int64Array, first: Int64Array) -> list[Write]:
        """Set the first column of lines."""
        return [(self.first, lines, first)]

    def check(self, lens: Int64Array) -> None:
        """Raise AssertionError unless each line holds what the next query of its sequence sees."""
        seen = self._groups.seen_columns(lens).reshape(-1)
        must_hold((self.first >= 0).all() and (self.first <= seen).all(), "a block that a query will see was released")
