"""Logic, shifts, bit fields, predicates, selection and moves."""

from __future__ import annotations

from ..ptx.instruction import Instruction, split_group
from ..ptx.types import NARROW_FLOATS, SIZE, bits_of, view_of
from .arith import FLOATS, float_source
from .block import BlockTranslator, Handlers, UntranslatedError

HANDLERS = Handlers()

_LOGIC = {"and": "and", "or": "or", "xor": "xor"}
_COMPARE = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "lo": "less",
    "ls": "less_equal",
    "hi": "greater",
    "hs": "greater_equal",
}


@HANDLERS.of("and", "or", "xor", "not")
def _logic(t: BlockTranslator, ins: Instruction) -> None:
    h, o, ty = ins.parts[0], ins.operands, ins.parts[-1]
    if ty == "pred":
        t.ufunc("logical_" + h, o[0], "pred", *(t.src(x, "pred") for x in o[1:]))
    else:
        u = bits_of(ty)
        t.ufunc("invert" if h == "not" else "bitwise_" + h, o[0], u, *(t.src(x, u) for x in o[1:]))


@HANDLERS.of("shl", "shr")
def _shift(t: BlockTranslator, ins: Instruction) -> None:
    h, o, ty = ins.parts[0], ins.operands, ins.parts[-1]
    v = ty if h == "shr" and ty[0] == "s" else bits_of(ty)
    # Shifting by the width or more gives 0 or the sign in NumPy, as in PTX.
    n = t.literal(o[2])
    count = (
        t.scope.constant("int", min(n, 255), v)
        if n is not None
        else (
            t.src(o[2], "u32")
            if v == "u32"
            else f"np.minimum({t.src(o[2], 'u32')},u32(255)).astype({v})"
            if SIZE[ty] == 2
            else f"{t.src(o[2], 'u32')}.astype({v})"
        )
    )
    t.ufunc("left_shift" if h == "shl" else "right_shift", o[0], v, t.src(o[1], v), count)


