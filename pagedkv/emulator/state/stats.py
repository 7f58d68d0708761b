"""Counts of instructions and of memory traffic in one launch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..ptx.instruction import Instruction
from ..ptx.program import Program
from .footprint import Footprint
from .memory import Memory, sparse_zeros
from .warp_trace import WarpTrace

_HEADS_OF_CLASS = {
    "fma": "fma",
    "int": "mad selp setp prmt and or xor not shl shr shf lop3 bfe bfi bfind popc clz brev rem addc subc madc sad dp4a "
    "set slct",
    "cvt": "cvt",
    "mma": "mma wgmma",
    "shared_load": "ldmatrix",
    "shared_store": "stmatrix",
    "branch": "bra ret exit trap brx",
    "shuffle": "shfl vote match redux activemask elect",
    "barrier": "bar barrier membar fence",
    "async_copy": "cp",
    "atomic": "atom red",
    "move": "mov cvta",
    "special": "ex2 lg2 rcp rsqrt sqrt sin cos tanh",
}
_CLASS = {head: name for name, heads in _HEADS_OF_CLASS.items() for head in heads.split()}
_FLOAT_TYPES = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
_BY_TYPE = ("add", "sub", "mul", "div", "min", "max", "neg", "abs", "setp", "copysign", "testp")
CLASSES = (
    *("global_load", "global_store", "shared_load", "shared_store", "local", "async_copy", "atomic", "fma", "float"),
    *("int", "cvt", "special", "shuffle", "mma", "move", "branch", "barrier", "param", "other"),
)


def classify(ins: Instruction) -> str:
    """The class of a PTX instruction, one of CLASSES."""
    head, parts = ins.parts[0], ins.parts
    if head in ("ld", "ldu", "st"):
        spaces = (part.split("::")[0] for part in parts[1:])
        space = next((space for space in spaces if space in ("shared", "local", "param")), "global")
        return space if space in ("local", "param") else f"{space}_{'store' if head == 'st' else 'load'}"
    if head == "mad" and parts[-1] in ("f32", "f64"):
        return "fma"
    if head in _BY_TYPE:
        return "float" if parts[-1] in _FLOAT_TYPES else "int"
    return _CLASS.get(head, "other")


@dataclass
class BufferTraffic:
    """Global traffic of one buffer.

    Attributes
    ----------
    bytes_read, bytes_written : int
        Bytes that lanes requested.
    sectors_read, sectors_written : int
        32-byte sectors requested, summed over warp instructions.
    distinct_sectors_read : int
        Different sectors that the launch read.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    sectors_read: int = 0
    sectors_written: int = 0
    distinct_sectors_read: int = 0


@dataclass
class LaunchStats:
    """What one launch did: PTX instructions and, with ``stats=True``, memory traffic.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    thread_instructions, blocks_executed : int
        Instructions summed over threads, and steps of the emulator.
    barriers : int
        Barriers completed, summed over thread blocks.
    warp_instructions : dict of str to int
        Warp instructions by class, predicated-off ones included.
    global_requests : int
        Warp instructions that touched global memory.
    global_sectors, global_sectors_min : int
        32-byte sectors that they requested, and ceil(bytes / 32) summed over requests.
    bytes_read, bytes_written : int
        Bytes of global memory that lanes requested.
    shared_requests, shared_wavefronts, shared_wavefronts_min : int
        Warp instructions that touched shared memory, their passes over the 32 banks, and the fewest possible passes.
    buffers : dict of str to BufferTraffic
        Traffic by buffer.
    footprint : Footprint or None
        The bytes touched, with ``footprint=True``.
    trace : WarpTrace or None
        The steps of one warp, with ``trace=``; None if the launch does not have that warp.
    """

    kernel: str
    thread_instructions: int = 0
    blocks_executed: int = 0
    barriers: int = 0
    warp_instructions: dict[str, int] = field(default_factory=dict)
    global_requests: int = 0
    global_sectors: int = 0
    global_sectors_min: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    shared_requests: int = 0
    shared_wavefronts: int = 0
    shared_wavefronts_min: int = 0
    buffers: dict[str, BufferTraffic] = field(default_factory=dict)
    footprint: Footprint | None = None
    trace: WarpTrace | None = None

    @property
    def total_warp_instructions(self) -> int:
        """Warp instructions of all classes."""
        return sum(self.warp_instructions.values())

    def warp_instructions_per_unit(
        self, buffer: str, unit_bytes: int = 512, classes: tuple[str, ...] | None = None
    ) -> float:
        """Warp instructions, of some classes or of all, for every `unit_bytes` read from a buffer."""
        units = self.buffers[buffer].bytes_read / unit_bytes
        count = sum(n for name, n in self.warp_instructions.items() if classes is None or name in classes)
        return count / units if units else float("inf")


