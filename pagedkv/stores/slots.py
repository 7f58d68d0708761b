"""Slots: which key is in which slot of a store whose blocks have one size."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice, repeat, starmap
from typing import NamedTuple

from ..memory.arguments import as_int
from .store import require_blocks


class SlotPlan(NamedTuple):
    """Where blocks go: their places in the call, their slots, and the keys that make room for them."""

    chosen: list[int]
    slots: list[int]
    evicted: list[bytes]


class Slots:
    """The keys of a store in the order of their use, and the slot of each.

    A store first asks where blocks would go (`plan`), then takes the evicted keys out (`remove`), writes the blocks,
    and puts the new keys in (`put`): a key names its slot only while the slot holds its block.

    Parameters
    ----------
    capacity, block_bytes : int
        Bytes of all slots, and of each.
    """

    def __init__(self, capacity: int, block_bytes: int) -> None:
        self.block_bytes = as_int("block_bytes", block_bytes, minimum=1)
        self.capacity = as_int("capacity", capacity, minimum=self.block_bytes)
        self.num_slots = self.capacity // self.block_bytes
        self._used: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._free = dict.fromkeys(range(self.num_slots))

    def __len__(self) -> int:
        return len(self._used)

    def find(self, keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
        """The slot and the bytes of each key's block, or None; these keys are the most recently used ones now."""
        found = [self._used.get(key) for key in keys]
        # The first block of a sequence goes last: without it the others cannot be found.
        for key, place in zip(reversed(keys), reversed(found), strict=True):
            if place is not None:
                self._used.move_to_end(key)
        return found

    def plan(self, keys: Sequence[bytes], sizes: Sequence[int]) -> SlotPlan:
        """Decide where the blocks of new keys go; raises what `require_blocks` raises."""
        require_blocks(keys, sizes, self.block_bytes)
        here = {key for key in keys if key in self._used}
        chosen = [i for i, key in enumerate(keys) if key not in here][: self.num_slots - len(here)]
        num_evicted = max(0, len(chosen) - len(self._free))
        evicted = [*islice((key for key in self._used if key not in here), num_evicted)]
        slots = [*islice(self._free, len(chosen)), *(self._used[key][0] for key in evicted)]
        return SlotPlan(chosen, slots, evicted)

    def put(self, keys: Iterable[bytes], slots: Sequence[int], sizes: Iterable[int]) -> None:
        """Name the slots of a `SlotPlan` whose evicted keys are removed."""
        # As in `find`: a sequence loses its last block first.
        named = [*zip(keys, zip(slots, sizes, strict=True), strict=True)][::-1]
        _do_all(map(self._free.__delitem__, slots), starmap(self._used.__setitem__, named))

    def remove(self, keys: Iterable[bytes]) -> list[int]:
        """Forget keys, and return their slots."""
        here = [key for key in dict.fromkeys(keys) if key in self._used]
        gone = [self._used[key][0] for key in here]
        _do_all(map(self._used.__delitem__, here), map(self._free.__setitem__, gone, repeat(None)))
        return gone


def _do_all(*changes: Iterable[object]) -> None:
    """Make changes in a loop in C, so that no interrupt comes between them and leaves slots that nobody has."""
    deque(chain(*changes), maxlen=0)
