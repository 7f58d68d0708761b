"""Conversions: cvt, cvta, and isspacep, which tests where an address points."""

from __future__ import annotations

from ..ptx.instruction import Instruction
from ..ptx.types import LOCAL_WINDOW, NARROW_FLOATS, SHARED_WINDOW, bits_of, view_of
from .block import BlockTranslator, Handlers, UntranslatedError

HANDLERS = Handlers()

_TO_INTEGER = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_FP8 = ("e4m3x2", "e5m2x2")


@HANDLERS.of("cvt")
def _cvt(t: BlockTranslator, ins: Instruction) -> None:
    p, o = ins.parts, ins.operands
    if p[1] == "pack":
        raise UntranslatedError
    d, s = p[-2], p[-1]
    mode = "rz" if "rz" in p else "rn"
    if ("satfinite" in p and d not in _FP8) or "rs" in p:
        raise UntranslatedError
    if d in ("f16x2", "bf16x2"):
        if s in _FP8:
            t.put(o[0], "u32", f"fp8x2_unpack({t.src(o[1], 'u16')},'{s[:4]}','{d}')")
        elif s == "f32" and len(o) == 3:
            t.put(o[0], "u32", f"pack_narrow({t.src(o[1], s)},{t.src(o[2], s)},'{d}','{mode}',{'relu' in p})")
        else:
            raise UntranslatedError
    elif d in _FP8:
        if s == "f32":
            hi, lo = t.src(o[1], s), t.src(o[2], s)
            if "relu" in p:
                hi, lo = f"fmax({hi},f32(0))", f"fmax({lo},f32(0))"
            t.put(o[0], "u16", f"fp8x2_pack({hi},{lo},'{d[:4]}')")
        elif s in ("f16x2", "bf16x2"):
            t.emit(f"t=load_narrow({t.src(o[1], 'u32')},'{s}')")
            t.put(o[0], "u16", f"fp8x2_pack(t[1::2],t[::2],'{d[:4]}')")
        else:
            raise UntranslatedError
    elif d == "tf32":
        if "rna" not in p:
            raise UntranslatedError
        t.put(o[0], "u32", f"to_tf32({t.src(o[1], 'f32')})")
    else:
        _scalar(t, ins, d, s, mode)


def _scalar(t: BlockTranslator, ins: Instruction, d: str, s: str, mode: str) -> None:
    p, o = ins.parts, ins.operands
    s_float, d_float = s[0] == "f" or s in NARROW_FLOATS, d[0] == "f" or d in NARROW_FLOATS
    x = f"load_narrow({t.src(o[1], bits_of(s))},'{s}')" if s in NARROW_FLOATS else t.src(o[1], s)
    ftz = "ftz" in p
    if ftz and s == "f32":
        x = f"flushed({x})"
    integral = next((_TO_INTEGER[q] for q in p if q in _TO_INTEGER), None)
    if s_float and not d_float:
        t.put(o[0], d, f"to_int({integral or 'np.trunc'}({x}),'{view_of(d)}')")
        return
    if not d_float:
        if "sat" in p:
            i = f"np.iinfo({view_of(d)})"
            x = f"np.clip({x},max({i}.min,np.iinfo({view_of(s)}).min),min({i}.max,np.iinfo({view_of(s)}).max))"
        t.put(o[0], d, f"({x}).astype({view_of(d)})")
        return
    if integral:
        x = f"{integral}({x})"
    if "relu" in p:
        x = f"fmax({x},0)"
    if d in NARROW_FLOATS:
        if "sat" in p:
            x = f"saturate({x})"
        x = x if s_float else f"({x}).astype(f64)"
        t.put(o[0], bits_of(d), f"store_narrow({x},'{d}','{mode}')")
        return
    directed = next((q for q in p if q in ("rz", "rm", "rp")), None)
    if directed and d == "f32" and s in ("f64", "s32", "u32"):
        x = f"round32(({x}).astype(f64),'{directed}')"
    x = f"({x}).astype({d})"
    if "sat" in p:
        x = f"saturate({x})"
    t.put(o[0], d, f"flush({x})" if ftz and d == "f32" and s != "f32" else x)


@HANDLERS.of("cvta")
def _cvta(t: BlockTranslator, ins: Instruction) -> None:
    p, o = ins.parts, ins.operands
    to = p[1] == "to"
    base = {"global": 0, "const": 0, "param": None, "shared": SHARED_WINDOW, "local": LOCAL_WINDOW}[
        (p[2] if to else p[1]).split("::")[0]
    ]
    if base is None:
        raise UntranslatedError
    x = t.src(o[1], "u64")
    if base == 0:
        t.put(o[0], "u64", x)
    else:
        t.ufunc("subtract" if to else "add", o[0], "u64", x, t.scope.constant("int", base, "u64"))


@HANDLERS.of("isspacep")
def _isspacep(t: BlockTranslator, ins: Instruction) -> None:
    o = ins.operands
    space = ins.parts[1].split("::")[0]
    x = t.src(o[1], "u64")
    inside = {
        w: f"(({x}-{t.scope.constant('int', b, 'u64')})<u64({1 << 24}))"
        for w, b in (("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW))
    }
    t.put(o[0], "pred", inside[space] if space in inside else f"~({inside['shared']}|{inside['local']})")