def _starts(keys: np.ndarray) -> np.ndarray:
    """The indices where runs of equal values start in a sorted array."""
    return np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))


class StatsRecorder:
    """Collects LaunchStats while a launch runs."""

    def __init__(self, kernel: str, program: Program, space: Memory, memory: bool) -> None:
        self.out = LaunchStats(kernel)
        self.memory, self._space = memory, space
        self.block_warps = np.zeros(len(program.blocks), np.int64)
        self._classes = np.zeros((len(program.blocks), len(CLASSES)), np.int64)
        if memory:
            for b, block in enumerate(program.blocks):
                for ins in block.instructions:
                    self._classes[b, CLASSES.index(classify(ins))] += 1
        self._per_buffer = np.zeros((5, len(space.buffers)), np.int64)
        self._touched = sparse_zeros((space.extent + 31) // 32 if memory else 0, np.bool_)

    def global_access(self, off: np.ndarray, size: int, warps: np.ndarray, store: bool, load: bool) -> None:
        """Count a global access of `size` bytes at each offset."""
        out, num_buffers = self.out, len(self._space.buffers)
        sectors = off >> 5
        pairs = np.sort((warps << 34) + sectors)
        pairs = pairs[_starts(pairs)]
        lanes = np.bincount(warps - warps.min())
        out.global_requests += len(_starts(pairs >> 34))
        out.global_sectors += len(pairs)
        out.global_sectors_min += int((-(-lanes[lanes > 0] * size // 32)).sum())
        nbytes = np.bincount(self._space.buffer_index(off), minlength=num_buffers) * size
        behind = (pairs & ((1 << 34) - 1)) << 5 | 31
        per_buffer = np.bincount(self._space.buffer_index(behind), minlength=num_buffers)
        if store:
            out.bytes_written += len(off) * size
            self._per_buffer[1] += nbytes
            self._per_buffer[3] += per_buffer
        if load:
            out.bytes_read += len(off) * size
            self._per_buffer[0] += nbytes
            self._per_buffer[2] += per_buffer
            fresh = np.unique(sectors[~self._touched[sectors]])
            self._touched[fresh] = True
            self._per_buffer[4] += np.bincount(self._space.buffer_index(fresh << 5 | 31), minlength=num_buffers)

    def shared_access(self, off: np.ndarray, size: int, warps: np.ndarray, lanes: np.ndarray) -> None:
        """Count an access to 32 banks of 4 bytes; accesses of 8 and 16 bytes go by half and quarter warp."""
        words = max(1, size // 4)
        group = warps * 4 + (lanes * words) // 32
        word = off >> 2
        parts = [(group << 36) | (((word + q) & 31) << 31) | ((word + q) >> 5) for q in range(words)]
        keys = np.unique(np.concatenate(parts))
        bank = keys >> 31
        start = _starts(bank)
        distinct = np.diff(np.append(start, len(keys)))  # words in each group and bank
        self.out.shared_wavefronts += int(np.maximum.reduceat(distinct, _starts(bank[start] >> 5)).sum())
        per_warp = np.diff(np.append(_starts(keys >> 38), len(keys)))
        self.out.shared_requests += len(per_warp)
        self.out.shared_wavefronts_min += int((-(-per_warp // 32)).sum())

    def finish(self) -> LaunchStats:
        """The counts of the launch."""
        out = self.out
        totals = (self.block_warps @ self._classes).tolist()
        out.warp_instructions = {name: total for name, total in zip(CLASSES, totals, strict=True) if total}
        for buffer, counts in zip(self._space.buffers, self._per_buffer.T.tolist(), strict=True):
            if any(counts):
                out.buffers[buffer.name] = BufferTraffic(*counts)
        return out
