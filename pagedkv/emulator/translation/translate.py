"""Translate basic blocks into Python that computes on NumPy arrays with an element for each lane.

A block has a variant for `m is None`, when every lane of the batch is at it, and masked variants. A masked variant
blends only the registers that lanes waiting elsewhere still need, and writes the others for all lanes, which is much
cheaper. Memory operations are always masked.
"""

from __future__ import annotations

from types import CodeType

from ..ptx.instruction import Instruction
from ..ptx.liveness import Liveness
from ..ptx.program import FULL_MASKS, Program, is_warp_barrier
from ..ptx.wgmma import misuses, uses_wgmma
from . import arith, convert, logic, matrix, memory, warp, warpgroup
from .block import BlockTranslator, Handler, UntranslatedError
from .mem_op import MemOp
from .scope import Scope
from .tracing import begin_step, end_step

_HANDLERS: dict[str, Handler] = {
    name: handler
    for module in (arith, convert, logic, memory, warp, warpgroup, matrix)
    for name, handler in module.HANDLERS.items()
}
_JUMPS = ("bra", "ret", "exit", "trap")
_BARRIERS = ("bar", "barrier")


class Translation:
    """A kernel in Python.

    Parameters
    ----------
    program : Program
    traced : bool
        Whether its code reports each instruction to a tracer, before and after it.

    Attributes
    ----------
    program : Program
    scope : Scope
    liveness : Liveness
    uses_flags : bool
        Whether it has fences, or accesses that acquire or release.
    orders_lanes : bool
        Whether it orders accesses to shared memory by single lanes and not by warps: a bar.warp.sync of part of a warp,
        or flags in shared memory.
    uses_wgmma : bool
        Whether it has wgmma.
    unsupported : dict of int to str
        Instructions that no handler takes, by PTX line; executing them raises.
    """

    def __init__(self, program: Program, traced: bool = False) -> None:
        self.program, self.scope, self.liveness = program, Scope(program), Liveness(program)
        self._traced = traced
        self.uses_wgmma, self._misuses = uses_wgmma(program), misuses(program)
        self.unsupported: dict[int, str] = {}
        # All blocks are translated now, not when they first run: a launch must know every name in the scope to start.
        self._source: dict[tuple[int, int | None], str] = {
            (index, None): self._translate(index, None) for index in range(len(program.blocks))
        }
        self._code: dict[tuple[int, int | None], CodeType] = {}
        instructions = [ins for block in program.blocks for ins in block.instructions]
        ops = [op for op in self.scope.objects.values() if isinstance(op, MemOp)]
        self.uses_flags = any(
            ins.parts[0] in ("membar", "fence") and "proxy" not in ins.parts for ins in instructions
        ) or any(op.acquire or op.release for op in ops)
        self.orders_lanes = any(is_warp_barrier(ins) and ins.operands[0] not in FULL_MASKS for ins in instructions) or (
            self.uses_flags and any(op.strong and op.space in ("shared", "generic") for op in ops)
        )

    def _translate(self, index: int, keep: int | None) -> str:
        t = BlockTranslator(self.scope, self.liveness, index, keep)
        for ins in self.program.blocks[index].instructions:
            if self._traced:
                begin_step(t, ins)
            self._instruction(t, ins)
            if self._traced:
                end_step(t, ins)
        return "def block(m):\n  " + "\n  ".join([*t.lines, "return"])

    def _instruction(self, t: BlockTranslator, ins: Instruction) -> None:
        head = ins.parts[0]
        t.begin()
        if head in _JUMPS:
            if ins.pred:
                t.reg(ins.pred, "pred")  # for the scheduler, which reads it
            return
        if ins.pred and head not in _BARRIERS:
            t.guard(ins.pred, ins.negated)
        if ins in self._misuses:
            t.emit(f"misuse({t.object(ins)},{self._misuses[ins]!r},{t.mask})")
        start = len(t.lines)
        try:
            if head not in _HANDLERS:
                raise UntranslatedError
            _HANDLERS[head](t, ins)
        except (UntranslatedError, KeyError, IndexError, StopIteration):
            del t.lines[start:]
            self.unsupported[ins.line] = ins.text
            t.emit(f"unsupported({t.object(ins)},{t.mask})")

    def code(self, index: int, keep: int | None) -> CodeType:
        """The code of a variant: for all lanes if `keep` is None, else masked and blending the registers `keep`."""
        key = (index, keep)
        if key not in self._code:
            if key not in self._source:
                self._source[key] = self._translate(index, keep)
            name = f"<ptx {self.program.name[:40]} block {index}{'' if keep is None else ' masked'}>"
            self._code[key] = compile(self._source[key], name, "exec")
        return self._code[key]
