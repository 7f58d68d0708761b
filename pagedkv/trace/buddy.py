"""BuddyAllocator: allocates runs of 2**k slots by splitting larger ones, and merges them again."""

from __future__ import annotations


class BuddyAllocator:
    """Allocates runs whose size is a power of two and divides their start (Knowlton, CACM 8, 1965).

    A run is half of the next larger one; its buddy, the other half, starts at ``start ^ size``. When both are free
    they merge. If the memory is not a power of two, it begins as one run for each binary digit.

    Parameters
    ----------
    memory : int
        Slots, at least 1.

    Attributes
    ----------
    holes : list of set of int
        ``holes[k]`` has the starts of free runs of 2**k slots.
    sizes : dict of int to int
        Slots of each run in use, by its start.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.sizes: dict[int, int] = {}
        self.holes: list[set[int]] = [set() for _ in range(memory.bit_length())]
        start = 0
        for k in reversed(range(memory.bit_length())):
            if memory >> k & 1:
                self.holes[k].add(start)
                start += 1 << k

    @property
    def largest(self) -> int:
        """The most slots that a run can have while nothing else is allocated."""
        return 1 << (self.memory.bit_length() - 1)

    def allocate(self, size: int) -> int | None:
        """Take a run of at least `size` >= 1 slots: its start, or None if no run is large enough."""
        order = (size - 1).bit_length()
        found = next((k for k in range(order, len(self.holes)) if self.holes[k]), None)
        if found is None:
            return None
        start = min(self.holes[found])
        self.holes[found].remove(start)
        for k in range(order, found):
            self.holes[k].add(start + (1 << k))
        self.sizes[start] = 1 << order
        return start

    def free(self, start: int) -> None:
        """Free a run, and merge it with its buddy as long as that is free.

        Raises
        ------
        KeyError
            No run in use starts there.
        """
        size = self.sizes.pop(start)
        k = size.bit_length() - 1
        while start ^ (1 << k) in self.holes[k]:
            self.holes[k].remove(start ^ (1 << k))
            start &= ~(1 << k)
            k += 1
        self.holes[k].add(start)
