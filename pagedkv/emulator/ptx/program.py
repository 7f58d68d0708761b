"""A kernel as basic blocks, with its calls inlined, and its shared and local memory laid out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..errors import EmulatorError, SourceLine
from .instruction import Instruction
from .parse import Function, ParsedModule, Statement
from .types import SIZE

_SLOT = re.compile(r"\[\s*([\w$@]+)\s*(?:\+\s*(\d+))?\s*\]")
FULL_MASKS = ("-1", "0xffffffff", "4294967295", "0xFFFFFFFF", "0xFFFFFFFFU")
_WARP_OPS = ("shfl", "vote", "match", "redux", "elect")
_ALIGNED_OPS = ("mma", "ldmatrix", "stmatrix", "wmma", "movmatrix", "wgmma")
SYSTEM_SHARED = 1024  # bytes in front of a thread block's shared memory that hardware reserves from 9.0 on
SHARED_GAP = 128  # red zone between shared arrays; a multiple of 128 bytes keeps their banks


@dataclass
class Block:
    """A basic block.

    Attributes
    ----------
    instructions : list of Instruction
    sync : str or None
        The lanes that have to arrive before it runs: all lanes of the warp ("full"), those of the member mask in this
        operand, or none (None).
    at_any_barrier : bool
        Whether these lanes may arrive at other blocks like this one, because only the bar.warp.sync at its beginning
        waits for them.
    """

    instructions: list[Instruction] = field(default_factory=list)
    sync: str | None = None
    at_any_barrier: bool = False


@dataclass
class SharedLayout:
    """The offsets of shared arrays, with red zones between them, and the byte counts of a real launch."""

    offsets: dict[str, int]
    sizes: dict[str, int]
    dynamic_offset: int
    static_bytes: int


class Program:
    """One kernel as basic blocks."""

    def __init__(self, mod: ParsedModule, fn: Function) -> None:
        self.name, self.params, self.directives = fn.name, fn.params, fn.directives
        self.globals = mod.globals
        self.registers: dict[str, str] = {}
        self.local_symbols: dict[str, int] = {}
        self.local_bytes = 0
        self._shared = list(mod.shared)
        self._mod = mod
        self._inlined = self._skips = 0
        items = self._expand(fn, {}, None, (fn.name,))
        self.blocks, self.labels = _cut(items)
        self.shared = self._layout_shared(False)
        self.shared_strict = self._layout_shared(True)

    @property
    def readable_name(self) -> str:
        """The name of a Python function, from numba's symbol; any other symbol stays as it is."""
        rest, part = self.name.removeprefix("_ZN"), ""
        while (m := re.match(r"\d+", rest)) and rest != self.name:
            end = m.end() + int(m[0])
            part, rest = rest[m.end() : end], rest[end:]
        return part or self.name[:60]

    def source(self, ptx_line: int) -> tuple[SourceLine, ...]:
        """The Python line of a PTX line, then its callers' lines; empty without line information."""
        return self._mod.lines.source(ptx_line)

    def successors(self, index: int) -> list[int]:
        """The blocks that may run after a block."""
        last = self.blocks[index].instructions[-1]
        jumps = last.parts[0] in ("ret", "exit", "bra") and not last.pred
        following = [index + 1] if not jumps and index + 1 < len(self.blocks) else []
        return [*following, self.labels[last.operands[0]]] if last.parts[0] == "bra" else following

    # -- calls
    def _expand(
        self, fn: Function, names: dict[str, str], ret_label: str | None, stack: tuple[str, ...]
    ) -> list[Statement]:
        for reg, ty in fn.registers.items():
            self.registers[names.get(reg, reg)] = ty
        for nm, align, size in fn.locals:
            self.local_bytes = (self.local_bytes + align - 1) // align * align
            self.local_symbols[names.get(nm, nm)] = self.local_bytes
            self.local_bytes += ((size or 0) + 15) // 16 * 16
        if not ret_label or fn.shared:
            self._shared += [v for v in fn.shared if v not in self._shared]
        out: list[Statement] = []
        kernel_params = {p.name for p in self.params} if not ret_label else set()
        for st in fn.statements:
            if isinstance(st, str):
                out.append(names.get(st, st))
                continue
            ins = st.renamed(names) if names else st
            head = ins.parts[0]
            if head == "call":
                out += self._call(ins, stack)
            elif head == "ret" and ret_label:
                out.append(ins.replaced("bra", [ret_label], ins.pred, ins.negated))
            elif is_warp_barrier(ins) and ins.pred:
                out += self._skipped(ins, [ins.replaced(ins.op, ins.operands)])
            elif head in ("ld", "st") and len(ins.parts) > 1 and ins.parts[1].startswith("param"):
                out += self._param_access(ins, head, kernel_params)
            else:
                out.append(ins)
        return out

    def _param_access(self, ins: Instruction, head: str, kernel_params: set[str]) -> list[Instruction]:
        """Turn an access to a call parameter into a move, since each slot is a register."""
        where, value = (ins.operands[1], ins.operands[0]) if head == "ld" else (ins.operands[0], ins.operands[1])
        m = _SLOT.fullmatch(where)
        if not m:
            raise EmulatorError(f"PTX line {ins.line}: cannot address parameter {where}")
        if m[1] in kernel_params:
            return [ins]
        ty = ins.parts[-1]
        out = []
        values = [v.strip() for v in value.strip("{}").split(",")]
        for i, v in enumerate(values):
            slot = f"{m[1]}+{int(m[2] or 0) + i * SIZE[ty]}"
            known = self.registers.setdefault(slot, f"b{8 * SIZE[ty]}")
            if SIZE[known] < SIZE[ty]:
                raise EmulatorError(f"PTX line {ins.line}: parameter {slot} written with {known}, read as {ty}")
            out.append(ins.replaced(f"mov.{ty}", [v, slot] if head == "ld" else [slot, v], ins.pred, ins.negated))
        return out

    def _call(self, ins: Instruction, stack: tuple[str, ...]) -> list[Statement]:
        ops = list(ins.operands)
        rets = _names(ops.pop(0)) if ops[0].startswith("(") else []
        callee = ops.pop(0)
        args = _names(ops[0]) if ops and ops[0].startswith("(") else []
        fn = self._mod.functions.get(callee)
        if callee == "vprintf":
            count = f"{rets[0]}+0"
            self.registers.setdefault(count, "b32")
            return [ins.replaced("vprintf", [count, *(f"{arg}+0" for arg in args)], ins.pred, ins.negated)]
        if callee == "__assertfail":
            return [ins.replaced("trap", [], ins.pred, ins.negated)]
        if fn is None or not fn.has_body or callee in stack:
            why = "recursive call of" if callee in stack else "call of external or indirect function"
            return [ins.replaced("unsupported", [f"{why} {callee}"], ins.pred, ins.negated)]
        self._inlined += 1
        tag = f"@c{self._inlined}"
        names = {nm: nm + tag for nm in fn.registers}
        names.update({nm: nm + tag for nm, _, _ in fn.locals})
        names.update({st: st + tag for st in fn.statements if isinstance(st, str)})
        names.update(zip((p.name for p in fn.params), args, strict=True))
        names.update(zip((p.name for p in fn.returns), rets, strict=True))
        slots = {
            m
            for st in fn.statements
            if not isinstance(st, str)
            for o in st.operands
            for m in re.findall(r"[\w$]+\$s\d+", o)
        }
        names.update({nm: nm + tag for nm in slots if nm not in names})
        end = f"$ret{tag}"
        return self._skipped(ins, [*self._expand(fn, names, end, (*stack, callee)), end])

    def _skipped(self, ins: Instruction, out: list[Statement]) -> list[Statement]:
        """Statements in place of an instruction, and a jump over them if its predicate does not hold."""
        if not ins.pred:
            return out
        self._skips += 1
        skip = f"$skip{self._skips}"
        return [ins.replaced("bra", [skip], ins.pred, not ins.negated), *out, skip]

    # -- memory layout
    def _layout_shared(self, strict: bool) -> SharedLayout:
        """Lay arrays out in declaration order.

        With `strict`, no array has more than its declared alignment, so that a 16-byte access to an array declared with
        .align 4 faults instead of working by luck.
        """
        offsets: dict[str, int] = {}
        sizes: dict[str, int] = {}
        real, padded = 0, SYSTEM_SHARED
        dynamic, dyn_align = [], 1
        for nm, align, size in self._shared:
            if nm in offsets or nm in dynamic:
                continue
            if size is None:
                dynamic.append(nm)
                dyn_align = max(dyn_align, align)
                continue
            start = (real + align - 1) // align * align
            padded += start - real  # the same offset modulo 128 as in the real layout
            offsets[nm], sizes[nm] = padded + _shift(padded, align, strict), size
            real = start + size
            padded += size + SHARED_GAP
        start = (real + dyn_align - 1) // dyn_align * dyn_align
        padded += start - real
        padded += _shift(padded, dyn_align, strict)
        for nm in dynamic:
            offsets[nm] = padded
        return SharedLayout(offsets, sizes, padded, real)


