"""Warp operations such as shuffles and votes, and barriers."""

from __future__ import annotations

from ..ptx.instruction import Instruction
from ..ptx.program import FULL_MASKS
from .block import BlockTranslator, Handlers, UntranslatedError

HANDLERS = Handlers()


def _members(t: BlockTranslator, ins: Instruction, mask: str) -> str:
    """The member mask of an operation, which must include the lanes that run it."""
    members = t.src(mask, "u32")
    if mask not in FULL_MASKS:
        t.emit(f"member({t.object(ins)},{members},{t.mask})")
    return members


@HANDLERS.of("shfl")
def _shfl(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    d, _, pd = o[0].partition("|")
    fixed = not any(x in t.scope.registers for x in o[2:5])
    args = ",".join(t.src(x, "u32") for x in o[1:5])
    t.emit(f"v,ok=shfl({t.object(ins)},{fixed},'{ins.parts[2]}',{args},{t.mask})")
    t.put(d, "u32", "v")
    if pd:
        t.put(pd, "pred", "ok")


@HANDLERS.of("vote")
def _vote(t: BlockTranslator, ins: Instruction) -> None:
    o, mode = ins.operands, ins.parts[2]
    e = f"vote('{mode}',{t.src(o[1], 'pred')},{_members(t, ins, o[2])},{t.mask})"
    t.put(o[0], "u32" if mode == "ballot" else "pred", e)


@HANDLERS.of("match")
def _match(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    d, _, pd = o[0].partition("|")
    mode = ins.parts[1]
    t.emit(f"v,ok=match('{mode}',{t.src(o[1], ins.parts[-1])},{_members(t, ins, o[2])},{t.mask})")
    t.put(d, "u32", "v")
    if pd:
        t.put(pd, "pred", "ok")


@HANDLERS.of("redux")
def _redux(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    t.put(o[0], ty, f"redux('{ins.parts[2]}',{t.src(o[1], ty)},{_members(t, ins, o[2])},{t.mask})")


@HANDLERS.of("elect")
def _elect(t: BlockTranslator, ins: Instruction) -> None:
    d, _, pd = ins.operands[0].partition("|")
    t.emit(f"v,ok=elect({_members(t, ins, ins.operands[1])},{t.mask})")
    t.put(d, "u32", "v")
    t.put(pd, "pred", "ok")


@HANDLERS.of("activemask")
def _activemask(t: BlockTranslator, ins: Instruction) -> None:
    t.put(ins.operands[0], "u32", f"activemask({t.mask})")


@HANDLERS.of("bar", "barrier")
def _bar(t: BlockTranslator, ins: Instruction) -> None:
    if ins.parts[1] == "warp":
        mask = ins.operands[0]
        members = "None" if mask in FULL_MASKS else t.src(mask, "u32")
        t.emit(f"warp_sync({t.object(ins)},{members},{t.mask})")
    elif ins.parts[1] == "cluster":
        raise UntranslatedError
    elif "red" in ins.parts:  # The scheduler reduces; here the operands only get names.
        t.reg(ins.operands[0], "u32" if "popc" in ins.parts else "pred")
        t.src(ins.operands[-1], "pred")
    for o in ins.operands[1 if "red" in ins.parts else 0 :]:
        if o in t.scope.registers and t.scope.registers[o] != "pred":
            t.src(o, "u32")
    if ins.pred:
        t.reg(ins.pred, "pred")
