"""float16 to float32 and back: by instructions of the processor, or with integers if it has none for it.

Otherwise LLVM would call a function of its runtime library, which numba does not link: the process would end.
"""

from __future__ import annotations

from .code import HALF, INT32, SHORT, Code, Value, has_halves, vector

MAGNITUDE, SIGN, INFINITY, QUIET_NAN = 0x7FFF, 0x8000, 0x7C00, 0x7E00  # of a float16
FLOAT_INFINITY = 0x7F800000
BIAS = 112  # the exponent bias of float32 minus that of float16
FRACTION = 13  # bits that a float32's fraction is longer
OVERFLOWS = 0x477FF000  # 65520, the least float32 that rounds to infinity
NORMAL = 0x38800000  # 2**-14, the least normal float16


def from_half(code: Code, bits: Value) -> Value:
    """The bits of float16 as float32."""
    builder, lanes = code.builder, bits.type.count
    if has_halves():
        return builder.fpext(builder.bitcast(bits, vector(lanes, HALF)), vector(lanes))

    def number(value: int) -> Value:
        return code.constant(value, lanes, INT32)

    words = builder.zext(bits, vector(lanes, INT32))
    magnitude = builder.and_(words, number(MAGNITUDE))
    shifted = builder.shl(magnitude, number(FRACTION))
    finite = builder.fmul(builder.bitcast(shifted, vector(lanes)), code.constant(2.0**BIAS, lanes))
    is_finite = builder.icmp_unsigned("<", magnitude, number(INFINITY))
    found = builder.select(
        is_finite, builder.bitcast(finite, vector(lanes, INT32)), builder.or_(shifted, number(FLOAT_INFINITY))
    )
    sign = builder.shl(builder.and_(words, number(SIGN)), number(16))
    return builder.bitcast(builder.or_(found, sign), vector(lanes))


def to_half(code: Code, row: Value) -> Value:
    """The bits of float32 rounded to float16, to nearest even."""
    builder, lanes = code.builder, row.type.count
    if has_halves():
        return builder.bitcast(builder.fptrunc(row, vector(lanes, HALF)), vector(lanes, SHORT))

    def number(value: int) -> Value:
        return code.constant(value, lanes, INT32)

    words = builder.bitcast(row, vector(lanes, INT32))
    magnitude = builder.and_(words, number(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, number(FRACTION)), number(1))
    rounded = builder.add(magnitude, builder.add(odd, number((1 << FRACTION - 1) - 1 - (BIAS << 23))))
    normal = builder.lshr(rounded, number(FRACTION))
    # The last bit of 0.5 as float32 is worth the least float16, so adding 0.5 rounds to a multiple of that.
    half = code.constant(0.5, lanes)
    beside = builder.bitcast(builder.fadd(builder.bitcast(magnitude, vector(lanes)), half), vector(lanes, INT32))
    small = builder.sub(beside, builder.bitcast(half, vector(lanes, INT32)))
    found = builder.select(builder.icmp_unsigned("<", magnitude, number(NORMAL)), small, normal)
    is_nan = builder.icmp_unsigned(">", magnitude, number(FLOAT_INFINITY))
    beyond = builder.select(is_nan, number(QUIET_NAN), number(INFINITY))
    found = builder.select(builder.icmp_unsigned(">=", magnitude, number(OVERFLOWS)), beyond, found)
    sign = builder.and_(builder.lshr(words, number(16)), number(SIGN))
    return builder.trunc(builder.or_(found, sign), vector(lanes, SHORT))
