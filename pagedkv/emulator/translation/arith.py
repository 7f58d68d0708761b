"""Integer and float arithmetic."""

from __future__ import annotations

from ..ptx.instruction import Instruction
from ..ptx.types import NARROW_FLOATS, SIZE, bits_of
from .block import BlockTranslator, Handlers, UntranslatedError

HANDLERS = Handlers()

FLOATS = ("f32", "f64")
_BINARY = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "min": "fmin", "max": "fmax"}
_UNARY = {
    "ex2": "np.exp2",
    "lg2": "np.log2",
    "sqrt": "np.sqrt",
    "sin": "np.sin",
    "cos": "np.cos",
    "tanh": "np.tanh",
    "neg": "negative",
    "abs": "absolute",
}


def _finish(t: BlockTranslator, ins: Instruction, ty: str, expr: str) -> None:
    """Write a float result, saturated for .sat and flushed for .ftz."""
    dst = ins.operands[0]
    if "sat" in ins.parts:
        expr = f"saturate({expr})"
    if "ftz" not in ins.parts or ty != "f32":
        t.put(dst, ty, expr)
    elif t.condition(dst) is None:
        t.put(dst, ty, expr)
        t.emit(f"flush({t.reg(dst, ty)})")
    else:
        t.put(dst, ty, f"flush({expr})")


def _result(t: BlockTranslator, ins: Instruction, ty: str, name: str, *args: str) -> None:
    if "sat" in ins.parts or ("ftz" in ins.parts and ty == "f32"):
        _finish(t, ins, ty, f"{name}({','.join(args)})")
    else:
        t.ufunc(name, ins.operands[0], ty, *args)


def float_source(t: BlockTranslator, ins: Instruction, o: str, ty: str) -> str:
    e = t.src(o, ty)
    if "ftz" in ins.parts and ty == "f32" and o.startswith("%") and o not in t.liveness.always_flushed:
        return f"flushed({e})"
    return e


def _narrow(t: BlockTranslator, ins: Instruction, ty: str, expr: str, args: list[str]) -> None:
    """Compute in float32 or float64, then round; {0}, {1}... in `expr` stand for the widened operands."""
    loaded = [f"load_narrow({t.src(a, bits_of(ty))},'{ty}')" for a in args]
    e = expr.format(*loaded)
    if "relu" in ins.parts:
        e = f"fmax({e},f32(0))"
    if "sat" in ins.parts:
        e = f"saturate({e})"
    if ty == "f32x2" and ("ftz" in ins.parts or _directed(ins)):
        raise UntranslatedError
    t.put(ins.operands[0], bits_of(ty), f"store_narrow({e},'{ty}')")


def _directed(ins: Instruction) -> str | None:
    return next((q for q in ins.parts[1:] if q in ("rz", "rm", "rp")), None)


@HANDLERS.of("add", "sub", "mul", "div", "min", "max")
def _arith(t: BlockTranslator, ins: Instruction) -> None:
    h, p, o, ty = ins.parts[0], ins.parts, ins.operands, ins.parts[-1]
    if ty in FLOATS or ty in NARROW_FLOATS:
        name = _BINARY[h]
        if "NaN" in p:
            name = {"fmin": "minimum", "fmax": "maximum"}[name]
        if "xorsign" in p:
            raise UntranslatedError
        if ty in NARROW_FLOATS:
            _narrow(t, ins, ty, f"{name}({{0}},{{1}})", o[1:3])
            return
        args = [float_source(t, ins, x, ty) for x in o[1:]]
        if len(args) == 3:  # three-input min/max
            args = [f"{name}({args[0]},{args[1]})", args[2]]
        mode = _directed(ins)
        if mode and ty == "f32":
            t.put(o[0], ty, f"round32({name}({args[0]}.astype(f64),{args[1]}.astype(f64)),'{mode}')")
        elif mode:
            raise UntranslatedError
        else:
            _result(t, ins, ty, name, *args)
        return
    if ty in ("u16x2", "s16x2"):
        half = ty[:3]
        e = ",".join(f"{t.src(x, 'u32')}.view({half})" for x in o[1:3])
        name = {"add": "add", "min": "minimum", "max": "maximum"}[h]
        t.put(o[0], "u32", f"{name}({e}).view(u32)")
        return
    if h == "mul":
        _multiply(t, ins)
    elif h == "div":
        t.put(o[0], ty, f"idiv({t.src(o[1], ty)},{t.src(o[2], ty)})")
    elif h in ("min", "max"):
        t.ufunc(h + "imum", o[0], ty, t.src(o[1], ty), t.src(o[2], ty))
    elif "sat" in p:
        t.put(o[0], ty, f"add_sat({t.src(o[1], ty)},{t.src(o[2], ty)},{h == 'sub'})")
    else:
        u = bits_of(ty)
        a, b = t.src(o[1], u), t.src(o[2], u)
        if "cc" in p:
            carry = f"({a}+{b})<{a}" if h == "add" else f"{a}<{b}"
            t.emit(f"cc=({carry}).astype({u})")
        t.ufunc(_BINARY[h], o[0], u, a, b)


