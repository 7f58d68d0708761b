"""wgmma, and fences of the asynchronous proxy."""

from __future__ import annotations

import re

from ..ptx.instruction import Instruction, split_group
from .block import BlockTranslator, Handlers, UntranslatedError
from .mem_op import MemOp, Wgmma

HANDLERS = Handlers()


@HANDLERS.of("wgmma")
def _wgmma(t: BlockTranslator, ins: Instruction) -> None:
    what = ins.parts[1]
    if what == "mma_async":
        _mma_async(t, ins)
    elif what == "fence":
        t.emit(f"wgmma_fence({t.object(ins)},{t.mask})")
    elif what == "commit_group":
        t.emit(f"wgmma_commit({t.object(ins)},{t.mask})")
    elif what == "wait_group":
        t.emit(f"wgmma_wait({t.object(ins)},{t.mask},{t.literal(ins.operands[0])})")
    else:
        raise UntranslatedError


def _mma_async(t: BlockTranslator, ins: Instruction) -> None:
    p, o = ins.parts, ins.operands
    shape = re.fullmatch(r"m64n(\d+)k16", p[4])
    if shape is None or p[2:4] != ["sync", "aligned"] or p[5:] not in (["f32", k, k] for k in ("f16", "bf16")):
        raise UntranslatedError
    n, d, a = int(shape[1]), split_group(o[0]), split_group(o[1])
    immediates = [t.literal(x) for x in o[4:]]
    if n % 8 or not 8 <= n <= 256 or len(d) != n // 2 or len(a) not in (1, 4) or len(o) != (8 if len(a) == 1 else 7):
        raise UntranslatedError
    sign_a, sign_b, *majors = immediates
    if {sign_a, sign_b} - {1, -1} or set(majors) - {0, 1} or sign_a is None or sign_b is None:
        raise UntranslatedError
    is_mn = [False, *map(bool, majors)][-2:]
    op = t.object(MemOp(ins, "load", "shared", 16))
    said = t.object(Wgmma(n, p[6], sign_a * sign_b, *is_mn))
    accumulators = ",".join(t.src(x, "f32") for x in d)
    of_a = ",".join(t.src(x, "u32" if len(a) > 1 else "u64") for x in a)
    t.emit(f"v=wgmma({op},{said},({accumulators},),({of_a},),{t.src(o[2], 'u64')},{t.src(o[3], 'pred')},{t.mask})")
    for i, x in enumerate(d):
        t.put(x, "f32", f"v[{i}]")