@HANDLERS.of("shf")
def _funnel(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    a = ",".join(t.src(x, "u32") for x in o[1:4])
    t.put(o[0], "u32", f"funnel({a},{'l' in ins.parts},{'clamp' in ins.parts})")


@HANDLERS.of("lop3")
def _lop3(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    if ins.parts[1] != "b32":
        raise UntranslatedError
    t.put(o[0], "u32", f"lop3({','.join(t.src(x, 'u32') for x in o[1:4])},{t.literal(o[4])})")


@HANDLERS.of("prmt")
def _prmt(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    if ins.parts[-1] != "b32":
        raise UntranslatedError
    a, b = t.src(o[1], "u32"), t.src(o[2], "u32")
    sel = t.literal(o[3])
    if sel is not None and not sel & 0x8888:  # a constant selector becomes shifts and masks
        terms = []
        for i in range(4):
            k = sel >> 4 * i & 7
            byte = f"(({a if k < 4 else b}>>u32({8 * (k & 3)}))&u32(255))"
            terms.append(f"({byte}<<u32({8 * i}))")
        known = {0x5410: f"(({a}&u32(65535))|({b}<<u32(16)))", 0x7632: f"(({a}>>u32(16))|({b}&u32(0xffff0000)))"}
        t.put(o[0], "u32", known.get(sel) or "(" + "|".join(terms) + ")")
    else:
        t.put(o[0], "u32", f"prmt({a},{b},{t.src(o[3], 'u32')})")


@HANDLERS.of("bfe", "bfi", "popc", "clz", "brev", "bfind")
def _bits(t: BlockTranslator, ins: Instruction) -> None:
    h, o, ty = ins.parts[0], ins.operands, ins.parts[-1]
    u = bits_of(ty)
    if h == "bfe":
        t.put(o[0], ty, f"bfe({t.src(o[1], ty)},{t.src(o[2], 'u32')},{t.src(o[3], 'u32')})")
    elif h == "bfi":
        t.put(o[0], u, f"bfi({t.src(o[1], u)},{t.src(o[2], u)},{t.src(o[3], 'u32')},{t.src(o[4], 'u32')})")
    elif h == "brev":
        t.put(o[0], u, f"brev({t.src(o[1], u)})")
    elif h == "bfind":
        t.put(o[0], "u32", f"bfind({t.src(o[1], ty)},{'shiftamt' in ins.parts})")
    else:
        x = t.src(o[1], u)
        t.put(o[0], "u32", f"clz({x})" if h == "clz" else f"np.bitwise_count({x}).astype(u32)")


@HANDLERS.of("dp4a")
def _dp4a(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    a = ",".join(t.src(x, "u32") for x in o[1:4])
    t.put(o[0], "u32", f"dp4a({a},{ins.parts[1] == 's32'},{ins.parts[2] == 's32'})")


# ---- predicates and selection
def _comparison(t: BlockTranslator, ins: Instruction, ty: str, cmp: str) -> str:
    o = ins.operands
    if ty in NARROW_FLOATS:
        a, b = (f"load_narrow({t.src(x, bits_of(ty))},'{ty}')" for x in o[1:3])
    else:
        v = view_of(ty)
        a, b = (float_source(t, ins, x, v) if v[0] == "f" else t.src(x, v) for x in o[1:3])
    is_float = ty in FLOATS or ty in NARROW_FLOATS
    nan = f"(np.isnan({a})|np.isnan({b}))"
    if cmp in ("nan", "num"):
        return nan if cmp == "nan" else f"~{nan}"
    if is_float and cmp.endswith("u") and cmp[:-1] in _COMPARE:
        e = f"{_COMPARE[cmp[:-1]]}({a},{b})"
        return e if cmp == "neu" else f"({e}|{nan})"
    e = f"{_COMPARE[cmp]}({a},{b})"
    return f"({e}&~{nan})" if is_float and cmp == "ne" else e


@HANDLERS.of("setp", "set")
def _setp(t: BlockTranslator, ins: Instruction) -> None:
    p, o, ty = ins.parts, ins.operands, ins.parts[-1]
    if ty.endswith("x2"):
        raise UntranslatedError
    e = _comparison(t, ins, ty, p[1])
    bool_op = next((q for q in p[2:] if q in _LOGIC), None)
    if p[0] == "set":
        if bool_op:
            e = f"logical_{bool_op}({e},{t.src(o[3], 'pred')})"
        d = p[-2]
        t.put(o[0], d, f"({e}).astype(f32)" if d == "f32" else f"(-({e}).astype(s32)).view({view_of(d)})")
        return
    d, _, inverse = o[0].partition("|")
    if not bool_op and not inverse and e.endswith(")") and e.split("(")[0] in _COMPARE.values() and e.count("(") == 1:
        t.ufunc(e.split("(")[0], d, "pred", *e[:-1].split("(")[1].split(","))
        return
    t.emit(f"t={e}")
    if inverse:
        t.emit("t1=~t")
        t.put(inverse, "pred", f"logical_{bool_op}(t1,{t.src(o[3], 'pred')})" if bool_op else "t1")
    t.put(d, "pred", f"logical_{bool_op}(t,{t.src(o[3], 'pred')})" if bool_op else "t")


@HANDLERS.of("selp")
def _selp(t: BlockTranslator, ins: Instruction) -> None:
    o, u = ins.operands, bits_of(ins.parts[-1])
    t.put(o[0], u, f"np.where({t.src(o[3], 'pred')},{t.src(o[1], u)},{t.src(o[2], u)})")


@HANDLERS.of("mov")
def _mov(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    if ty == "pred":
        t.put(o[0], "pred", t.src(o[1], "pred"))
        return
    u = bits_of(ty)
    if o[0].startswith("{"):
        dests = split_group(o[0])
        width = 8 * SIZE[ty] // len(dests)
        t.emit(f"t={t.src(o[1], u)}")
        for i, d in enumerate(dests):
            if d != "_":
                t.put(d, f"u{width}", f"(t>>{u}({width * i})).astype(u{width})" if i else f"t.astype(u{width})")
    elif o[1].startswith("{"):
        parts = split_group(o[1])
        width = 8 * SIZE[ty] // len(parts)
        values = [f"{t.src(s, f'u{width}')}.astype({u})" for s in parts]
        terms = [f"({x}<<{u}({width * i}))" if i else x for i, x in enumerate(values)]
        t.put(o[0], u, "|".join(terms))
    else:
        t.put(o[0], u, t.src(o[1], u))
