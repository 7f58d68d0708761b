"""HostStore: wire blocks in the memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np

from .recycled import RecycledMemory
from .slots import Slots
from .store import Buffer, sizes_of


class HostStore:
    """Keeps blocks in host memory, all of it reserved at once; the system gives pages of it as they are first used.

    Any thread may call it.

    Parameters
    ----------
    capacity : int
        Bytes of all blocks.
    block_bytes : int
        Bytes of the largest block: `Wire.block_bytes`.

    Examples
    --------
    >>> from pagedkv.stores import HostStore
    >>> store = HostStore(capacity=2 * 100, block_bytes=100)
    >>> keys = [bytes([i]) * 16 for i in range(3)]
    >>> store.put(keys[:2], [b"first", b"second"])
    >>> bytes(store.get(keys[:1])[0])
    b'first'
    >>> store.put(keys[2:], [b"third"])  # the second block makes room: it was used less recently
    >>> [block is not None for block in store.get(keys)]
    [True, False, True]
    """

    def __init__(self, capacity: int, block_bytes: int) -> None:
        self._slots = Slots(capacity, block_bytes)
        self.capacity, self.block_bytes = self._slots.capacity, self._slots.block_bytes
        self._blocks = np.empty((self._slots.num_slots, self.block_bytes), np.uint8)
        self._memory, self._lock = RecycledMemory(), Lock()

    def get(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Look up keys; see `BlockStore.get`."""
        with self._lock:
            places = self._slots.find(keys)
            found = self._memory.room_for(places)
            for place, block in zip(places, found, strict=True):
                if place is not None and block is not None:
                    block[:] = self._blocks[place[0], : place[1]].data
            return found

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say which keys are there; see `BlockStore.has`."""
        with self._lock:
            return [place is not None for place in self._slots.find(keys)]

    def put(self, keys: Sequence[bytes], blocks: Sequence[Buffer]) -> None:
        """Keep copies of blocks; see `BlockStore.put`."""
        with self._lock:
            sizes = sizes_of(blocks)
            chosen, slots, evicted = self._slots.plan(keys, sizes)
            self._slots.remove(evicted)
            for i, slot in zip(chosen, slots, strict=True):
                self._blocks[slot, : sizes[i]].data[:] = memoryview(blocks[i]).cast("B")
            self._slots.put([keys[i] for i in chosen], slots, [sizes[i] for i in chosen])

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        with self._lock:
            self._slots.remove(keys)
