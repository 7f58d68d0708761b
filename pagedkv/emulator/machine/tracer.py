"""Record the steps of one warp while the code of a traced kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..errors import SourceLine
from ..ptx.instruction import Instruction
from ..ptx.program import Program
from ..ptx.types import GLOBAL_BASE
from ..state.frame import Frame, Mask
from ..state.memory import Buffer, Memory
from ..state.warp_trace import Step, Warp, WarpAccess, WarpTrace
from ..translation.mem_op import MemOp

DYNAMIC, LOCAL = "dynamic shared memory", "local memory"


class Tracer:
    """Collects a WarpTrace; one batch of the launch has the warp."""

    def __init__(self, warp: Warp, kernel: str, program: Program, memory: Memory) -> None:
        arrays = {buffer.name: _addresses(buffer) for buffer in memory.buffers if not buffer.freed}
        self.out = WarpTrace(kernel, warp, arrays)
        self._program, self._memory = program, memory
        self._rows: slice | None = None
        self._frame: Frame | None = None
        self._step: Step | None = None
        self._sources: dict[int, tuple[SourceLine, ...]] = {}

    def watch(self, frame: Frame) -> dict[str, Callable[..., None]]:
        """Watch a batch, and return the functions that its code calls."""
        x, y, z = self.out.warp.coordinates
        cta = x + frame.grid[0] * (y + frame.grid[1] * z)
        mine = np.flatnonzero((frame.cta == cta) & (frame.warp_in_cta == self.out.warp.warp))
        self._rows = slice(int(mine[0]), int(mine[-1]) + 1) if len(mine) else None
        self._frame, self._step = frame, None
        self.out.others = (*frame.layout.sizes, DYNAMIC, LOCAL)
        return {"begin_step": self.begin_step, "end_step": self.end_step}

    def begin_step(self, ins: Instruction, m: Mask, mask: Mask) -> None:
        """Begin an instruction of a block at which the lanes `m` are, and which those in `mask` run."""
        rows, self._step = self._rows, None
        if rows is None or (m is not None and not m[rows].any()):
            return
        if len(self.out.steps) >= self.out.warp.max_steps:
            self.out.dropped += 1
            return
        if ins.line not in self._sources:
            self._sources[ins.line] = self._program.source(ins.line)
        active = np.ones(rows.stop - rows.start, np.bool_) if mask is None else mask[rows].copy()
        self._step = Step(ins.line, ins.text, self._sources[ins.line], active)
        self.out.steps.append(self._step)

    def end_step(self, names: Sequence[str], registers: Sequence[np.ndarray]) -> None:
        """End an instruction, which has written these registers."""
        if self._step is not None:
            self._step.registers.update(
                (name, register[self._rows].copy()) for name, register in zip(names, registers, strict=True)
            )
            self._step = None

    def access(self, op: MemOp, space: str, where: tuple[np.ndarray | None, np.ndarray | None]) -> None:
        """Record the bytes of an access that the checks have passed."""
        off, idx = where
        if self._step is None or off is None:
            return
        rows, frame = self._rows, self._frame
        assert rows is not None
        assert frame is not None
        lanes = frame.lanes if idx is None else idx
        inside = (lanes >= rows.start) & (lanes < rows.stop)
        lanes, off = lanes[inside], off[inside]
        names, firsts, phases = self._arrays(frame, space, off, lanes)
        for name in dict.fromkeys(names):
            mine = np.array([other == name for other in names])
            offsets = np.full(rows.stop - rows.start, -1, np.int64)
            offsets[lanes[mine] - rows.start] = (off - firsts)[mine]
            access = WarpAccess(op.kind, space, name, op.size, offsets, phases[names.index(name)])
            self._step.accesses.append(access)

    def _arrays(
        self, frame: Frame, space: str, off: np.ndarray, lanes: np.ndarray
    ) -> tuple[list[str], np.ndarray, list[int]]:
        """The array in which each offset lies, the offset of the array's lowest byte, and its address modulo 128."""
        if space == "global":
            at = [self._memory.buffers[i] for i in self._memory.buffer_index(off).tolist()]
            firsts = np.array([buffer.offset for buffer in at], np.int64)
            return [buffer.name for buffer in at], firsts, (firsts % 128).tolist()
        if space == "local":
            return [LOCAL] * len(off), frame.local_base[lanes], [0] * len(off)
        base, layout = frame.shared_base[lanes], frame.layout
        spans = [(layout.offsets[name], name) for name in layout.sizes]
        spans.append((layout.dynamic_offset, DYNAMIC))
        names = dict(reversed(spans))  # an empty dynamic part begins where no array does
        starts = np.array(sorted(names))
        found = starts[np.searchsorted(starts, off - base, side="right") - 1]
        return [names[start] for start in found.tolist()], base + found, (found % 128).tolist()


def _addresses(buffer: Buffer) -> range:
    return range(GLOBAL_BASE + buffer.offset, GLOBAL_BASE + buffer.offset + buffer.nbytes)
