"""Device functions that convert between float32 and the elements of a cache, in the 32-bit words that hold them.

`unpack(kind)` widens a word, `narrow(kind)` rounds one value; `unpack_words` and `multiply_add` take the words of a
vector. Arguments are typed as strictly as in intrinsics/.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from llvmlite import ir

from .intrinsics.declare import F16, F32, I16, I32, declare, emit_asm, float32, parts_of, uint32
from .language import types
from .sizes import ELEMENT_BITS

_UNPACK_FLOAT16 = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
_UNPACK_E4M3 = (
    "{ .reg .b16 a, b, c, d; .reg .b32 t, u; mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 t, a; cvt.rn.f16x2.e4m3x2 u, b;"
    " mov.b32 {a, b}, t; mov.b32 {c, d}, u; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c;"
    " cvt.f32.f16 $3, d; }"
)


def _floats_of_halves(builder: Any, word: Any) -> list[Any]:
    struct = ir.LiteralStructType([F32, F32])
    return parts_of(builder, emit_asm(builder, struct, _UNPACK_FLOAT16, "=f,=f,r", [word]), 2)


def _floats_of_bfloat16(builder: Any, word: Any) -> list[Any]:
    low, high = builder.shl(word, I32(16)), builder.and_(word, I32(0xFFFF0000))
    return [builder.bitcast(low, F32), builder.bitcast(high, F32)]


def _bytes_on_top(builder: Any, word: Any) -> list[Any]:
    """Two words with bytes 0, 1 and 2, 3 of `word` as the upper bytes of their halves, above zeros."""
    return [
        emit_asm(builder, I32, f"prmt.b32 $0, $1, 0, {selector};", "=r,r", [word]) for selector in ("0x1404", "0x3424")
    ]


def _floats_of_int8(builder: Any, word: Any) -> list[Any]:
    # Below 2**23, an integer beside 128 is the low byte of a float32: 2**23 + 128 + code.
    biased, floats = builder.xor(word, I32(0x80808080)), []
    for byte in range(4):
        args = [biased, I32(0x4B000000)]
        bits = emit_asm(builder, I32, f"prmt.b32 $0, $1, $2, {0x7540 | byte:#06x};", "=r,r,r", args)
        floats.append(builder.fsub(builder.bitcast(bits, F32), ir.Constant(F32, 2.0**23 + 128)))
    return floats


def _floats_of_e5m2(builder: Any, word: Any) -> list[Any]:
    # A code is the upper byte of the float16 of the same value.
    return [x for halves in _bytes_on_top(builder, word) for x in _floats_of_halves(builder, halves)]


def _floats_of_e4m3(builder: Any, word: Any) -> list[Any]:
    # Shifted right by one bit, a code's exponent and mantissa are a float16 of 2**-8 times its value, subnormals too.
    floats = []
    for halves in _bytes_on_top(builder, word):
        sign = builder.and_(halves, I32(0x80008000))
        magnitude = builder.lshr(builder.and_(halves, I32(0x7F007F00)), I32(1))
        floats += _floats_of_halves(builder, builder.or_(sign, magnitude))
    return [_e4m3_value(builder, x) for x in floats]


def _e4m3_value(builder: Any, scaled: Any) -> Any:
    # The code of all ones is NaN; as a number it would be 480 = 1.875 * 2**8.
    bits = builder.and_(builder.bitcast(scaled, I32), I32(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned("==", bits, I32(0x3FF00000))
    value = builder.fmul(scaled, ir.Constant(F32, 256.0))
    return builder.select(is_nan, ir.Constant(F32, float("nan")), value)


def _floats_of_e4m3_by_hardware(builder: Any, word: Any) -> list[Any]:
    struct = ir.LiteralStructType([F32] * 4)
    return parts_of(builder, emit_asm(builder, struct, _UNPACK_E4M3, "=f,=f,=f,=f,r", [word]), 4)


@lru_cache
def unpack(kind: str, hardware_fp8: bool = False) -> Any:
    """The device function that widens a word of elements: uint32 -> a tuple of float32, lowest address first.

    Parameters
    ----------
    kind : str
        "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2" or "int8": 1, 2, 2, 4, 4 and 4 elements in a word.
    hardware_fp8 : bool
        Convert e4m3 with the instruction for it, which needs compute capability 8.9.
    """
    doc = f"The {kind} elements of a word as float32, exactly."
    result = types.UniTuple(float32, 32 // ELEMENT_BITS[kind])
    return declare(f"unpack_{kind}", doc, result, [uint32], _widen(kind, hardware_fp8))


def _widen(kind: str, hardware_fp8: bool) -> Callable[[Any, Any], list[Any]]:
    """The function that emits instructions for the float32 values of a word's elements."""
    widen: dict[str, Callable[[Any, Any], list[Any]]] = {
        "float32": lambda builder, word: [builder.bitcast(word, F32)],
        "float16": _floats_of_halves,
        "bfloat16": _floats_of_bfloat16,
        "fp8_e4m3": _floats_of_e4m3_by_hardware if hardware_fp8 else _floats_of_e4m3,
        "fp8_e5m2": _floats_of_e5m2,
        "int8": _floats_of_int8,
    }
    return widen[kind]


def _bits_of_half(builder: Any, x: Any) -> Any:
    return builder.zext(builder.bitcast(builder.fptrunc(x, F16), I16), I32)


