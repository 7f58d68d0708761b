"""FirstFit: allocates runs of slots in the first hole that is large enough."""

from __future__ import annotations

from bisect import bisect


class FirstFit:
    """Allocates runs of slots and merges neighbouring holes (Knuth, The Art of Computer Programming 1, section 2.5).

    Parameters
    ----------
    memory : int
        Slots, at least 1.

    Attributes
    ----------
    holes : list of (start, size)
        Free runs, by their start; no two touch.
    sizes : dict of int to int
        Slots of each run in use, by its start.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.holes = [(0, memory)]
        self.sizes: dict[int, int] = {}

    @property
    def largest(self) -> int:
        """The most slots that a run can have while nothing else is allocated."""
        return self.memory

    def allocate(self, size: int) -> int | None:
        """Take a run of `size` >= 1 slots: its start, or None if no hole is large enough."""
        for i, (start, room) in enumerate(self.holes):
            if room >= size:
                self.holes[i : i + 1] = [(start + size, room - size)] if room > size else []
                self.sizes[start] = size
                return start
        return None

    def free(self, start: int) -> None:
        """Free a run.

        Raises
        ------
        KeyError
            No run in use starts there.
        """
        size = self.sizes.pop(start)
        i = bisect(self.holes, (start, 0))
        if i < len(self.holes) and start + size == self.holes[i][0]:
            size += self.holes.pop(i)[1]
        if i and sum(self.holes[i - 1]) == start:
            i -= 1
            start, before = self.holes.pop(i)
            size += before
        self.holes.insert(i, (start, size))
