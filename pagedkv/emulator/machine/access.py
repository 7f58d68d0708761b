"""Loads, stores and atomics of one batch: checks of addresses, and movement of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from ..ptx.types import GLOBAL_BASE, LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from ..state.faults import MemoryFault, RaceFault
from ..state.footprint import FootprintRecorder
from ..state.frame import Frame, Mask
from ..state.memory import ByteSpace, Memory
from ..state.operands import OperandsInFlight
from ..state.order import Order
from ..state.races import GlobalRaces, SharedRaces
from ..state.stats import StatsRecorder
from ..translation.mem_op import MemOp
from .copies import Copies
from .tracer import Tracer

Offsets = tuple[np.ndarray | None, np.ndarray | None]  # byte offsets of the active lanes, and their numbers


_UFUNC: dict[str, np.ufunc] = {"add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _apply(what: str, old: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
    """The value that an atomic operation leaves in memory."""
    a = values[0]
    if what == "exch":
        return a
    if what == "cas":
        return np.where(old == a, values[1], old)
    if what == "min":
        return np.fmin(old, a)
    if what == "max":
        return np.fmax(old, a)
    if what == "inc":
        return np.where(old >= a, 0, old + old.dtype.type(1))
    if what == "dec":
        return np.where((old == 0) | (old > a), a, old - old.dtype.type(1))
    return _UFUNC[what](old, a)


class Access:
    """The memory operations that generated code calls, such as ld_global."""

    def __init__(
        self,
        frame: Frame,
        memory: Memory,
        init_check: bool,
        order: Order | None,
        shared_races: SharedRaces | None,
        global_races: GlobalRaces | None,
        stats: StatsRecorder,
        footprint: FootprintRecorder | None,
        rng: np.random.Generator | None,
    ) -> None:
        self.frame, self.memory, self.init_check, self.order = frame, memory, init_check, order
        self.shared_races, self.global_races, self.rng = shared_races, global_races, rng
        self.stats = stats if stats.memory else None
        self.footprint = footprint
        self.copies: list[Copies] = []  # unfinished
        self.operands: OperandsInFlight | None = None  # of wgmma, if the kernel has any

    # -- checks
    def check(
        self,
        op: MemOp,
        name: str,
        space: ByteSpace,
        off: np.ndarray,
        limit: int,
        idx: np.ndarray | None,
        load: bool,
        base: np.ndarray | None = None,
        init_check: bool | None = None,
    ) -> None:
        """Fault unless every access is in range, aligned and allowed; offsets are relative to `base` if given."""
        size = op.size
        rel = (off if base is None else off - base).view(np.uint64)
        if int(rel.max()) + size > limit:
            bad = rel > max(limit - size, 0) if limit >= size else rel >= 0
            self._fault("out of bounds", name, op, off, idx, bad)
        if size > 1 and int(np.bitwise_or.reduce(off)) & (size - 1):
            self._fault(f"misaligned ({size}-byte)", name, op, off, idx, (off & (size - 1)) != 0)
        init_check = self.init_check if init_check is None else init_check
        is_global = space is self.memory.space
        if is_global and not (load and init_check):  # otherwise nothing fetches these bytes from the host
            self.memory.fetch(off, size)
        while not space.verify(off, size, load, init_check):
            if is_global and self.memory.fetch(off, size):
                continue
            j, why = space.diagnose(off, size)
            self._fault(why, name, op, off, idx, np.arange(len(off)) == j)

    def _fault(
        self, why: str, name: str, op: MemOp, off: np.ndarray, idx: np.ndarray | None, bad: np.ndarray
    ) -> NoReturn:
        j = int(np.argmax(bad))
        lane = j if idx is None else int(idx[j])
        fault = RaceFault if "flight" in why else MemoryFault
        self.frame.fail(fault, f"{why} {name} {op.kind}", op.ins, lane, *self.frame.describe(name, int(off[j]), lane))

    @staticmethod
    def _signed(address: np.ndarray) -> np.ndarray:
        return address.view(np.int64) if address.dtype.itemsize == 8 else address.astype(np.int64)

    def _lanes(self, op: MemOp, address: np.ndarray, m: Mask) -> tuple[np.ndarray, np.ndarray | None]:
        """The addresses and numbers of the active lanes, in the order of atomics."""
        if op.kind == "atomic" and self.rng is not None:
            idx = self.rng.permutation(self.frame.lanes if m is None else np.flatnonzero(m))
        elif m is None:
            return address, None
        else:
            idx = np.flatnonzero(m)
        return address[idx], idx

    def global_offsets(self, op: MemOp, address: np.ndarray, m: Mask, load: bool, store: bool) -> Offsets:
        """Check and count an access, and return its byte offsets and lanes; offsets are None if no lane is active."""
        a, idx = self._lanes(op, address, m)
        if not len(a):
            return None, idx
        off = self._signed(a) - GLOBAL_BASE
        init_check = self.init_check
        if init_check and op.kind == "atomic" and any(buffer.zeroed for buffer in self.memory.buffers):
            init_check = not self.memory.zeroed(off)
        self.check(op, "global", self.memory.space, off, self.memory.extent, idx, load, None, init_check)
        if store:
            j = self.memory.note_store(off)
            if j is not None:
                self._fault("read-only", "global", op, off, idx, np.arange(len(off)) == j)
            for copies in self.copies:
                j = copies.read_from(off, op.size)
                if j is not None:
                    line = copies.load.ins
                    what = f"{op.kind} to the source of a cp.async still in flight (PTX line {line.line}: {line.text})"
                    lane = j if idx is None else int(idx[j])
                    self.frame.fail(RaceFault, what, op.ins, lane, *self.frame.describe("global", int(off[j]), lane))
        if self.global_races is not None:
            self.global_races.access(op, off, op.size, idx, store)
        if self.stats is not None:
            warps = self.frame.warp if idx is None else self.frame.warp[idx]
            self.stats.global_access(off, op.size, warps, store, load)
        if self.footprint is not None:
            self.footprint.access(off, op.size, load, store)
        return off, idx

    def shared_offsets(self, op: MemOp, address: np.ndarray, m: Mask, load: bool, store: bool) -> Offsets:
        """As `global_offsets`, in shared memory."""
        f = self.frame
        a, idx = self._lanes(op, address, m)
        if not len(a):
            return None, idx
        base = f.shared_base if idx is None else f.shared_base[idx]
        off = self._signed(a) + base
        self.check(op, "shared", f.shared, off, f.shared_limit, idx, load, base)
        if store and self.operands is not None:
            self.operands.check_store(op, off, idx)
        if self.shared_races is not None:
            self.shared_races.access(op, off, op.size, idx, store, op.kind)
        if self.stats is not None:
            lanes = slice(None) if idx is None else idx
            self.stats.shared_access(off, op.size, f.warp[lanes], f.lane[lanes])
        return off, idx

    def local_offsets(self, op: MemOp, address: np.ndarray, m: Mask, load: bool) -> Offsets:
        """As `global_offsets`, in local memory."""
        f = self.frame
        a, idx = self._lanes(op, address, m)
        if not len(a):
            return None, idx
        base = f.local_base if idx is None else f.local_base[idx]
        off = self._signed(a) + base
        self.check(op, "local", f.local, off, f.local_bytes, idx, load, base)
        return off, idx

    # -- data movement
    @staticmethod
    def _read(op: MemOp, data: np.ndarray, where: Offsets, dst: Sequence[np.ndarray | None]) -> None:
        off, idx = where
        if off is None:
            return
        element = off >> op.shift
        for q, register in enumerate(dst):
            if register is not None:
                values = data[element + q if q else element]
                if idx is None:
                    np.copyto(register, values, casting="unsafe")
                else:
                    register[idx] = values

    def _write(
        self, op: MemOp, name: str, data: np.ndarray, where: Offsets, src: Sequence[np.ndarray], check_lanes: bool
    ) -> None:
        off, idx = where
        if off is None:
            return
        element = off >> op.shift
        for q, register in enumerate(src):
            values = register if idx is None else register[idx]
            data[element + q] = values
            if check_lanes and (data[element + q] != values).any():
                j = int(np.argmax(data[element + q] != values))
                lane = j if idx is None else int(idx[j])
                what = "threads store different values to one location in the same instruction"
                self.frame.fail(RaceFault, what, op.ins, lane, *self.frame.describe(name, int(off[j]), lane))

    def _strong(self, op: MemOp, space: str, where: Offsets, wrote: np.ndarray | None = None) -> None:
        """Acquire and release at a strong access; `wrote` says which lanes have stored, None that all have."""
        off, idx = where
        if self.order is not None and off is not None:
            self.order.strong(op, space, off, idx, wrote)

    def ld_global(self, op: MemOp, address: np.ndarray, view: str, m: Mask, dst: Any) -> None:
        where = self.global_offsets(op, address, m, True, False)
        self._read(op, self.memory.space.views[view], where, dst)
        if op.strong:
            self._strong(op, "global", where)

    def st_global(self, op: MemOp, address: np.ndarray, view: str, m: Mask, src: Any) -> None:
        where = self.global_offsets(op, address, m, False, True)
        self._write(op, "global", self.memory.space.views[view], where, src, self.global_races is not None)
        if op.strong:
            self._strong(op, "global", where)

    def ld_shared(self, op: MemOp, address: np.ndarray, view: str, m: Mask, dst: Any) -> None:
        where = self.shared_offsets(op, address, m, True, False)
        self._read(op, self.frame.shared.views[view], where, dst)
        if op.strong:
            self._strong(op, "shared", where)

    def st_shared(self, op: MemOp, address: np.ndarray, view: str, m: Mask, src: Any) -> None:
        where = self.shared_offsets(op, address, m, False, True)
        self._write(op, "shared", self.frame.shared.views[view], where, src, self.shared_races is not None)
        if op.strong:
            self._strong(op, "shared", where)

    def ld_local(self, op: MemOp, address: np.ndarray, view: str, m: Mask, dst: Any) -> None:
        self._read(op, self.frame.local.views[view], self.local_offsets(op, address, m, True), dst)

    def st_local(self, op: MemOp, address: np.ndarray, view: str, m: Mask, src: Any) -> None:
        where = self.local_offsets(op, address, m, False)
        self._write(op, "local", self.frame.local.views[view], where, src, False)

    @staticmethod
    def _generic(address: np.ndarray, m: Mask, *spaces: Callable[[np.ndarray, Mask], None]) -> None:
        """Dispatch lanes to the functions `spaces` (global, shared, local) by the window of their addresses."""
        window = np.uint64(WINDOW_BYTES)
        bases = (np.uint64(0), np.uint64(SHARED_WINDOW), np.uint64(LOCAL_WINDOW))
        shared, local = ((address - base) < window for base in bases[1:])
        for base, inside, access in zip(bases, (~(shared | local), shared, local), spaces, strict=True):
            lanes = inside if m is None else inside & m
            if lanes.any():
                access(address - base, None if lanes.all() else lanes)

    def ld_generic(self, op: MemOp, address: np.ndarray, view: str, m: Mask, dst: Any) -> None:
        loads = (self.ld_global, self.ld_shared, self.ld_local)
        self._generic(address, m, *(lambda a, k, load=load: load(op, a, view, k, dst) for load in loads))

    def st_generic(self, op: MemOp, address: np.ndarray, view: str, m: Mask, src: Any) -> None:
        stores = (self.st_global, self.st_shared, self.st_local)
        self._generic(address, m, *(lambda a, k, store=store: store(op, a, view, k, src) for store in stores))

    # -- atomics
    def atom_global(
        self, op: MemOp, what: str, address: np.ndarray, view: str, m: Mask, dst: np.ndarray | None, values: Any
    ) -> None:
        where = self.global_offsets(op, address, m, True, True)
        wrote = self._atomic(op, what, self.memory.space.views[view], where, dst, values)
        self._strong(op, "global", where, wrote)
        if where[0] is not None:
            self.memory.space.verify(where[0], op.size, False, False)  # initialised from now on

    def atom_shared(
        self, op: MemOp, what: str, address: np.ndarray, view: str, m: Mask, dst: np.ndarray | None, values: Any
    ) -> None:
        where = self.shared_offsets(op, address, m, True, True)
        wrote = self._atomic(op, what, self.frame.shared.views[view], where, dst, values)
        self._strong(op, "shared", where, wrote)

    def atom_generic(
        self, op: MemOp, what: str, address: np.ndarray, view: str, m: Mask, dst: np.ndarray | None, values: Any
    ) -> None:
        def local(a: np.ndarray, k: Mask) -> None:
            self.frame.fail(MemoryFault, "atomic on local memory", op.ins, 0 if k is None else int(np.argmax(k)))

        self._generic(
            address,
            m,
            lambda a, k: self.atom_global(op, what, a, view, k, dst, values),
            lambda a, k: self.atom_shared(op, what, a, view, k, dst, values),
            local,
        )

    def _atomic(
        self, op: MemOp, what: str, data: np.ndarray, where: Offsets, dst: np.ndarray | None, registers: Any
    ) -> np.ndarray | None:
        """Do an atomic, and return which lanes have stored a value; None if all have."""
        off, idx = where
        if off is None:
            return None
        element = off >> op.shift
        values = [register if idx is None else register[idx] for register in registers]
        if len(element) == 1 or len(np.unique(element)) == len(element):
            old = data[element]
            data[element] = _apply(what, old, values)
        elif dst is None and (what in _UFUNC or what in ("min", "max")):
            ufunc = _UFUNC.get(what) or {"min": np.fmin, "max": np.fmax}[what]
            ufunc.at(data, element, values[0])
            return None
        else:  # lanes share a location and need its old values, so they take turns
            old = np.empty(len(element), data.dtype)
            for j in range(len(element)):
                old[j] = data[element[j]]
                data[element[j]] = _apply(what, old[j : j + 1], [value[j : j + 1] for value in values])[0]
        if dst is not None:
            dst[slice(None) if idx is None else idx] = old
        return old == values[0] if what == "cas" else None


class TracedAccess(Access):
    """Memory operations that report to a tracer."""

    def __init__(self, tracer: Tracer, *args: Any) -> None:
        super().__init__(*args)
        self._tracer = tracer

    def global_offsets(self, op: MemOp, address: np.ndarray, m: Mask, load: bool, store: bool) -> Offsets:
        """See Access."""
        where = super().global_offsets(op, address, m, load, store)
        self._tracer.access(op, "global", where)
        return where

    def shared_offsets(self, op: MemOp, address: np.ndarray, m: Mask, load: bool, store: bool) -> Offsets:
        """See Access."""
        where = super().shared_offsets(op, address, m, load, store)
        self._tracer.access(op, "shared", where)
        return where

    def local_offsets(self, op: MemOp, address: np.ndarray, m: Mask, load: bool) -> Offsets:
        """See Access."""
        where = super().local_offsets(op, address, m, load)
        self._tracer.access(op, "local", where)
        return where
