"""The generic and the asynchronous proxy: whether a fence.proxy.async comes between a store and a wgmma.

wgmma reads shared memory through the asynchronous proxy. It sees what stores and cp.async have written through the
generic one only if a fence.proxy.async comes between the write and the wgmma (PTX ISA, "Causality order"): in the
thread that wrote, before the barrier; in the warp that reads, behind it; or in a third thread in between.
"""

from __future__ import annotations

import numpy as np

from ..translation.mem_op import MemOp
from .faults import RaceFault
from .frame import Frame, Mask
from .order import TIME, Order
from .races import UNFENCED, SharedRaces


class Proxies:
    """The fences of one batch.

    `SharedRaces.fences` has, by granule, the record of a fence that came after the last write to it.
    """

    def __init__(self, frame: Frame, order: Order, races: SharedRaces) -> None:
        self.frame, self.order, self.races = frame, order, races
        races.fences = np.full(len(races.writes), -1, np.int64)
        # Of each warp: the time up to which it knew each warp of its thread block at its last fence.
        self._seen = np.zeros_like(order.seen)

    def fence(self, m: Mask) -> None:
        """Let threads run a fence.proxy.async."""
        f, order, fences = self.frame, self.order, self.races.fences
        assert fences is not None
        open_ = np.flatnonzero(fences == UNFENCED)
        writer = self.races.writer(open_)
        own = np.ones(len(open_), np.bool_) if m is None else m[writer]
        fences[open_[own]] = order.stamp[writer[own]]
        active = f.lanes if m is None else np.flatnonzero(m)
        warps, count = np.unique(f.warp[active], return_counts=True)
        rest = open_[~own]
        for warp in warps.tolist() if len(rest) else ():
            lane = int(active[f.warp[active] == warp][0])
            same = rest[self.races.writer(rest) // f.num_threads == lane // f.num_threads]
            known = same[~self.races.is_unordered(lane, same)]
            fences[known] = order.stamp[lane]
        for warp in warps[count == 32].tolist():
            slot, number = divmod(warp, f.warps_per_cta)
            self._seen[slot, number] = order.seen[slot, number]

    def check(self, op: MemOp, off: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Fault unless everything that a wgmma reads has been fenced."""
        f, fences = self.frame, self.races.fences
        assert fences is not None
        for q in range(max(1, size >> self.races.shift)):
            g = (off >> self.races.shift) + q
            bad = self.races.is_after(lanes, fences[g])
            if not bad.any():
                continue
            c = np.flatnonzero(bad)
            writer, when = self.races.writer(g[c]), self.races.writes[g[c]] >> TIME
            slot, reader = lanes[c] // f.num_threads, f.warp_in_cta[lanes[c]]
            c = c[when >= self._seen[slot, reader, f.warp_in_cta[writer]]]
            if len(c):
                j, lane = int(c[0]), int(lanes[c[0]])
                writer_line = self.races.writer_line(int(g[j]))
                what = f"wgmma reads what was written ({writer_line}) with no fence.proxy.async since"
                what += ": the threads that write need one before the barrier"
                f.fail(RaceFault, what, op.ins, lane, *f.describe("shared", int(off[j]), lane))