def _bits_of_bfloat16(builder: Any, x: Any) -> Any:
    return builder.zext(emit_asm(builder, I16, "cvt.rn.bf16.f32 $0, $1;", "=h,f", [x]), I32)


def _code_by_hardware(name: str) -> Callable[[Any, Any], Any]:
    def emit(builder: Any, x: Any) -> Any:
        # The first source operand is the upper half of the pair.
        text = f"cvt.rn.satfinite.{name}x2.f32 $0, $1, $2;"
        code = builder.zext(emit_asm(builder, I16, text, "=h,f,f", [ir.Constant(F32, 0.0), x]), I32)
        # NaN becomes the code of all ones, the only NaN of e4m3.
        return code if name == "e4m3" else builder.select(builder.fcmp_unordered("uno", x, x), I32(0x7E), code)

    return emit


def _code_by_bits(mantissa_bits: int, bias: int, largest: float, nan: int) -> Callable[[Any, Any], Any]:
    """Round a float32 to an fp8 code in integer arithmetic: nearest even, saturating, NaN as the code `nan`."""
    shift = 23 - mantissa_bits
    smallest_normal = 2.0 ** (1 - bias)
    # Adding this number leaves the mantissa of a subnormal in the lowest bits, rounded by the hardware.
    magic = 2.0 ** (1 - bias - mantissa_bits + 23)

    def emit(builder: Any, x: Any) -> Any:
        bits = builder.bitcast(x, I32)
        sign = builder.and_(builder.lshr(bits, I32(24)), I32(0x80))
        size = builder.bitcast(builder.and_(bits, I32(0x7FFFFFFF)), F32)
        is_nan = builder.fcmp_unordered("uno", x, x)
        size = builder.select(
            builder.fcmp_ordered("<", size, ir.Constant(F32, largest)), size, ir.Constant(F32, largest)
        )
        bits = builder.bitcast(size, I32)
        odd = builder.and_(builder.lshr(bits, I32(shift)), I32(1))
        rounded = builder.add(builder.add(bits, I32((1 << (shift - 1)) - 1)), odd)
        normal = builder.sub(builder.lshr(rounded, I32(shift)), I32((127 - bias) << mantissa_bits))
        steps = builder.bitcast(builder.fadd(size, ir.Constant(F32, magic)), I32)
        subnormal = builder.and_(steps, I32(0xFF))
        is_small = builder.fcmp_ordered("<", size, ir.Constant(F32, smallest_normal))
        code = builder.select(is_small, subnormal, normal)
        return builder.or_(sign, builder.select(is_nan, I32(nan), code))

    return emit


@lru_cache
def narrow(kind: str, hardware_fp8: bool = False) -> Any:
    """The device function that rounds a float32 to a kind, nearest even: float32 -> its bits in a uint32.

    fp8 saturates at its largest finite value, infinities too. NaN stays NaN; in fp8 it has the code that ml_dtypes
    writes, except that the sign may differ.

    Parameters
    ----------
    kind : str
        As in `unpack`.
    hardware_fp8 : bool
        Use the fp8 instructions, which need compute capability 8.9.
    """
    emit = {
        "float32": lambda builder, x: builder.bitcast(x, I32),
        "float16": _bits_of_half,
        "bfloat16": _bits_of_bfloat16,
        "fp8_e4m3": _code_by_hardware("e4m3") if hardware_fp8 else _code_by_bits(3, 7, 448.0, 0x7F),
        "fp8_e5m2": _code_by_hardware("e5m2") if hardware_fp8 else _code_by_bits(2, 15, 57344.0, 0x7E),
    }[kind]
    return declare(f"narrow_{kind}", f"The bits of a float32 rounded to {kind}.", uint32, [float32], emit)


@lru_cache
def multiply_add(kind: str, num_words: int, hardware_fp8: bool = False) -> Any:
    """The device function (sum, words, weights) -> sum + the products of a vector's elements and their weights.

    `words` is a tuple of num_words uint32 that hold elements of `kind`, `weights` one of as many float32 as they hold;
    the sum goes from the lowest address up.
    """
    widen, weights = _widen(kind, hardware_fp8), num_words * 32 // ELEMENT_BITS[kind]

    def emit(builder: Any, total: Any, words: Any, factors: Any) -> Any:
        values = [x for word in parts_of(builder, words, num_words) for x in widen(builder, word)]
        for value, factor in zip(values, parts_of(builder, factors, weights), strict=True):
            total = builder.fadd(total, builder.fmul(value, factor, flags=("contract",)), flags=("contract",))
        return total

    arguments = [float32, types.UniTuple(uint32, num_words), types.UniTuple(float32, weights)]
    return declare(f"multiply_add_{kind}", "The sum with one vector's products added.", float32, arguments, emit)


@lru_cache
def unpack_words(kind: str, num_words: int, hardware_fp8: bool = False) -> Any:
    """The device function that widens a tuple of words as `unpack` widens one."""
    widen, count = _widen(kind, hardware_fp8), num_words * 32 // ELEMENT_BITS[kind]

    def emit(builder: Any, words: Any) -> list[Any]:
        return [x for word in parts_of(builder, words, num_words) for x in widen(builder, word)]

    arguments = [types.UniTuple(uint32, num_words)]
    return declare(f"unpack_words_{kind}", "All elements of a vector.", types.UniTuple(float32, count), arguments, emit)
