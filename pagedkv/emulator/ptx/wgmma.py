"""Registers of wgmma: find instructions that touch them too early, before anything runs.

A wgmma.mma_async reads and writes registers until a wgmma.wait_group has waited for its group. Until then nothing else
may touch its accumulators, nor the registers that hold A; but another wgmma of the same shape may add to the same
accumulators. And a wgmma.fence has to stand between any other access to a register and a wgmma that uses it (PTX ISA,
"Asynchronous Warpgroup Level Matrix Multiply-Accumulate"). ptxas looks at the code in the same way, along every path.

A move is no access but another name of a register: compilers move accumulators from one inline assembly to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .instruction import Instruction, split_group
from .liveness import reads_writes
from .program import Program

_OLDEST = 1 << 10  # commits after which they are no longer counted


class Operand(NamedTuple):
    """A register that a wgmma in flight uses.

    Attributes
    ----------
    age : int
        The wgmma.commit_groups since then; 0 as long as its group is open.
    role : str
        "accumulator" or "part of A".
    ins : Instruction
    """

    age: int
    role: str
    ins: Instruction


@dataclass
class _RegisterUses:
    """What holds before an instruction, along any path to it."""

    flying: dict[str, Operand] = field(default_factory=dict)
    touched: dict[str, Instruction] = field(default_factory=dict)  # since the last wgmma.fence
    fenced: bool = False

    def copy(self) -> _RegisterUses:
        return _RegisterUses(dict(self.flying), dict(self.touched), self.fenced)

    def join(self, other: _RegisterUses) -> bool:
        """Add another path, and return whether that changes anything."""
        before = len(self.flying), len(self.touched), self.fenced
        changed = False
        for name, operand in other.flying.items():
            mine = self.flying.get(name)
            if mine is None or operand.age < mine.age:
                self.flying[name], changed = operand, True
        for name, ins in other.touched.items():
            self.touched.setdefault(name, ins)
        self.fenced &= other.fenced
        return changed or before != (len(self.flying), len(self.touched), self.fenced)


class _Registers(NamedTuple):
    reads: list[str]
    writes: list[str]
    accumulators: list[str]
    a: list[str]


def uses_wgmma(program: Program) -> bool:
    """Whether a kernel has any wgmma."""
    return any(ins.parts[0] == "wgmma" for block in program.blocks for ins in block.instructions)


def misuses(program: Program) -> dict[Instruction, str]:
    """What instructions do that misuse a register of a wgmma on some path, by instruction."""
    return _Analysis(program).misuses if uses_wgmma(program) else {}


class _Analysis:
    def __init__(self, program: Program) -> None:
        self.misuses: dict[Instruction, str] = {}
        self._known = program.registers
        self._registers = {ins: self._registers_of(ins) for block in program.blocks for ins in block.instructions}
        self._operands = {name for r in self._registers.values() for name in (*r.accumulators, *r.a)}
        before: list[_RegisterUses | None] = [None] * len(program.blocks)
        before[0] = _RegisterUses()
        waiting = [0]
        while waiting:
            index = waiting.pop()
            state = before[index]
            assert state is not None
            state = state.copy()
            for ins in program.blocks[index].instructions:
                self._step(state, ins)
            for following in program.successors(index):
                there = before[following]
                if there is None:
                    before[following] = state.copy()
                elif not there.join(state):
                    continue
                waiting.append(following)

    def _registers_of(self, ins: Instruction) -> _Registers:
        reads, writes = ([name for name in dict.fromkeys(names) if name in self._known] for names in reads_writes(ins))
        if ins.parts[:2] != ["wgmma", "mma_async"]:
            return _Registers(reads, writes, [], [])
        a = split_group(ins.operands[1])
        return _Registers(reads, writes, split_group(ins.operands[0]), a if len(a) > 1 else [])

    def _step(self, state: _RegisterUses, ins: Instruction) -> None:
        if ins.parts[0] != "wgmma":
            self._access(state, ins)
        elif ins.parts[1] == "fence":
            if not ins.pred:
                state.touched.clear()
                state.fenced = True
        elif ins.parts[1] == "commit_group":
            state.flying = {r: x._replace(age=min(x.age + 1, _OLDEST)) for r, x in state.flying.items()}
        elif ins.parts[1] == "wait_group":
            keep = int(ins.operands[0], 0)
            if not ins.pred:
                state.flying = {r: x for r, x in state.flying.items() if not x.age > keep}
        else:
            self._multiply(state, ins)

    def _access(self, state: _RegisterUses, ins: Instruction) -> None:
        of = self._registers[ins]
        if ins.parts[0] == "mov" and not ins.pred and len(of.reads) == len(of.writes) == 1:
            source, target = of.reads[0], of.writes[0]
            if source in state.flying and target not in state.flying:
                state.flying[target] = state.flying[source]
                return
            if source in state.flying and state.flying[source].ins is state.flying[target].ins:
                return
        for name in (*of.writes, *of.reads):
            if name in state.flying:
                did = "writes" if name in of.writes else "reads"
                self._blame(ins, f"{did} {name}, {_in_flight(state.flying[name])}: wgmma.wait_group must come first")
            if name in self._operands:
                state.touched[name] = ins

    def _multiply(self, state: _RegisterUses, ins: Instruction) -> None:
        of, shape = self._registers[ins], ins.parts[4]
        if not state.fenced:
            self._blame(ins, "no wgmma.fence before the first wgmma: registers may still be on their way")
        for name in (*of.accumulators, *of.a):
            if name in state.touched:
                other = state.touched[name]
                between = f"{name}, touched by PTX line {other.line} ({other.text})"
                self._blame(ins, f"wgmma uses {between}, with no wgmma.fence in between")
        for name in of.accumulators:
            flying = state.flying.get(name)
            if flying and (flying.role != "accumulator" or flying.ins.parts[4] != shape):
                self._blame(ins, f"wgmma writes {name}, {_in_flight(flying)}: wgmma.wait_group must come first")
            state.flying[name] = Operand(0, "accumulator", ins)
        for name in of.a:
            flying = state.flying.get(name)
            if flying and flying.role == "accumulator":
                self._blame(ins, f"wgmma reads {name}, {_in_flight(flying)}: wgmma.wait_group must come first")
            state.flying[name] = Operand(0, "part of A", ins)

    def _blame(self, ins: Instruction, what: str) -> None:
        self.misuses.setdefault(ins, what)


def _in_flight(operand: Operand) -> str:
    return (
        f"{'an' if operand.role[0] == 'a' else 'a'} {operand.role} of a wgmma in flight (PTX line {operand.ins.line})"
    )