def _multiply(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    if "wide" in ins.parts:
        wide = ty[0] + str(16 * SIZE[ty])
        t.ufunc("multiply", o[0], wide, t.src(o[1], ty), t.src(o[2], ty), extra=f",dtype={wide}")
    elif "hi" in ins.parts:
        t.put(o[0], ty, f"mulhi({t.src(o[1], ty)},{t.src(o[2], ty)})")
    else:
        u = bits_of(ty)
        t.ufunc("multiply", o[0], u, t.src(o[1], u), t.src(o[2], u))


@HANDLERS.of("mad", "madc")
def _mad(t: BlockTranslator, ins: Instruction) -> None:
    p, o, ty = ins.parts, ins.operands, ins.parts[-1]
    if ty in FLOATS:
        _fma(t, ins)
        return
    if "wide" in p:
        ty = ty[0] + str(16 * SIZE[ty])
        t.emit(f"t=multiply({t.src(o[1], p[-1])},{t.src(o[2], p[-1])},dtype={ty})")
    elif "hi" in p:
        t.emit(f"t=mulhi({t.src(o[1], ty)},{t.src(o[2], ty)})")
        t.emit(f"t=t.view({bits_of(ty)})")
    else:
        u = bits_of(ty)
        t.emit(f"t=multiply({t.src(o[1], u)},{t.src(o[2], u)})")
    if "wide" not in p:
        ty = bits_of(ty)
    c = t.src(o[3], ty)
    if p[0] == "madc":
        t.emit(f"t1=t+cc; k=(t1<t).astype({ty}); t=t1")
    else:
        t.emit(f"k={ty}(0)")
    if "cc" in p:
        t.emit(f"k=k+((t+{c})<t).astype({ty})")
    t.ufunc("add", o[0], ty, "t", c)
    if "cc" in p:
        t.emit("cc=k")


@HANDLERS.of("addc", "subc")
def _carry(t: BlockTranslator, ins: Instruction) -> None:
    o, u = ins.operands, bits_of(ins.parts[-1])
    a, b = t.src(o[1], u), t.src(o[2], u)
    if ins.parts[0] == "addc":
        t.emit(f"t={a}+{b}; k=(t<{a}).astype({u}); t1=t+cc; k|=(t1<t)")
    else:
        t.emit(f"t={a}-{b}; k=({a}<{b}).astype({u}); t1=t-cc; k|=(t<cc)")
    if "cc" in ins.parts:
        t.emit("cc=k")
    t.put(o[0], u, "t1")


@HANDLERS.of("rem")
def _rem(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    t.put(o[0], ty, f"irem({t.src(o[1], ty)},{t.src(o[2], ty)})")


@HANDLERS.of("sad")
def _sad(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    a, b = t.src(o[1], ty), t.src(o[2], ty)
    t.put(o[0], ty, f"(maximum({a},{b})-minimum({a},{b})+{t.src(o[3], ty)})")


@HANDLERS.of("fma")
def _fma(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    if ty in NARROW_FLOATS:
        _narrow(t, ins, ty, "({0}.astype(f64)*{1}+{2})", o[1:4])
        return
    a, b, c = (float_source(t, ins, x, ty) for x in o[1:4])
    mode = _directed(ins)
    if ty == "f64":
        if mode:
            raise UntranslatedError
        t.put(o[0], ty, f"{a}*{b}+{c}")
    else:
        e = f"round32(fma32({a},{b},{c}),'{mode}')" if mode else f"fma32({a},{b},{c})"
        if not mode and ("sat" in ins.parts or t.condition(o[0]) is not None):
            e += ".astype(f32)"
        _finish(t, ins, ty, e)


@HANDLERS.of("ex2", "lg2", "sqrt", "sin", "cos", "tanh", "neg", "abs")
def _unary(t: BlockTranslator, ins: Instruction) -> None:
    h, o, ty = ins.parts[0], ins.operands, ins.parts[-1]
    if ty in NARROW_FLOATS:
        if h in ("neg", "abs"):
            sign = {"f16": 0x8000, "bf16": 0x8000}.get(ty, 0x80008000)
            u = bits_of(ty)
            mask = t.scope.constant("int", sign if h == "neg" else ~sign, u)
            t.ufunc("bitwise_xor" if h == "neg" else "bitwise_and", o[0], u, t.src(o[1], u), mask)
        else:
            _narrow(t, ins, ty, f"{_UNARY[h]}({{0}})", o[1:2])
    elif ty in FLOATS:
        _result(t, ins, ty, _UNARY[h], float_source(t, ins, o[1], ty))
    else:
        t.ufunc(_UNARY[h], o[0], ty, t.src(o[1], ty))


@HANDLERS.of("rcp", "rsqrt")
def _reciprocal(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    x = float_source(t, ins, o[1], ty)
    one = t.scope.constant("int", 1, ty)
    _result(t, ins, ty, "divide", one, x if ins.parts[0] == "rcp" else f"np.sqrt({x})")


@HANDLERS.of("copysign")
def _copysign(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    t.ufunc("np.copysign", o[0], ty, t.src(o[2], ty), t.src(o[1], ty))


@HANDLERS.of("testp")
def _testp(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    x = t.src(o[1], ty)
    tiny = f"np.finfo({ty}).tiny"
    expr = {
        "finite": f"np.isfinite({x})",
        "infinite": f"np.isinf({x})",
        "notanumber": f"np.isnan({x})",
        "number": f"~np.isnan({x})",
        "normal": f"(np.isfinite({x})&(absolute({x})>={tiny}))",
        "subnormal": f"((absolute({x})<{tiny})&({x}!=0))",
    }[ins.parts[1]]
    t.put(o[0], "pred", expr)
