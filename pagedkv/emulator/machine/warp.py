"""The warp operations that generated code calls: shuffles, votes, matches, reductions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..ptx.instruction import Instruction
from ..state.faults import SyncFault
from ..state.frame import Frame, Mask

U32 = np.uint32
_REDUCTIONS = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def require_member(frame: Frame, ins: Instruction, members: np.ndarray, m: Mask) -> None:
    """Fault if a lane runs an instruction whose member mask leaves it out, which gives undefined results."""
    absent = (members >> frame.lane.astype(U32) & U32(1)) == 0
    absent = absent if m is None else absent & m
    if absent.any():
        lane = int(absent.argmax())
        what = f"member mask {int(members[lane]):#x} of {ins.op} leaves out the lane that names it"
        frame.fail(SyncFault, what, ins, lane)


class _Route(NamedTuple):
    """From where each lane of a shuffle reads, whether that is in range, and whether both lanes are members."""

    source: np.ndarray  # lane of the warp
    in_range: np.ndarray
    named: np.ndarray
    everyone: bool


class WarpOps:
    """The warp operations of one batch."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._lane_bit = np.left_shift(U32(1), frame.lane.astype(U32))
        self._everyone = np.ones(frame.num_lanes, np.bool_)
        self._routes: dict[Instruction, _Route] = {}

    def member(self, ins: Instruction, members: np.ndarray, m: Mask) -> None:
        """Check the member mask of an operation that may leave out lanes of the warp."""
        require_member(self.frame, ins, members, m)

    def _ballot(self, p: np.ndarray) -> np.ndarray:
        """The lanes of each lane's warp where `p` holds, as bit masks."""
        f = self.frame
        if f.whole_warps:
            return np.repeat(np.packbits(p.reshape(-1, 32), axis=1, bitorder="little").view(U32).reshape(-1), 32)
        masks = np.zeros(f.num_warps, U32)
        np.bitwise_or.at(masks, f.warp[p], self._lane_bit[p])
        return masks[f.warp]

    def _route(self, mode: str, b: np.ndarray, c: np.ndarray, mask: np.ndarray) -> _Route:
        lane = self.frame.lane
        b, c = (b & U32(31)).astype(np.int64), c.astype(np.int64)
        segment, clamp = (c >> 8) & 31, c & 31
        low = lane & segment
        high = low | (clamp & ~segment)
        source = {"bfly": lane ^ b, "down": lane + b, "up": lane - b, "idx": low | (b & ~segment)}[mode]
        in_range = source >= high if mode == "up" else source <= high
        source = np.where(in_range, source, lane)
        named = ((mask >> lane.astype(U32)) & (mask >> source.astype(U32)) & U32(1)).astype(np.bool_)
        return _Route(source, in_range, named, self.frame.whole_warps and bool(named.all()))

    def shfl(
        self,
        ins: Instruction,
        fixed: bool,
        mode: str,
        a: np.ndarray,
        b: np.ndarray,
        c: np.ndarray,
        mask: np.ndarray,
        m: Mask,
    ) -> tuple[np.ndarray, np.ndarray]:
        """shfl.sync; with `fixed`, b, c and mask are constants, and the route is kept."""
        f = self.frame
        route = self._routes.get(ins) if fixed else None
        if route is None:
            route = self._route(mode, b, c, mask)
            if fixed:
                self._routes[ins] = route
        source = f.warp_first + route.source
        if m is not None or not route.everyone:
            active = self._everyone if m is None else m
            exists = route.source < f.warp_size_of_lane
            bad = active & ~(route.named & exists & active[np.where(exists, source, 0)])
            if bad.any():
                lane = int(bad.argmax())
                what = f"shuffle reads lane {int(route.source[lane])}, which does not take part"
                f.fail(SyncFault, f"{what} (member mask {int(mask[lane]):#x})", ins, lane)
            source = np.where(exists, source, f.lanes)
        return a[source], route.in_range

    def vote(self, mode: str, p: np.ndarray, mask: np.ndarray, m: Mask) -> np.ndarray:
        """vote.sync"""
        need = mask & self.frame.exists
        votes = self._ballot(p if m is None else p & m) & need
        if mode == "ballot":
            return votes
        if mode == "any":
            return votes != 0
        return votes == need if mode == "all" else (votes == need) | (votes == 0)

    def match(self, mode: str, a: np.ndarray, mask: np.ndarray, m: Mask) -> tuple[np.ndarray, np.ndarray]:
        """match.any.sync and match.all.sync"""
        f = self.frame
        idx = f.lanes if m is None else np.flatnonzero(m)
        out = np.zeros(f.num_lanes, U32)
        _, value = np.unique(a[idx], return_inverse=True)
        _, group = np.unique(f.warp[idx] * (len(idx) + 1) + value.reshape(-1), return_inverse=True)
        bits = np.zeros(len(idx), U32)
        np.bitwise_or.at(bits, group, self._lane_bit[idx])
        out[idx] = bits[group] & mask[idx]
        if mode == "all":
            everyone = out == (mask & f.exists)
            return np.where(everyone, out, U32(0)), everyone
        return out, out != 0

    def redux(self, what: str, a: np.ndarray, mask: np.ndarray, m: Mask) -> np.ndarray:
        """redux.sync"""
        f = self.frame
        idx = f.lanes if m is None else np.flatnonzero(m)
        _, group = np.unique((f.warp[idx] << 32) | mask[idx].astype(np.int64), return_inverse=True)
        order = np.argsort(group, kind="stable")
        starts = np.flatnonzero(np.diff(group[order], prepend=-1))
        out = np.zeros(f.num_lanes, a.dtype)
        out[idx] = _REDUCTIONS[what].reduceat(a[idx][order], starts)[group]
        return out

    def elect(self, mask: np.ndarray, m: Mask) -> tuple[np.ndarray, np.ndarray]:
        """elect.sync"""
        present = self._ballot(self._everyone if m is None else m) & mask
        lowest = present & (~present + U32(1))
        return np.bitwise_count(lowest - U32(1)).astype(U32), lowest == self._lane_bit

    def activemask(self, m: Mask) -> np.ndarray:
        """activemask"""
        return self._ballot(self._everyone if m is None else m)
