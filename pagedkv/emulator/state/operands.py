"""Shared memory that wgmma in flight may still read: nothing may be stored there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..translation.mem_op import MemOp
from .faults import RaceFault
from .frame import Frame

CHUNK_SHIFT = 4  # wgmma reads whole chunks of 16 bytes, and no store is wider


@dataclass(eq=False)
class Operands:
    """What one wgmma.mma_async reads, for each of its warps.

    Attributes
    ----------
    op : MemOp
    warps, groups : ndarray of int64
        Warps of the batch, and the group of each warp's wgmma, counted by that warp.
    offsets, lanes : ndarray of int64
        Chunks, and the lanes that represent the warp in the checks, shape (warps, chunks).
    """

    op: MemOp
    warps: np.ndarray
    groups: np.ndarray
    offsets: np.ndarray
    lanes: np.ndarray

    def where(self, chosen: np.ndarray) -> Operands:
        """The operands of some of the warps."""
        return Operands(self.op, self.warps[chosen], self.groups[chosen], self.offsets[chosen], self.lanes[chosen])


class OperandsInFlight:
    """The operands of a batch that no wgmma.wait_group has waited for."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._readers = np.zeros(len(frame.shared) >> CHUNK_SHIFT, np.int32)
        self._flying: list[Operands] = []

    def add(self, operands: Operands) -> None:
        """Add operands, which may be read from now on."""
        self._flying.append(operands)
        np.add.at(self._readers, operands.offsets.reshape(-1) >> CHUNK_SHIFT, 1)

    def wait(self, warps: np.ndarray, oldest_kept: np.ndarray) -> list[Operands]:
        """Remove the operands of these `warps` whose group is before `oldest_kept`, an array over all warps."""
        done, remaining = [], []
        for operands in self._flying:
            is_done = warps[operands.warps] & (operands.groups < oldest_kept[operands.warps])
            if is_done.any():
                done.append(operands.where(is_done))
                np.subtract.at(self._readers, done[-1].offsets.reshape(-1) >> CHUNK_SHIFT, 1)
            if not is_done.all():
                remaining.append(operands.where(~is_done))
        self._flying = remaining
        return done

    def check_store(self, op: MemOp, off: np.ndarray, idx: np.ndarray | None) -> None:
        """Fault if a store touches operands in flight."""
        met = self._readers[off >> CHUNK_SHIFT] != 0
        if not met.any():
            return
        j = int(met.argmax())
        lane = j if idx is None else int(idx[j])
        chunk = int(off[j]) >> CHUNK_SHIFT
        ins = next(x.op.ins for x in self._flying if (x.offsets >> CHUNK_SHIFT == chunk).any())
        what = f"{op.kind} to what a wgmma in flight may still read (PTX line {ins.line}: {ins.text})"
        where = self.frame.describe("shared", int(off[j]), lane)
        self.frame.fail(RaceFault, f"{what}: wgmma.wait_group must come first", op.ins, lane, *where)
