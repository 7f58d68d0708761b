"""Liveness: the registers that lanes waiting at a basic block still need."""

from __future__ import annotations

import re

from .instruction import Instruction
from .program import Program

_TOKEN = re.compile(r"%?[A-Za-z_$][\w$@+]*")
_NO_DESTINATION = (
    "st red bra brx bar barrier membar fence ret exit trap cp prefetch prefetchu stmatrix nanosleep unsupported "
    "griddepcontrol discard applypriority"
)


def tokens(operand: str) -> list[str]:
    """The identifiers in an operand."""
    return _TOKEN.findall(operand)


def reads_writes(ins: Instruction) -> tuple[list[str], list[str]]:
    """The identifiers that an instruction reads and writes; not all of them are registers."""
    if ins.parts[0] == "wgmma" and ins.parts[1] != "mma_async":  # .fence, .commit_group and .wait_group
        return [], []
    writes = ins.parts[0] not in _NO_DESTINATION.split() or (ins.parts[0] in ("bar", "barrier") and "red" in ins.parts)
    writes = writes and bool(ins.operands) and "[" not in ins.operands[0]
    reads = [token for operand in ins.operands[1 if writes else 0 :] for token in tokens(operand)]
    reads += [token.partition("+")[0] for token in reads]  # "%rd1+16" in an address reads %rd1
    if ins.pred:
        reads.append(ins.pred)
    if ins.parts[0] == "wgmma":  # adds to what it writes
        reads += tokens(ins.operands[0])
    return reads, tokens(ins.operands[0]) if writes else []


class Liveness:
    """Live registers of each basic block, as bit sets.

    Attributes
    ----------
    always_flushed : set of str
        Registers whose every write is a float32 with .ftz: they never hold subnormals.
    """

    def __init__(self, program: Program) -> None:
        self._bit = {register: 1 << i for i, register in enumerate(program.registers)}
        blocks = program.blocks
        uses, kills, successors = [], [], [program.successors(b) for b in range(len(blocks))]
        flushed: dict[str, bool] = {}
        self._writes: list[int] = []
        for block in blocks:
            use = write = kill = 0
            for ins in block.instructions:
                reads, writes = reads_writes(ins)
                for token in reads:
                    use |= self._bit.get(token, 0) & ~kill
                for token in writes:
                    write |= self._bit.get(token, 0)
                    kill |= 0 if ins.pred else self._bit.get(token, 0)
                    flushed[token] = flushed.get(token, True) and "ftz" in ins.parts and ins.parts[-1] == "f32"
            uses.append(use)
            kills.append(kill)
            self._writes.append(write)
        self.always_flushed = {register for register, only in flushed.items() if only}
        self._live_in = [0] * len(blocks)
        changed = True
        while changed:
            changed = False
            for b in reversed(range(len(blocks))):
                live = uses[b] | (self._live(successors[b]) & ~kills[b])
                changed |= live != self._live_in[b]
                self._live_in[b] = live

    def _live(self, blocks: list[int]) -> int:
        live = 0
        for b in blocks:
            live |= self._live_in[b]
        return live

    def kept(self, index: int, pending: list[int]) -> int:
        """The registers that block `index` writes and lanes at the `pending` blocks still need."""
        return self._live(pending) & self._writes[index]

    def protects(self, keep: int, register: str) -> bool:
        """Whether a register is in the set `keep`."""
        return bool(keep & self._bit[register])
