"""bar.warp.sync: lanes of a warp that name each other wait for each other, whichever instructions they are at."""

from __future__ import annotations

import numpy as np

from ..ptx.instruction import Instruction
from ..state.frame import Frame, Mask
from ..state.order import Order
from .warp import require_member


class WarpBarriers:
    """The bar.warp.syncs of one batch.

    Attributes
    ----------
    passed : ndarray of bool
        Lanes whose barrier has opened, but which have not gone on yet.
    """

    def __init__(self, frame: Frame, order: Order | None) -> None:
        self.frame, self.order = frame, order
        self.passed = np.zeros(frame.num_lanes, np.bool_)

    def sync(self, ins: Instruction, members: np.ndarray | None, m: Mask) -> None:
        """Run a bar.warp.sync of lanes; `members` are the lanes that each of them names, None for the whole warp."""
        f = self.frame
        if members is not None:
            require_member(f, ins, members, m)
        if self.passed.any():
            active = np.ones(f.num_lanes, np.bool_) if m is None else m
            m = active & ~self.passed
            self.passed &= ~active
        if self.order is not None and (m is None or m.any()):
            self.order.warp_sync(members, m)

    def meet(self, waiting: np.ndarray, need: np.ndarray) -> None:
        """Open the barriers of those `waiting` lanes whose members, the lanes `need`, all wait with the same mask."""
        f = self.frame
        lanes = np.flatnonzero(waiting)
        _, group = np.unique(f.warp[lanes] << 32 | need[lanes], return_inverse=True)
        arrived = np.zeros(int(group.max()) + 1, np.uint32)
        np.bitwise_or.at(arrived, group, np.left_shift(np.uint32(1), f.lane[lanes].astype(np.uint32)))
        met = lanes[(need[lanes] & ~arrived[group]) == 0]
        if len(met):
            self.passed[met] = True
            if self.order is not None:
                m = np.zeros(f.num_lanes, np.bool_)
                m[met] = True
                self.order.warp_sync(need, m)
