"""wgmma: products of a warpgroup (four warps), which run beside it until it waits for them.

A product is computed when its warp comes to it; the checks know what must not be touched meanwhile. Warp w of a
warpgroup has rows 16 w to 16 w + 15, in the fragments of mma. The layouts that descriptors name are those of the
PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout", with a swizzle of 128 bytes:

    K-major     8 rows of 128 bytes, of which a product takes 32; the next 8 rows SBO further on
    MN-major    8 rows (of k) of 128 bytes, which are 64 elements along M or N; the next 64 LBO, the next 8 rows SBO on

and chunk c, of 16 bytes, of a row at an address with bits 7 to 9 = r lies at c ^ r.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..errors import UnsupportedInstructionError
from ..ptx.instruction import Instruction
from ..state.faults import MemoryFault, RaceFault, SyncFault
from ..state.frame import WARP_SIZE, Frame, Mask
from ..state.operands import Operands, OperandsInFlight
from ..state.order import Order
from ..state.proxies import Proxies
from ..translation.mem_op import MemOp, Wgmma
from .access import Access
from .matrix import elements, whole_warps
from .numeric import load_narrow

WARPS = 4  # of a warpgroup
_ROW, _ATOM, _CHUNK, _PER_CHUNK = 128, 1024, 16, 8  # bytes of a row, of 8 of them and of a chunk; its elements
_SWIZZLE_128 = 1
_UNUSED_BITS = 0x3FF1_C000_C000_C000


class WarpgroupOps:
    """The warpgroup instructions of one batch."""

    def __init__(self, frame: Frame, access: Access, order: Order | None) -> None:
        self.frame, self.access = frame, access
        self._flying = access.operands = OperandsInFlight(frame)
        races = access.shared_races
        self._proxies = None if races is None or order is None else Proxies(frame, order, races)
        self._open_group = np.zeros(frame.num_warps, np.int64)
        # What the warps of a warpgroup do must be the same: how much each has done, and the first one's of each step.
        self._steps = [0] * frame.num_warps
        self._first: dict[tuple[int, int], tuple[Instruction, tuple[int, ...], int, list[int]]] = {}

    # -- what the code calls
    def proxy_fence(self, m: Mask) -> None:
        """Make what these threads know to be written visible to the asynchronous proxy."""
        if self._proxies is not None:
            self._proxies.fence(m)

    def wgmma_fence(self, ins: Instruction, m: Mask) -> None:
        """Let warps meet; ptx/wgmma.py checks the order of registers."""
        self._meet(ins, whole_warps(self.frame, ins, m), {})

    def wgmma_commit(self, ins: Instruction, m: Mask) -> None:
        """Close the open group of each warp."""
        rows = whole_warps(self.frame, ins, m)
        self._meet(ins, rows, {})
        self._open_group[self.frame.warp[rows[:, 0]]] += 1

    def wgmma_wait(self, ins: Instruction, m: Mask, keep: int) -> None:
        """Complete all but the last `keep` groups of each warp."""
        rows = whole_warps(self.frame, ins, m)
        self._meet(ins, rows, {})
        warps = np.zeros(self.frame.num_warps, np.bool_)
        warps[self.frame.warp[rows[:, 0]]] = True
        for operands in self._flying.wait(warps, self._open_group - keep):
            self._read(operands)  # as late as now

    def wgmma(
        self,
        op: MemOp,
        what: Wgmma,
        d: Sequence[np.ndarray],
        a: Sequence[np.ndarray],
        b: np.ndarray,
        adds: np.ndarray,
        m: Mask,
    ) -> np.ndarray:
        """Compute d = a @ b, or d + a @ b if a lane `adds`, summed in float64 and rounded once to float32."""
        f = self.frame
        rows = whole_warps(f, op.ins, m)
        descriptors = {"B": b} if len(a) > 1 else {"A": a[0], "B": b}
        self._meet(op.ins, rows, {**descriptors, "scale-d": adds})
        first = rows[:, 0]
        where = []
        if len(a) > 1:
            matrix_a = np.zeros((len(rows), 16, 16))
            _scatter_a(elements(a, rows, what.kind), matrix_a)
        else:
            skipped = 16 * (f.warp_in_cta[first] % WARPS)
            chunks = self._chunks(op, "A", a[0][first], first, skipped, 16, what.a_is_mn_major)
            where.append(chunks)
            matrix_a = self._matrix(chunks, what.kind, what.a_is_mn_major)
        # Warps of a thread block mostly have the same B.
        keys = np.stack([f.cta_slot[first], b[first].view(np.int64)])
        _, some, which = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        some, which, nothing = first[some], which.reshape(-1), np.zeros(len(some), np.int64)
        chunks = self._chunks(op, "B", b[some], some, nothing, what.n, what.b_is_mn_major)
        where.append(chunks[which])
        self._begin(op, rows, np.concatenate([x.reshape(len(rows), -1) for x in where], axis=1))
        matrix_b = self._matrix(chunks, what.kind, what.b_is_mn_major)
        product = np.matmul(matrix_a, np.swapaxes(matrix_b, 1, 2)[which]) * what.sign
        # Register 4 j + 2 h + e of lane (g, t) has row g + 8 h, column 8 j + 2 t + e.
        product = product.reshape(len(rows), 2, 8, what.n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
        product = product.reshape(what.n // 2, len(rows), WARP_SIZE)
        before = np.stack([register[rows] for register in d]).astype(np.float64)
        result = np.zeros((len(d), f.num_lanes), np.float32)
        result[:, rows] = product + np.where(adds[rows], before, 0.0)
        return result

    def misuse(self, ins: Instruction, what: str, m: Mask) -> None:
        """Fault: lanes run an instruction that misuses registers."""
        if m is None or m.any():
            self.frame.fail(RaceFault, what, ins, 0 if m is None else int(m.argmax()))

    def finish(self) -> None:
        """End the batch, with a fault if some warps of a warpgroup have done more than the others."""
        for ins, _, lane, warps in self._first.values():
            what = f"run by {len(warps)} of the 4 warps of a warpgroup: all 128 threads have to"
            self.frame.fail(SyncFault, f"{'.'.join(ins.parts[:2])} {what}", ins, lane)

    # -- warpgroups
    def _meet(self, ins: Instruction, rows: np.ndarray, values: dict[str, np.ndarray]) -> None:
        """Let warps come to an instruction; fault unless their whole warpgroups do, with the same descriptors."""
        f = self.frame
        if f.num_threads % (WARPS * WARP_SIZE):
            what = f"wgmma needs whole warpgroups of 128 threads, the thread block has {f.num_threads}"
            f.fail(SyncFault, what, ins, int(rows[0, 0]))
        for name, x in values.items():
            uneven = x[rows] != x[rows[:, :1]]
            if uneven.any():
                lane = int(rows[uneven][0])
                self._differ(name, ins, lane, int(x[lane]), int(x[lane - lane % WARP_SIZE]), "lane 0 of its warp")
        columns = [x[rows[:, 0]].tolist() for x in values.values()]
        for lane, warp, *mine in zip(rows[:, 0].tolist(), f.warp[rows[:, 0]].tolist(), *columns, strict=True):
            step = warp // WARPS, self._steps[warp]
            self._steps[warp] += 1
            other, expected, _, warps = self._first.setdefault(step, (ins, tuple(mine), lane, []))
            if other is not ins:
                what = f"the warps of a warpgroup run different instructions: warp {warps[0] % f.warps_per_cta}"
                f.fail(SyncFault, f"{what} is at PTX line {other.line} ({other.text})", ins, lane)
            for name, x, y in zip(values, mine, expected, strict=True):
                if x != y:
                    self._differ(name, ins, lane, x, y, f"warp {warps[0] % f.warps_per_cta} of its warpgroup")
            warps.append(warp)
            if len(warps) == WARPS:
                del self._first[step]

    def _differ(self, name: str, ins: Instruction, lane: int, mine: int, other: int, who: str) -> NoReturn:
        what = name if name == "scale-d" else f"the descriptor of {name}"
        words = f"{what} must be the same in all threads of a warpgroup, got {mine:#x}, and {other:#x} in {who}"
        self.frame.fail(SyncFault, words, ins, lane)

    # -- operands in shared memory
    def _chunks(
        self, op: MemOp, name: str, descriptors: np.ndarray, lanes: np.ndarray, skipped: np.ndarray, rows: int, mn: bool
    ) -> np.ndarray:
        """The offsets of chunks that descriptors name, shape (warps, rows, 2), or (warps, 16, rows / 8) if MN-major.

        `skipped` rows come before those.
        """
        at = np.empty((len(lanes), 16, rows // 8) if mn else (len(lanes), rows, 2), np.int64)
        for i, (descriptor, lane, skip) in enumerate(
            zip(descriptors.tolist(), lanes.tolist(), skipped.tolist(), strict=True)
        ):
            start, lbo, sbo = self._fields(op.ins, name, descriptor, lane, skip + rows, mn)
            if mn:
                k, chunk = np.arange(16)[:, None], skip // _PER_CHUNK + np.arange(rows // _PER_CHUNK)
                at[i] = start + k // 8 * sbo + k % 8 * _ROW + chunk // 8 * lbo + chunk % 8 * _CHUNK
            else:
                row = skip + np.arange(rows)[:, None]
                at[i] = start + row // 8 * sbo + row % 8 * _ROW + np.arange(2) * _CHUNK
        swizzled: np.ndarray = at ^ (at >> 7 & 7) << 4
        return swizzled + self.frame.shared_base[lanes][:, None, None]

    def _fields(
        self, ins: Instruction, name: str, descriptor: int, lane: int, rows: int, mn: bool
    ) -> tuple[int, int, int]:
        """Start, LBO and SBO of descriptors, in bytes."""
        if descriptor >> 62 != _SWIZZLE_128:
            raise UnsupportedInstructionError(
                f"the emulator models swizzles of 128 bytes, the descriptor of {name} ({descriptor:#x}) has another; "
                f"kernel {self.frame.name}; PTX line {ins.line}: {ins.text}"
            )
        start, lbo, sbo = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        wrong = ""
        if descriptor & _UNUSED_BITS:
            wrong = "bits 14, 15, 30, 31, 46 to 48 and 52 to 61 must be 0"
        elif descriptor >> 49 & 7 or start % _ATOM >= _ROW:
            wrong = "rows must start at a multiple of 1024 bytes, with a base offset of 0"
        elif start % _ROW + (_ROW if mn else 32) > _ROW:
            wrong = "an operand must not reach past a row of 128 bytes"
        elif (mn or rows > 8) and (sbo % _ATOM or not sbo):
            wrong = f"the stride byte offset must be a multiple of 1024, got {sbo}"
        elif mn and rows > 64 and (lbo % _ATOM or not lbo):
            wrong = f"the leading byte offset must be a multiple of 1024, got {lbo}"
        if wrong:
            self.frame.fail(MemoryFault, f"malformed descriptor of {name} ({descriptor:#x}): {wrong}", ins, lane)
        return start, lbo, sbo

    def _matrix(self, chunks: np.ndarray, kind: str, mn: bool) -> np.ndarray:
        """The elements of an operand in float64, shape (warps, rows, 16)."""
        words = self.frame.shared.data.view(np.uint64)
        pairs = words[(chunks >> 3)[..., None] + np.arange(2)].view(np.uint16)
        values: Any = load_narrow(pairs, kind).astype(np.float64).reshape(*chunks.shape[:2], -1)
        return np.swapaxes(values, 1, 2) if mn else values

    def _begin(self, op: MemOp, rows: np.ndarray, offsets: np.ndarray) -> None:
        """Note that warps begin to read chunks."""
        warps = self.frame.warp[rows[:, 0]]
        lanes = rows[:, np.arange(offsets.shape[1]) % WARP_SIZE]
        operands = Operands(op, warps, self._open_group[warps], offsets, lanes)
        flat, readers = offsets.reshape(-1), lanes.reshape(-1)
        base = self.frame.shared_base[readers]
        self.access.check(op, "shared", self.frame.shared, flat, self.frame.shared_limit, readers, True, base)
        self._read(operands)
        if self._proxies is not None:
            self._proxies.check(op, flat, op.size, readers)
        self._flying.add(operands)

    def _read(self, operands: Operands) -> None:
        if self.access.shared_races is not None:
            op, flat, lanes = operands.op, operands.offsets.reshape(-1), operands.lanes.reshape(-1)
            self.access.shared_races.access(op, flat, op.size, lanes, False, "wgmma's load")


def _scatter_a(fragments: np.ndarray, matrix: np.ndarray) -> None:
    """Fill matrices (warps, 16, 16) from fragments (4, warps, 32, 2), which lie as those of mma."""
    for i in range(4):
        part = fragments[i].reshape(-1, 8, 8)  # row g, columns 2 t + e
        row, column = 8 * (i & 1), 8 * (i >> 1)
        matrix[:, row : row + 8, column : column + 8] = part
