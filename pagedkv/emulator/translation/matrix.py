"""Matrix instructions: mma, ldmatrix, stmatrix, movmatrix."""

from __future__ import annotations

from ..ptx.instruction import Instruction, split_group
from .block import BlockTranslator, Handlers, UntranslatedError
from .mem_op import MemOp

HANDLERS = Handlers()


@HANDLERS.of("mma")
def _mma(t: BlockTranslator, ins: Instruction) -> None:
    shape = next(q for q in ins.parts if q.startswith("m16n8k"))
    d, a, b, c = ins.parts[-4:]
    if a != b or d != c or ins.parts[4:6] != ["row", "col"] or d not in ("f32", "f16", "s32") or len(ins.parts) != 10:
        raise UntranslatedError  # more parts: .satfinite, .sp, .kind or .xor
    k = int(shape[6:])
    legal = {
        ("f16", 8),
        ("f16", 16),
        ("bf16", 8),
        ("bf16", 16),
        ("tf32", 4),
        ("tf32", 8),
        ("e4m3", 16),
        ("e4m3", 32),
        ("e5m2", 16),
        ("e5m2", 32),
        ("s8", 16),
        ("s8", 32),
        ("u8", 16),
        ("u8", 32),
    }
    if (a, k) not in legal:
        raise UntranslatedError
    view = "f32" if d == "f32" else "u32"
    groups = []
    for o, v in zip(ins.operands, (view, "u32", "u32", view), strict=True):
        groups.append("(" + "".join(f"{t.src(r, v)}," for r in split_group(o)) + ")")
    dests = split_group(ins.operands[0])
    t.emit(f"v=mma({t.object(ins)},'{a}','{d}',{k},{','.join(groups[1:])},{t.mask})")
    for i, r in enumerate(dests):
        t.put(r, view, f"v[{i}]")


@HANDLERS.of("ldmatrix")
def _ldmatrix(t: BlockTranslator, ins: Instruction) -> None:
    p = ins.parts
    if "m8n8" not in p or p[-1] != "b16":
        raise UntranslatedError
    n = int(next(q for q in p if q in ("x1", "x2", "x4"))[1])
    op = t.object(MemOp(ins, "load", "shared", 16))
    t.emit(f"v=ldmatrix({op},{t.address(ins.operands[1])},{n},{'trans' in p},{t.mask})")
    for i, r in enumerate(split_group(ins.operands[0])):
        t.put(r, "u32", f"v[{i}]")


@HANDLERS.of("stmatrix")
def _stmatrix(t: BlockTranslator, ins: Instruction) -> None:
    p = ins.parts
    if "m8n8" not in p or p[-1] != "b16":
        raise UntranslatedError
    regs = split_group(ins.operands[1])
    op = t.object(MemOp(ins, "store", "shared", 16))
    values = "".join(f"{t.src(r, 'u32')}," for r in regs)
    t.emit(f"stmatrix({op},{t.address(ins.operands[0])},({values}),{'trans' in p},{t.mask})")


@HANDLERS.of("movmatrix")
def _movmatrix(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    t.put(o[0], "u32", f"movmatrix({t.object(ins)},{t.src(o[1], 'u32')},{t.mask})")
