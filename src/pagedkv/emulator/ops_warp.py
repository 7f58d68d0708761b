"""Warp-level operations: shuffles, votes, matrix instructions, barriers."""

from __future__ import annotations

from .access import MemOp
from .parse import Instruction
from .translate import BlockTranslator, UntranslatedError, handles, split_group


@handles("shfl")
def _shfl(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    d, _, pd = o[0].partition("|")
    fixed = not any(x in t.owner.entry.registers for x in o[2:5])
    args = ",".join(t.src(x, "u32") for x in o[1:5])
    t.emit(f"v,ok=shfl({t.object(ins)},{fixed},'{ins.parts[2]}',{args},{t.mask})")
    t.put(d, "u32", "v")
    if pd:
        t.put(pd, "pred", "ok")


@handles("vote")
def _vote(t: BlockTranslator, ins: Instruction) -> None:
    o, mode = ins.operands, ins.parts[2]
    e = f"vote('{mode}',{t.src(o[1], 'pred')},{t.src(o[2], 'u32')},{t.mask})"
    t.put(o[0], "u32" if mode == "ballot" else "pred", e)


@handles("match")
def _match(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    d, _, pd = o[0].partition("|")
    mode = ins.parts[1]
    t.emit(f"v,ok=match('{mode}',{t.src(o[1], ins.parts[-1])},{t.src(o[2], 'u32')},{t.mask})")
    t.put(d, "u32", "v")
    if pd:
        t.put(pd, "pred", "ok")


@handles("redux")
def _redux(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    t.put(o[0], ty, f"redux('{ins.parts[2]}',{t.src(o[1], ty)},{t.src(o[2], 'u32')},{t.mask})")


@handles("elect")
def _elect(t: BlockTranslator, ins: Instruction) -> None:
    d, _, pd = ins.operands[0].partition("|")
    t.emit(f"v,ok=elect({t.src(ins.operands[1], 'u32')},{t.mask})")
    t.put(d, "u32", "v")
    t.put(pd, "pred", "ok")


@handles("activemask")
def _activemask(t: BlockTranslator, ins: Instruction) -> None:
    t.put(ins.operands[0], "u32", f"activemask({t.mask})")


@handles("bar", "barrier")
def _bar(t: BlockTranslator, ins: Instruction) -> None:
    if ins.parts[1] == "warp":
        t.emit(f"warp_sync({t.mask})")
    elif ins.parts[1] == "cluster":
        raise UntranslatedError
    elif "red" in ins.parts:  # the scheduler does the rest; make the operands reachable
        t.reg(ins.operands[0], "u32" if "popc" in ins.parts else "pred")
        t.src(ins.operands[-1], "pred")
    for o in ins.operands[1 if "red" in ins.parts else 0 :]:
        if o in t.owner.entry.registers and t.owner.entry.registers[o] != "pred":
            t.src(o, "u32")
    if ins.pred:
        t.reg(ins.pred, "pred")


@handles("mma")
def _mma(t: BlockTranslator, ins: Instruction) -> None:
    shape = next(q for q in ins.parts if q.startswith("m16n8k"))
    d, a, b, c = ins.parts[-4:]
    if a != b or d != c or ins.parts[4:6] != ["row", "col"] or d not in ("f32", "f16", "s32") or len(ins.parts) != 10:
        raise UntranslatedError  # len: no .satfinite, .sp, .kind, .xor
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


@handles("ldmatrix")
def _ldmatrix(t: BlockTranslator, ins: Instruction) -> None:
    p = ins.parts
    if "m8n8" not in p or p[-1] != "b16":
        raise UntranslatedError
    n = int(next(q for q in p if q in ("x1", "x2", "x4"))[1])
    op = t.object(MemOp(ins, "load", "shared", 16))
    t.emit(f"v=ldmatrix({op},{t.address(ins.operands[1])},{n},{'trans' in p},{t.mask})")
    for i, r in enumerate(split_group(ins.operands[0])):
        t.put(r, "u32", f"v[{i}]")


@handles("stmatrix")
def _stmatrix(t: BlockTranslator, ins: Instruction) -> None:
    p = ins.parts
    if "m8n8" not in p or p[-1] != "b16":
        raise UntranslatedError
    regs = split_group(ins.operands[1])
    op = t.object(MemOp(ins, "store", "shared", 16))
    values = "".join(f"{t.src(r, 'u32')}," for r in regs)
    t.emit(f"stmatrix({op},{t.address(ins.operands[0])},({values}),{'trans' in p},{t.mask})")


@handles("movmatrix")
def _movmatrix(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    t.put(o[0], "u32", f"movmatrix({t.object(ins)},{t.src(o[1], 'u32')},{t.mask})")


@handles("unsupported")
def _unsupported(t: BlockTranslator, ins: Instruction) -> None:
    raise UntranslatedError
