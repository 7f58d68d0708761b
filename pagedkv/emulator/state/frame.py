"""The state of one batch of thread blocks: its lanes, registers, and shared and local memory.

As in PTX, a thread block is a `cta` here; a `block` is a basic block of instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ..errors import Coordinates, EmulatorError
from ..ptx.instruction import Instruction
from ..ptx.program import Program, SharedLayout
from ..ptx.types import GLOBAL_BASE, VIEW_DTYPE
from ..translation.scope import Scope
from .faults import KernelFault
from .memory import UNALLOCATED, ByteSpace, Memory

WARP_SIZE = 32
Mask = np.ndarray | None  # the active lanes of a batch; None: all of them


def _coordinates(number: int, sizes: Coordinates) -> Coordinates:
    return number % sizes[0], number // sizes[0] % sizes[1], number // (sizes[0] * sizes[1])


class Frame:
    """A batch in which lane i is thread i % num_threads of thread block ctas[i // num_threads]."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        grid: Coordinates,
        block: Coordinates,
        ctas: np.ndarray,
        dynamic_shared: int,
        layout: SharedLayout,
        name: str,
    ) -> None:
        self.program, self.memory, self.layout, self.name = program, memory, layout, name
        self.grid, self.block = grid, block
        self.num_threads = threads = block[0] * block[1] * block[2]
        self.num_ctas = len(ctas)
        self.num_lanes = self.num_ctas * threads
        self.lanes = np.arange(self.num_lanes, dtype=np.int64)
        self.thread = np.tile(np.arange(threads, dtype=np.int64), self.num_ctas)
        self.lane = self.thread % WARP_SIZE
        self.warps_per_cta = -(-threads // WARP_SIZE)
        self.num_warps = self.num_ctas * self.warps_per_cta
        self.warp_in_cta = self.thread // WARP_SIZE
        self.cta_slot = np.repeat(np.arange(self.num_ctas, dtype=np.int64), threads)
        self.cta = ctas[self.cta_slot]
        self.warp = self.cta_slot * self.warps_per_cta + self.warp_in_cta
        self.warp_first = self.lanes - self.lane
        self.warp_size_of_lane = np.minimum(WARP_SIZE, threads - self.warp_in_cta * WARP_SIZE)
        self.whole_warps = threads % WARP_SIZE == 0
        everyone = (np.int64(1) << self.warp_size_of_lane) - 1
        self.exists = np.where(self.warp_size_of_lane == WARP_SIZE, 0xFFFFFFFF, everyone).astype(np.uint32)
        self.dynamic_shared = dynamic_shared
        self._make_shared()
        self._make_local()

    def _make_shared(self) -> None:
        layout = self.layout
        self.shared_limit = layout.dynamic_offset + self.dynamic_shared
        stride = (max(self.shared_limit, 16) + 127) // 128 * 128
        self.shared = ByteSpace(self.num_ctas * stride)
        self.shared.shadow[:] = UNALLOCATED
        per_cta = self.shared.shadow[: self.num_ctas * stride].reshape(self.num_ctas, stride)
        for name, size in layout.sizes.items():
            per_cta[:, layout.offsets[name] : layout.offsets[name] + size] = 0
        per_cta[:, layout.dynamic_offset : self.shared_limit] = 0
        self.shared.data[:] = 0xA5
        self.shared_base = self.cta_slot * stride

    def _make_local(self) -> None:
        self.local_bytes = self.program.local_bytes
        stride = (max(self.local_bytes, 16) + 15) // 16 * 16
        self.local_base = self.lanes * stride
        if not self.local_bytes:
            self.local = ByteSpace(32)
            return
        self.local = ByteSpace(self.num_lanes * stride)
        self.local.shadow[:] = UNALLOCATED
        self.local.shadow[: self.num_lanes * stride].reshape(self.num_lanes, stride)[:, : self.local_bytes] = 0
        self.local.data[:] = 0xA5

    # -- namespace of the generated code
    def namespace(self, scope: Scope, reuse: bool) -> dict[str, Any]:
        """The arrays that generated code names; with `reuse`, only those that change from batch to batch."""
        ns: dict[str, Any] = {}
        for name in scope.specials:
            if not reuse or name.startswith("ctaid"):
                value = self._special(name)
                ns[f"S_{name}"] = np.ascontiguousarray(np.broadcast_to(value, (self.num_lanes,)), np.uint32)
        if reuse:
            return ns
        self._registers(scope, ns)
        for (kind, value, view), name in scope.constants.items():
            ns[name] = self._constant(kind, value, view)
        ns.update(scope.objects)
        ns["cc"] = np.zeros(self.num_lanes, np.uint32)
        return ns

    def _special(self, name: str) -> Any:
        head, _, axis = name.partition("_")
        if axis in ("x", "y", "z"):
            k = "xyz".index(axis)
            sizes: dict[str, Any] = {"ntid": self.block, "nctaid": self.grid}
            if head in sizes:
                return sizes[head][k]
            number, within = (self.thread, self.block) if head == "tid" else (self.cta, self.grid)
            return (number % within[0], number // within[0] % within[1], number // (within[0] * within[1]))[k]
        bit, one = np.left_shift(np.uint32(1), self.lane.astype(np.uint32)), np.uint32(1)
        values: dict[str, Callable[[], Any]] = {
            "laneid": lambda: self.lane,
            "warpid": lambda: self.warp_in_cta,
            "nwarpid": lambda: self.warps_per_cta,
            "lanemask_eq": lambda: bit,
            "lanemask_lt": lambda: bit - one,
            "lanemask_le": lambda: bit | (bit - one),
            "lanemask_ge": lambda: ~(bit - one),
            "lanemask_gt": lambda: ~(bit | (bit - one)),
            "dynamic_smem_size": lambda: self.dynamic_shared,
            "total_smem_size": lambda: self.layout.static_bytes + self.dynamic_shared,
            "nsmid": lambda: 1,
        }
        return values.get(name, lambda: 0)()  # clock, smid and gridid read 0

    def _registers(self, scope: Scope, ns: dict[str, Any]) -> None:
        # One array for all registers of a width: a page costs memory only once it is written.
        kinds: dict[Any, list[tuple[str, str]]] = {}
        for name, view in scope.views:
            kinds.setdefault("p" if view == "p" else VIEW_DTYPE[view].itemsize, []).append((name, view))
        for kind, used in kinds.items():
            rows = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in used))}
            bits = np.zeros((len(rows), self.num_lanes), np.bool_ if kind == "p" else f"u{kind}")
            typed = {view: bits.view(VIEW_DTYPE.get(view, bits.dtype)) for view in {view for _, view in used}}
            ns.update((f"{name}_{view}", typed[view][rows[name]]) for name, view in used)

    def _constant(self, kind: str, value: Any, view: str) -> np.ndarray:
        if kind == "pred":
            return np.full(self.num_lanes, bool(value))
        dtype = VIEW_DTYPE[view]
        if kind == "symbol":
            name, off = value
            value = self._symbol(name) + off
        elif kind == "int" and dtype.kind == "f":
            return np.full(self.num_lanes, value, dtype)
        bits = value & ((1 << 8 * dtype.itemsize) - 1)
        return np.full(self.num_lanes, bits, f"u{dtype.itemsize}").view(dtype)

    def _symbol(self, name: str) -> int:
        for offsets in (self.layout.offsets, self.program.local_symbols):
            if name in offsets:
                return offsets[name]
        if name in self.program.globals:
            return self.memory.module_symbol(self.program.globals, name).address
        raise EmulatorError(f"unknown symbol {name}")

    # -- faults
    def fail(
        self,
        fault: type[KernelFault],
        what: str,
        ins: Instruction,
        lane: int | None = None,
        address: int | None = None,
        place: str = "",
    ) -> NoReturn:
        """Raise a fault, with the source line and the coordinates of the lane."""
        raise fault(
            what,
            kernel=self.name,
            line=ins.line,
            text=ins.text,
            source=self.program.source(ins.line),
            thread_block=None if lane is None else self.cta_coordinates(int(self.cta[lane])),
            thread=None if lane is None else self.thread_coordinates(lane),
            address=address,
            place=place,
        )

    def thread_coordinates(self, lane: int) -> Coordinates:
        return _coordinates(lane % self.num_threads, self.block)

    def cta_coordinates(self, cta: int) -> Coordinates:
        return _coordinates(cta, self.grid)

    def describe(self, space: str, off: int, lane: int) -> tuple[int, str]:
        """The address and a description of a byte offset into global, shared or local memory."""
        if space == "global":
            return off + GLOBAL_BASE, self.memory.describe(off + GLOBAL_BASE)
        if space == "local":
            return off - int(self.local_base[lane]), f"local memory of {self.local_bytes} bytes"
        return self.describe_shared(off - int(self.shared_base[lane]))

    def describe_shared(self, address: int) -> tuple[int, str]:
        """A shared address, and the array in which or just past which it lies."""
        layout = self.layout
        spans = [(layout.offsets[name], size, name) for name, size in layout.sizes.items()]
        if self.dynamic_shared or any(name not in layout.sizes for name in layout.offsets):
            spans.append((layout.dynamic_offset, self.dynamic_shared, "dynamic shared memory"))
        for start, size, name in spans:
            if start <= address < start + size:
                return address, f"byte {address - start} of {size} in {name}"
        before = [(address - start - size, name) for start, size, name in spans if start <= address]
        if not before:
            return address, "outside shared memory"
        return address, "{} bytes past the end of {}".format(*min(before))
