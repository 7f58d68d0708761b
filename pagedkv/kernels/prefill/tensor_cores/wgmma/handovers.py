"""Barriers by which one of two warpgroups tells the other one that something has happened, without waiting for it.

A handover takes two barriers of each warpgroup, for even and odd tiles: one may be a tile ahead of the other.
"""

from __future__ import annotations

from typing import Any

from ....device.intrinsics.warpgroup import arrive_at, wait_at
from ....device.language import uint32
from ....device.source import Steps, device_function
from .shape import WgmmaShape

FULL, FREE, TURN = 1, 5, 9  # the first number of four; barrier 0 is that of the thread block
ALWAYS = uint32(0)


def make_handover(shape: WgmmaShape, first: int) -> Any:
    """The device functions ``wait(group, odd)`` and ``tell(group, odd)``; `odd` is 2 for odd tiles and 0 for even ones.

    The warpgroup `group` waits until the other one has told it, or tells the other one.
    """
    FIRST, wait_for_all, arrive = first, wait_at(shape.num_threads), arrive_at(shape.num_threads)

    @device_function
    def wait(group, odd):
        wait_for_all(uint32(uint32(group + odd) + FIRST))

    @device_function
    def tell(group, odd):
        arrive(uint32(uint32(uint32(group ^ 1) + odd) + FIRST))

    return Steps(wait, tell)
