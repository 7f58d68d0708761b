"""Basic blocks to Python source that works on NumPy arrays of one element for each lane.

A block has one variant for `m is None` (every lane of the batch is here) and masked variants. A masked variant blends
only the registers that lanes waiting elsewhere still need; everything else is written for all lanes, which is much
cheaper. Memory operations are always masked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import CodeType
from typing import Any

from .entry import Entry
from .errors import EmulatorError
from .liveness import Liveness
from .parse import Instruction
from .types import SIZE, bits_of, view_of

Handler = Callable[["BlockTranslator", Instruction], None]
HANDLERS: dict[str, Handler] = {}

_SPECIAL_NAMES = (
    "laneid warpid nwarpid lanemask_lt lanemask_le lanemask_gt lanemask_ge lanemask_eq dynamic_smem_size "
    "total_smem_size clock smid nsmid gridid"
)
SPECIAL = {f"%{head}.{axis}": f"S_{head}_{axis}" for head in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"}
SPECIAL |= {f"%{name}": f"S_{name}" for name in _SPECIAL_NAMES.split()}
SPECIAL64 = ("%clock64", "%globaltimer")


class UntranslatedError(Exception):
    """A form of an instruction that the emulator does not know: it is an UnsupportedInstructionError if executed."""


def handles(*heads: str) -> Callable[[Handler], Handler]:
    def register(fn: Handler) -> Handler:
        for h in heads:
            HANDLERS[h] = fn
        return fn

    return register


class EntryTranslator:
    """State shared by all blocks of one entry: register names, constants, liveness, generated code."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.python_name = {r: f"v{i}" for i, r in enumerate(entry.registers)}
        self.views: set[tuple[str, str]] = set()
        self.constants: dict[tuple[str, Any, str], str] = {}
        self.specials: set[str] = set()
        self.objects: dict[str, object] = {}
        self.unsupported: dict[int, str] = {}
        self.liveness = Liveness(entry)
        self._code: dict[tuple[int, int | None], CodeType] = {}
        self._source: dict[tuple[int, int | None], str] = {}
        for b in range(len(entry.blocks)):  # fills the sets above
            self._source[b, None] = self._translate(b, None)

    def constant(self, kind: str, value: Any, view: str) -> str:
        """Name of a constant in the generated code."""
        return self.constants.setdefault((kind, value, view), f"c{len(self.constants)}")

    def _translate(self, index: int, keep: int | None) -> str:
        t = BlockTranslator(self, index, keep)
        for ins in self.entry.blocks[index].instructions:
            t.instruction(ins)
        return "def block(m):\n  " + "\n  ".join([*t.lines, "return"])

    def code(self, index: int, keep: int | None) -> CodeType:
        """Code object of a variant: keep None = all lanes active, else the registers to blend."""
        key = (index, keep)
        if key not in self._code:
            if key not in self._source:
                self._source[key] = self._translate(index, keep)
            name = f"<ptx {self.entry.name[:40]} block {index}{'' if keep is None else ' masked'}>"
            self._code[key] = compile(self._source[key], name, "exec")
        return self._code[key]


