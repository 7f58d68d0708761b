"""The matrix instructions that generated code calls: mma, ldmatrix, stmatrix, movmatrix."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ..ptx.instruction import Instruction
from ..state.faults import SyncFault
from ..state.frame import Frame, Mask
from ..translation.mem_op import MemOp
from .access import Access
from .numeric import FP8_VALUES, load_narrow

U32 = np.uint32


@functools.cache
def _fragments(k: int, per: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where elements (row, column) of A, B and C lie among the registers, as flat (register, lane, element) indices.

    With g = lane // 4, t = lane % 4 and `per` elements in a register: register r of A holds row g + 8 * (r & 1),
    columns t * per + e + 4 * per * (r >> 1); register r of B holds rows t * per + e + 4 * per * r of column g;
    register r of C and D holds row g + 8 * (r >> 1), column 2 * t + (r & 1).
    """
    row, col = np.indices((16, k))
    register = (row >= 8) + 2 * (col // (4 * per))
    lane = row % 8 * 4 + col % (4 * per) // per
    at_a = (register * 32 + lane) * per + col % per
    row, col = np.indices((k, 8))
    at_b = (row // (4 * per) * 32 + col * 4 + row % (4 * per) // per) * per + row % per
    row, col = np.indices((16, 8))
    at_c = ((row >= 8) * 2 + col % 2) * 32 + row % 8 * 4 + col // 2
    return at_a, at_b, at_c.reshape(-1)


def elements(registers: Sequence[np.ndarray], rows: np.ndarray, kind: str) -> np.ndarray:
    """The values of registers in float64, shape (registers, warps, 32, elements of a register)."""
    bits = np.stack([register[rows] for register in registers])
    if kind in ("f16", "bf16"):
        values = load_narrow(bits.view(np.uint16), kind)
    elif kind == "tf32":
        values = (bits & U32(0xFFFFE000)).view(np.float32)
    elif kind in FP8_VALUES:
        values = FP8_VALUES[kind][bits.view(np.uint8)]
    else:
        values = bits.view(np.int8 if kind == "s8" else np.uint8)
    return values.astype(np.float64).reshape(*bits.shape, -1)


def whole_warps(f: Frame, ins: Instruction, m: Mask) -> np.ndarray:
    """The lane numbers of the active warps, shape (warps, 32); it is a fault if one is not whole."""
    if m is None and f.whole_warps:
        return f.lanes.reshape(-1, 32)
    active = np.ones(f.num_lanes, np.bool_) if m is None else m
    count = np.bincount(f.warp[active], minlength=f.num_warps)
    broken = (count != 0) & (count != 32)
    if broken.any():
        warp = int(broken.argmax())
        lane = int(np.argmax((f.warp == warp) & active))
        f.fail(SyncFault, f"matrix instruction with {int(count[warp])} of 32 lanes", ins, lane)
    first = f.warp_first[np.flatnonzero(active & (f.lane == 0))]
    return first[:, None] + np.arange(32)


class MatrixOps:
    """The matrix instructions of one batch."""

    def __init__(self, frame: Frame, access: Access) -> None:
        self.frame, self.access = frame, access

    def mma(
        self,
        ins: Instruction,
        kind: str,
        accumulator: str,
        k: int,
        a: Sequence[np.ndarray],
        b: Sequence[np.ndarray],
        c: Sequence[np.ndarray],
        m: Mask,
    ) -> np.ndarray:
        """Compute d = a @ b + c of m16n8k{k}, summed in float64 and rounded once to the accumulator's type."""
        rows = whole_warps(self.frame, ins, m)
        num_warps = len(rows)
        in_a, in_b = elements(a, rows, kind), elements(b, rows, kind)
        at_a, at_b, at_c = _fragments(k, in_a.shape[-1])
        matrix_a = np.moveaxis(in_a, 1, 0).reshape(num_warps, -1)[:, at_a]
        matrix_b = np.moveaxis(in_b, 1, 0).reshape(num_warps, -1)[:, at_b]
        in_c = np.stack([register[rows] for register in c], 1)
        if accumulator == "f16":
            in_c = np.swapaxes(in_c.view(np.float16).reshape(num_warps, 2, 32, 2), 2, 3)
        elif accumulator == "s32":
            in_c = in_c.view(np.int32)
        product: np.ndarray = np.matmul(matrix_a, matrix_b) + in_c.reshape(num_warps, 128)[:, at_c].reshape(
            num_warps, 16, 8
        )
        sums = np.empty((num_warps, 128))
        sums[:, at_c] = product.reshape(num_warps, 128)
        out: np.ndarray = sums.reshape(num_warps, 4, 32)
        if accumulator == "f32":
            out = out.astype(np.float32)
        elif accumulator == "s32":
            out = out.astype(np.int64).astype(U32)
        else:
            halves = np.swapaxes(out.astype(np.float16).reshape(num_warps, 2, 2, 32), 2, 3)
            out = np.ascontiguousarray(halves).view(U32)[..., 0]
        result = np.zeros((out.shape[1], self.frame.num_lanes), out.dtype)
        for i in range(out.shape[1]):
            result[i][rows] = out[:, i]
        return result

    def _rows_in_shared(self, op: MemOp, address: np.ndarray, rows: np.ndarray, count: int, load: bool) -> np.ndarray:
        """The rows of `count` 8x8 matrices as indices of 16-bit elements, shape (rows, 8)."""
        part = np.zeros(self.frame.num_lanes, np.bool_)
        part[rows[:, : 8 * count]] = True
        off, _ = self.access.shared_offsets(op, address, None if part.all() else part, load, not load)
        assert off is not None
        return (off >> 1)[:, None] + np.arange(8)

    def ldmatrix(self, op: MemOp, address: np.ndarray, count: int, trans: bool, m: Mask) -> np.ndarray:
        """Load `count` 8x8 matrices of 16-bit elements; lanes 8i to 8i + 7 hold the row addresses of matrix i."""
        rows = whole_warps(self.frame, op.ins, m)
        where = self._rows_in_shared(op, address, rows, count, True)
        data = self.frame.shared.views["u16"][where].reshape(-1, count, 8, 8)
        if trans:
            data = np.swapaxes(data, 2, 3)
        words = np.ascontiguousarray(data).view(U32).reshape(-1, count, 32)  # lane t: row t // 4, columns 2 * (t % 4)..
        out = np.zeros((count, self.frame.num_lanes), U32)
        for i in range(count):
            out[i][rows] = words[:, i]
        return out

    def stmatrix(self, op: MemOp, address: np.ndarray, values: Sequence[np.ndarray], trans: bool, m: Mask) -> None:
        """Store matrices, as `ldmatrix` loads them."""
        rows, count = whole_warps(self.frame, op.ins, m), len(values)
        where = self._rows_in_shared(op, address, rows, count, False)
        data = np.stack([value[rows] for value in values], 1).view(np.uint16).reshape(-1, count, 8, 8)
        if trans:
            data = np.swapaxes(data, 2, 3)
        self.frame.shared.views["u16"][where] = data.reshape(-1, 8)

    def movmatrix(self, ins: Instruction, a: np.ndarray, m: Mask) -> np.ndarray:
        """Transpose the 8x8 matrix in a warp's registers."""
        rows = whole_warps(self.frame, ins, m)
        data = np.swapaxes(np.ascontiguousarray(a[rows]).view(np.uint16).reshape(-1, 8, 8), 1, 2)
        out = np.zeros(self.frame.num_lanes, U32)
        out[rows] = np.ascontiguousarray(data).view(U32).reshape(-1, 32)
        return out
