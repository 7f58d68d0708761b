"""What the code of a traced kernel reports of each instruction: the lanes that run it, and the registers it writes."""

from __future__ import annotations

from ..ptx.instruction import Instruction
from ..ptx.liveness import reads_writes, tokens
from ..ptx.types import SIZE, VIEW_DTYPE
from .block import BlockTranslator

_STORES = ("st", "red", "stmatrix")
_BY_THE_SCHEDULER = ("bar", "barrier")  # the scheduler runs these after the code of their block


def begin_step(t: BlockTranslator, ins: Instruction) -> None:
    """Emit the report before an instruction."""
    t.begin()
    if ins.pred:
        t.guard(ins.pred, ins.negated)
    t.emit(f"begin_step({t.object(ins)},{'m' if t.masked else 'None'},{t.mask})")


def end_step(t: BlockTranslator, ins: Instruction) -> None:
    """Emit the report after an instruction."""
    head = ins.parts[0]
    if head in _BY_THE_SCHEDULER:
        return
    named = tokens(ins.operands[1]) if head in _STORES else reads_writes(ins)[1]
    names = [name for name in named if name in t.scope.registers and SIZE.get(t.scope.registers[name], 0) <= 8]
    views = "".join(f"{t.reg(name, _shown_as(t, ins, name))}," for name in names)
    t.emit(f"end_step({t.object(tuple(names))},({views}))")


def _shown_as(t: BlockTranslator, ins: Instruction, name: str) -> str:
    """The type to show a register as: its own if that says more than its size, else that of the instruction."""
    declared = t.scope.registers[name]
    if declared == "pred" or declared[0] == "f":
        return declared
    size = SIZE[declared]
    kind = next((part for part in ins.parts[1:] if part in SIZE), declared)
    if kind[0] == "f" and SIZE[kind] == size and kind in VIEW_DTYPE:
        return kind
    return f"{'u' if kind[0] == 'u' else 's'}{8 * size}"