def _shift(offset: int, align: int, strict: bool) -> int:
    return align if strict and align < 16 and offset % (2 * align) == 0 else 0


def _names(group: str) -> list[str]:
    return [x.strip() for x in group.strip("() ").split(",") if x.strip()]


def is_warp_barrier(ins: Instruction) -> bool:
    """Whether this is a bar.warp.sync."""
    return ins.parts[0] in ("bar", "barrier") and ins.parts[1] == "warp"


def _sync_kind(ins: Instruction) -> str | None:
    head = ins.parts[0]
    if head in _ALIGNED_OPS:
        return "full"
    if head in _WARP_OPS or is_warp_barrier(ins):
        mask = ins.operands[-1]
        return "full" if mask in FULL_MASKS else mask
    return None


def _cut(items: list[Statement]) -> tuple[list[Block], dict[str, int]]:
    """Cut statements into basic blocks, and number them by label.

    A warp-synchronous instruction starts a block, for the scheduler to wait for its lanes; one of the full warp stays
    in a block that has waited for the full warp already.
    """
    blocks: list[Block] = [Block()]
    labels: dict[str, int] = {}

    def fresh() -> None:
        if blocks[-1].instructions:
            blocks.append(Block())

    for it in items:
        if isinstance(it, str):
            fresh()
            labels[it] = len(blocks) - 1
            continue
        head = it.parts[0]
        kind, barrier = _sync_kind(it), is_warp_barrier(it)
        if kind and (kind != "full" or blocks[-1].sync != "full" or (barrier and blocks[-1].at_any_barrier)):
            fresh()
            blocks[-1].sync, blocks[-1].at_any_barrier = kind, barrier
        elif kind:
            blocks[-1].at_any_barrier = False  # behind the bar.warp.sync, it waits for lanes at this very instruction
        blocks[-1].instructions.append(it)
        if head in ("bra", "ret", "exit", "trap", "brx") or (head in ("bar", "barrier") and it.parts[1] != "warp"):
            fresh()
    if not blocks[-1].instructions:
        blocks[-1].instructions.append(Instruction("ret", 0))
    return blocks, labels
