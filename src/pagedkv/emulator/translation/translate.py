"""Basic blocks to Python source that works on NumPy arrays of one element for each lane.

A block has one variant for `m is None` (every lane of the batch is here) and masked variants. A masked variant blends
only the registers that lanes waiting elsewhere still need; everything else is written for all lanes, which is much
cheaper. Memory operations are always masked.
"""

from __future__ import annotations

from types import CodeType

from ..ptx.instruction import Instruction
from ..ptx.liveness import Liveness
from ..ptx.program import Program
from . import arith, convert, logic, matrix, memory, warp
from .block import BlockTranslator, Handler, UntranslatedError
from .scope import Scope

_HANDLERS: dict[str, Handler] = {
    name: handler
    for module in (arith, convert, logic, memory, warp, matrix)
    for name, handler in module.HANDLERS.items()
}
_JUMPS = ("bra", "ret", "exit", "trap")
_BARRIERS = ("bar", "barrier")


class Translation:
    """The Python code of a kernel.

    Attributes
    ----------
    program : Program
    scope : Scope
        The names that the code uses.
    liveness : Liveness
    unsupported : dict of int to str
        Instructions, by PTX line, that no handler knows; their code raises.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.scope, self.liveness = program, Scope(program), Liveness(program)
        self.unsupported: dict[int, str] = {}
        # All blocks at once: a launch makes the arrays that the scope names before the first block runs.
        self._source: dict[tuple[int, int | None], str] = {
            (index, None): self._translate(index, None) for index in range(len(program.blocks))
        }
        self._code: dict[tuple[int, int | None], CodeType] = {}

    def _translate(self, index: int, keep: int | None) -> str:
        t = BlockTranslator(self.scope, self.liveness, index, keep)
        for ins in self.program.blocks[index].instructions:
            self._instruction(t, ins)
        return "def block(m):\n  " + "\n  ".join([*t.lines, "return"])

    def _instruction(self, t: BlockTranslator, ins: Instruction) -> None:
        head = ins.parts[0]
        t.begin()
        if head in _JUMPS:
            if ins.pred:
                t.reg(ins.pred, "pred")  # the scheduler reads it
            return
        if ins.pred and head not in _BARRIERS:
            t.guard(ins.pred, ins.negated)
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
        """Code object of a variant: keep None = all lanes active, else the registers to blend."""
        key = (index, keep)
        if key not in self._code:
            if key not in self._source:
                self._source[key] = self._translate(index, keep)
            name = f"<ptx {self.program.name[:40]} block {index}{'' if keep is None else ' masked'}>"
            self._code[key] = compile(self._source[key], name, "exec")
        return self._code[key]