class BlockTranslator:
    """Emits statements for one block variant; instruction handlers use the methods below."""

    def __init__(self, owner: EntryTranslator, index: int, keep: int | None) -> None:
        self.owner, self.index, self.keep = owner, index, keep
        self.masked = keep is not None
        self._objects = 0
        self.lines: list[str] = []
        self.predicated = False
        self.mask = "m" if self.masked else "None"

    def instruction(self, ins: Instruction) -> None:
        head = ins.parts[0]
        self.predicated = False
        self.mask = "m" if self.masked else "None"
        if head in ("bra", "ret", "exit", "trap"):
            if ins.pred:
                self.reg(ins.pred, "pred")  # the scheduler reads it
            return
        if ins.pred and head not in ("bar", "barrier"):
            p = self.reg(ins.pred, "pred")
            p = f"~{p}" if ins.negated else p
            self.emit(f"mp={p}" + ("&m" if self.masked else ""))
            self.predicated, self.mask = True, "mp"
        handler = HANDLERS.get(head)
        start = len(self.lines)
        try:
            if handler is None:
                raise UntranslatedError
            handler(self, ins)
        except (UntranslatedError, KeyError, IndexError, StopIteration):
            del self.lines[start:]
            self.owner.unsupported[ins.line] = ins.text
            self.emit(f"unsupported({self.object(ins)},{self.mask})")

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def object(self, obj: object) -> str:
        """Name of a Python object in the generated code; the n-th object of a block is shared by its variants."""
        self._objects += 1
        name = f"d{self.index}_{self._objects}"
        self.owner.objects.setdefault(name, obj)
        return name

    # -- operands
    def width(self, name: str) -> int:
        return SIZE[self.owner.entry.registers[name]]

    def reg(self, name: str, ty: str) -> str:
        """Writable view of a register whose width equals that of `ty`."""
        py = self.owner.python_name[name]
        if ty != "pred" and SIZE[ty] > 8:
            raise UntranslatedError
        view = "p" if self.owner.entry.registers[name] == "pred" else view_of(ty)
        if view != "p" and SIZE[ty] != self.width(name):
            raise EmulatorError(f"register {name} accessed with type {ty}")
        self.owner.views.add((py, view))
        return f"{py}_{view}"

    def src(self, o: str, ty: str) -> str:
        """Expression for operand `o` read as type `ty` (an array over lanes)."""
        regs = self.owner.entry.registers
        if o in regs:
            if regs[o] == "pred" or SIZE[regs[o]] == SIZE[ty]:
                return self.reg(o, ty)
            sign = "s" if ty[0] == "s" and SIZE[regs[o]] < SIZE[ty] else "u"
            wide = self.reg(o, f"{sign}{8 * SIZE[regs[o]]}")
            narrow = f"{wide}.astype({bits_of(ty)})"
            return narrow if bits_of(ty) == view_of(ty) else f"{narrow}.view({view_of(ty)})"
        if o[0] in "-!" and o[1:] in regs:
            return f"({'-' if o[0] == '-' else '~'}{self.src(o[1:], ty)})"
        if o in SPECIAL:
            v = view_of(ty)
            self.owner.specials.add(SPECIAL[o][2:])
            return SPECIAL[o] if v == "u32" else f"{SPECIAL[o]}.astype({v})"
        if o in SPECIAL64:
            return self.owner.constant("int", 0, "u64")
        if o[:2] in ("0f", "0F") and len(o) == 10:
            return self.owner.constant("bits", int(o[2:], 16), "f32" if ty[0] == "f" else "u32")
        if o[:2] in ("0d", "0D") and len(o) == 18:
            return self.owner.constant("bits", int(o[2:], 16), "f64" if ty[0] == "f" else "u64")
        if re.match(r"-?\d", o):
            value = int(o.rstrip("U"), 0)
            if ty == "pred":
                return self.owner.constant("pred", value, "p")
            return self.owner.constant("bits" if ty[0] in "fb" else "int", value, view_of(ty))
        m = re.fullmatch(r"([\w$@]+)\s*(?:\+\s*(-?\d+))?", o)
        if not m or o.startswith("%") or (ty != "pred" and SIZE[ty] < 4):
            raise UntranslatedError
        return self.owner.constant("symbol", (m[1], int(m[2] or 0)), bits_of(ty))

    def literal(self, o: str) -> int | None:
        return int(o.rstrip("U"), 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", o) else None

    def address(self, o: str) -> str:
        m = re.fullmatch(r"\[\s*(%?[\w$@]+)\s*(?:\+\s*(-?\w+))?\s*\]", o)
        if m is None:
            raise UntranslatedError
        base, off = m[1], int(m[2] or "0", 0)
        if base not in self.owner.entry.registers:
            if re.match(r"\d", base):
                return self.owner.constant("int", int(base, 0) + off, "u64")
            return self.owner.constant("symbol", (base, off), "u64")
        ty = f"u{8 * self.width(base)}"
        b = self.reg(base, ty)
        return f"({b}+{self.owner.constant('int', off, ty)})" if off else b

    # -- results
    def condition(self, dst: str) -> str | None:
        """Mask that must guard a write to `dst`, or None."""
        if self.predicated:
            return "mp"
        return "m" if self.keep is not None and self.owner.liveness.protects(self.keep, dst) else None

    def put(self, dst: str, ty: str, expr: str) -> None:
        """dst <- expr, where expr has the dtype of `ty`; a wider register is sign/zero extended."""
        if dst == "_":
            return
        full = self.owner.entry.registers[dst]
        if full == "pred" or SIZE[full] == SIZE[ty]:
            target = self.reg(dst, ty)
        elif SIZE[full] > SIZE[ty]:
            target = self.reg(dst, ("s" if ty[0] == "s" else "u") + str(8 * SIZE[full]))
            if view_of(ty)[0] == "f":
                expr = f"({expr}).view({bits_of(ty)})"
        else:
            raise UntranslatedError
        c = self.condition(dst)
        self.emit(f"copyto({target},{expr},casting='unsafe')" if c is None else f"blend({target},{c},{expr})")

    def ufunc(self, name: str, dst: str, ty: str, *args: str, extra: str = "") -> None:
        """dst <- name(*args), written in place when possible."""
        call = f"{name}({','.join(args)}"
        if dst != "_" and self.condition(dst) is None and (ty == "pred" or SIZE[ty] == self.width(dst)):
            self.emit(f"{call},out={self.reg(dst, ty)}{extra})")
        else:
            self.put(dst, ty, f"{call}{extra})")


def split_group(o: str) -> list[str]:
    """Elements of a "{a, b}" operand, or the operand itself."""
    return [x.strip() for x in o[1:-1].split(",")] if o.startswith("{") else [o]


def compile_entry(entry: Entry) -> EntryTranslator:
    """The entry's translator (made once)."""
    from . import ops_arith, ops_convert, ops_logic, ops_memory, ops_warp  # noqa: F401  they fill HANDLERS

    if entry.translator is None:
        entry.translator = EntryTranslator(entry)
    return entry.translator
