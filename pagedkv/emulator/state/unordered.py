"""Strong stores to one location that nothing orders: a weak access must come after all of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# The lowest bits of a race detector's record.
STRONG_CLASS, SEVERAL = 7, 8
# Which records race with an access of lanes, were one of the two weak.
WouldRace = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Unordered:
    """Strong stores that another one has followed without an order; the record of the last one says SEVERAL.

    Attributes
    ----------
    kept : dict of int to list of int
        Records of the stores, by granule.
    """

    def __init__(self) -> None:
        self.kept: dict[int, list[int]] = {}

    def store(
        self, writes: np.ndarray, g: np.ndarray, lanes: np.ndarray, mine: np.ndarray, would_race: WouldRace
    ) -> None:
        """Record a strong store of each lane, one after the other."""
        last = writes[g]
        unordered = (last > 0) & ((last & STRONG_CLASS) != 0)
        if unordered.any():
            c = np.flatnonzero(unordered)
            unordered[c] = ((last[c] & SEVERAL) != 0) | would_race(lanes[c], last[c])
        writes[g] = mine
        if not unordered.any() and (writes[g] == mine).all():
            return
        writes[g] = last
        for granule, lane, record in zip(g.tolist(), lanes.tolist(), mine.tolist(), strict=True):
            old, kept = max(int(writes[granule]), 0), self.kept.pop(granule, [])
            kept = (kept if old & SEVERAL else []) + ([old & ~SEVERAL] if old & STRONG_CLASS else [])
            kept = [one for one in kept if would_race(np.array([lane]), np.array([one]))[0]]
            if kept:
                self.kept[granule] = kept
            writes[granule] = record | (SEVERAL if kept else 0)

    def plain(self, last: np.ndarray) -> np.ndarray:
        """The last records without SEVERAL."""
        return last & ~SEVERAL if self.kept else last

    def atomic(self, last: np.ndarray) -> np.ndarray | int:
        """What the record of an atomic takes over from the last records."""
        return np.where(last > 0, last & SEVERAL, 0) if self.kept else 0

    def racing(
        self, g: np.ndarray, lanes: np.ndarray, last: np.ndarray, strong_class: int, would_race: WouldRace
    ) -> tuple[int, int] | None:
        """The number of an access that races with a store kept here, and that store."""
        if not self.kept:
            return None
        for j in np.flatnonzero((last > 0) & ((last & SEVERAL) != 0)).tolist():
            for old in self.kept[int(g[j])]:
                same_class = strong_class != 0 and old & STRONG_CLASS == strong_class
                if not same_class and would_race(lanes[[j]], np.array([old]))[0]:
                    return j, old
        return None
