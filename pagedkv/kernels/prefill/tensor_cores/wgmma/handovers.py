"""Barriers by which one of two warpgroups tells the other one that something has happened, without waiting for it.

A handover takes two barriers of each warpgroup, for even and odd tiles: one may be a tile ahead of the other. Of a
handover's four barriers `mine` is that of this warpgroup: its number, and 2 more for odd tiles.
"""

from __future__ import annotations

from ....device.intrinsics.warpgroup import arrive_at, wait_at
from ....device.language import uint32
from ....device.source import Steps, device_function
from .shape import WgmmaShape

FULL, FREE, TURN = 4, 8, 12  # the first number of four; barrier 0 is that of the thread block


def make_handover(shape: WgmmaShape, first: int) -> Steps:
    """The device functions ``wait(mine)``, until the other warpgroup has told this one, and ``tell(mine)``, as it."""
    FIRST, wait_for_all, arrive = first, wait_at(shape.num_threads), arrive_at(shape.num_threads)

    @device_function
    def wait(mine):
        wait_for_all(uint32(mine + FIRST))

    @device_function
    def tell(mine):
        arrive(uint32(uint32(mine ^ 1) + FIRST))

    return Steps(wait, tell)
