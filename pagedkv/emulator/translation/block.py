"""The Python statements of a basic block, which read operands and write results."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import EmulatorError
from ..ptx.instruction import Instruction
from ..ptx.liveness import Liveness
from ..ptx.types import SIZE, bits_of, view_of
from .scope import Scope

_SPECIAL_NAMES = (
    "laneid warpid nwarpid lanemask_lt lanemask_le lanemask_gt lanemask_ge lanemask_eq dynamic_smem_size "
    "total_smem_size clock smid nsmid gridid"
)
SPECIAL = {f"%{head}.{axis}": f"S_{head}_{axis}" for head in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"}
SPECIAL |= {f"%{name}": f"S_{name}" for name in _SPECIAL_NAMES.split()}
SPECIAL64 = ("%clock64", "%globaltimer")


class UntranslatedError(Exception):
    """The emulator does not know this form of an instruction; executing it raises UnsupportedInstructionError."""


class BlockTranslator:
    """Collects the statements of one variant of a block.

    Parameters
    ----------
    scope : Scope
    liveness : Liveness
    index : int
        The block's number.
    keep : int or None
        The registers that a masked variant blends, as a set from `liveness`; None for the variant of all lanes.

    Attributes
    ----------
    lines : list of str
        The statements so far.
    mask : str
        The generated code's name for the current instruction's mask.
    """

    def __init__(self, scope: Scope, liveness: Liveness, index: int, keep: int | None) -> None:
        self.scope, self.liveness, self.index, self.keep = scope, liveness, index, keep
        self.masked = keep is not None
        self._objects = 0
        self.lines: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Start an instruction, without a guard."""
        self.predicated, self.mask = False, "m" if self.masked else "None"

    def guard(self, register: str, negated: bool) -> None:
        """Restrict the instruction to lanes whose predicate holds."""
        p = self.reg(register, "pred")
        p = f"~{p}" if negated else p
        self.emit(f"mp={p}" + ("&m" if self.masked else ""))
        self.predicated, self.mask = True, "mp"

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def object(self, obj: object) -> str:
        """Name a Python object in the generated code; all variants of a block share its n-th object."""
        self._objects += 1
        name = f"d{self.index}_{self._objects}"
        self.scope.objects.setdefault(name, obj)
        return name

    # -- operands
    def width(self, name: str) -> int:
        return SIZE[self.scope.registers[name]]

    def reg(self, name: str, ty: str) -> str:
        """The writable view of a register as type `ty`, which has its width."""
        py = self.scope.python_name[name]
        if ty != "pred" and SIZE[ty] > 8:
            raise UntranslatedError
        view = "p" if self.scope.registers[name] == "pred" else view_of(ty)
        if view != "p" and SIZE[ty] != self.width(name):
            raise EmulatorError(f"register {name} accessed with type {ty}")
        self.scope.views.add((py, view))
        return f"{py}_{view}"

    def src(self, o: str, ty: str) -> str:
        """An expression for operand `o`, read as type `ty`: an array over lanes."""
        regs = self.scope.registers
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
            self.scope.specials.add(SPECIAL[o][2:])
            return SPECIAL[o] if v == "u32" else f"{SPECIAL[o]}.astype({v})"
        if o in SPECIAL64:
            return self.scope.constant("int", 0, "u64")
        if o[:2] in ("0f", "0F") and len(o) == 10:
            return self.scope.constant("bits", int(o[2:], 16), "f32" if ty[0] == "f" else "u32")
        if o[:2] in ("0d", "0D") and len(o) == 18:
            return self.scope.constant("bits", int(o[2:], 16), "f64" if ty[0] == "f" else "u64")
        if re.match(r"-?\d", o):
            value = int(o.rstrip("U"), 0)
            if ty == "pred":
                return self.scope.constant("pred", value, "p")
            return self.scope.constant("bits" if ty[0] in "fb" else "int", value, view_of(ty))
        m = re.fullmatch(r"([\w$@]+)\s*(?:\+\s*(-?\d+))?", o)
        if not m or o.startswith("%") or (ty != "pred" and SIZE[ty] < 4):
            raise UntranslatedError
        return self.scope.constant("symbol", (m[1], int(m[2] or 0)), bits_of(ty))

    def literal(self, o: str) -> int | None:
        return int(o.rstrip("U"), 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", o) else None

    def address(self, o: str) -> str:
        m = re.fullmatch(r"\[\s*(%?[\w$@]+)\s*(?:\+\s*(-?\w+))?\s*\]", o)
        if m is None:
            raise UntranslatedError
        base, off = m[1], int(m[2] or "0", 0)
        if base not in self.scope.registers:
            if re.match(r"\d", base):
                return self.scope.constant("int", int(base, 0) + off, "u64")
            return self.scope.constant("symbol", (base, off), "u64")
        ty = f"u{8 * self.width(base)}"
        b = self.reg(base, ty)
        return f"({b}+{self.scope.constant('int', off, ty)})" if off else b

    # -- results
    def condition(self, dst: str) -> str | None:
        """The mask that a write to `dst` must blend with, or None."""
        if self.predicated:
            return "mp"
        return "m" if self.keep is not None and self.liveness.protects(self.keep, dst) else None

    def put(self, dst: str, ty: str, expr: str) -> None:
        """Emit dst <- expr, which has the dtype of `ty`, and is sign- or zero-extended into a wider register."""
        if dst == "_":
            return
        full = self.scope.registers[dst]
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
        """Emit dst <- name(*args), in place if nothing has to be blended or extended."""
        call = f"{name}({','.join(args)}"
        if dst != "_" and self.condition(dst) is None and (ty == "pred" or SIZE[ty] == self.width(dst)):
            self.emit(f"{call},out={self.reg(dst, ty)}{extra})")
        else:
            self.put(dst, ty, f"{call}{extra})")


Handler = Callable[[BlockTranslator, Instruction], None]


class Handlers(dict[str, Handler]):
    """Functions that translate instructions, by the first part of the opcode."""

    def of(self, *heads: str) -> Callable[[Handler], Handler]:
        """Register the decorated function for these opcodes."""

        def register(handler: Handler) -> Handler:
            self.update(dict.fromkeys(heads, handler))
            return handler

        return register
