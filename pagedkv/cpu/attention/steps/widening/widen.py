"""Widening rows of a cache to float32, in the order of `order`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..code import BYTE, ELEMENT_BYTES, FLOAT, INT32, INT64, SHORT, Code, Value, step, vector
from ..machine import has_byte_permutes
from ..rows import Rows
from ..shapes import FLOAT_BYTES, LANES, STEP
from .halves import from_half
from .order import CHUNK_DIMS, UNIT, unit_order

FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
UPPER_HALF = -(2**16)


def make_widen(kind: str) -> Any:
    """The step ``widen(target, target_stride, rows, offset, head_dim)``: `widen_rows`."""

    def emit(code: Code, target: Value, stride: Value, rows: Value, offset: Value, head_dim: Value) -> None:
        widen_rows(code, kind, target, stride, Rows(rows, offset), head_dim)

    return step(emit)


def widen_rows(code: Code, kind: str, target: Value, stride: Value, rows: Rows, head_dim: Value) -> None:
    """STEP rows of `kind` as float32 rows a stride apart."""
    builder, dims, item = code.builder, CHUNK_DIMS[kind], ELEMENT_BYTES[kind]
    chunks = builder.sdiv(head_dim, INT64(dims))
    pairs = [(rows.at(code, t), to) for t, to in enumerate(code.rows(target, stride, STEP))]

    def chunk(n: Value) -> None:
        begin, place = code.times(n, item * dims), code.times(n, FLOAT_BYTES * dims)
        for row, to in pairs:
            for v, widened in enumerate(widen_chunk(code, kind, builder.add(row, begin))):
                code.store(widened, builder.add(to, place), FLOAT_BYTES * LANES * v)

    def unit(n: Value) -> None:
        dim = builder.add(code.times(chunks, dims), code.times(n, UNIT))
        for row, to in pairs:
            widened = widen_unit(code, kind, builder.add(row, code.times(dim, item)))
            code.store(widened, builder.add(to, code.times(dim, FLOAT_BYTES)))

    code.repeatedly(chunks, chunk)
    code.repeatedly(builder.sdiv(builder.sub(head_dim, code.times(chunks, dims)), INT64(UNIT)), unit)


def make_widen_piece(kind: str) -> Any:
    """The step ``widen_piece(target, apart, address)``: 16 bytes of a row, as vectors `apart` bytes apart."""

    def emit(code: Code, target: Value, apart: Value, address: Value) -> None:
        item = ELEMENT_BYTES[kind]
        if item == 1:
            raw = code.load(address, vector(16, BYTE))
            dims = [half + i for half in (0, UNIT) for i in unit_order(kind)]
            widened = [WIDEN[kind](code, code.shuffle(raw, dims[i : i + 4])) for i in range(0, 16, 4)]
        elif kind == "bfloat16":
            widened = _from_words(code, code.load(address, vector(4, INT32)))
        else:
            widened = [WIDEN[kind](code, code.load(address, vector(16 // item, FLOAT if item == 4 else SHORT)))]
        for to, v in zip(code.rows(target, apart, len(widened)), widened, strict=True):
            code.store(v, to)

    return step(emit)


def widen_chunk(code: Code, kind: str, address: Value) -> list[Value]:
    """A chunk as vectors of LANES."""
    if kind == "float32":
        return [code.load(address, vector(LANES))]
    if kind == "float16":
        return [from_half(code, code.load(address, vector(LANES, SHORT)))]
    if kind == "bfloat16":
        return _from_words(code, code.load(address, vector(LANES, INT32)))
    raw = code.load(address, vector(4 * LANES, BYTE))
    return _by_tables(code, kind, raw) if has_byte_permutes() else _by_pairs(code, kind, raw)


def widen_unit(code: Code, kind: str, address: Value) -> Value:
    """A unit as a vector of UNIT."""
    element = {4: FLOAT, 2: SHORT, 1: BYTE}[ELEMENT_BYTES[kind]]
    raw = code.shuffle(code.load(address, vector(UNIT, element)), unit_order(kind))
    return WIDEN[kind](code, raw)


def _from_bfloat16(code: Code, bits: Value) -> Value:
    lanes = bits.type.count
    words = code.builder.zext(bits, vector(lanes, INT32))
    return code.builder.bitcast(code.builder.shl(words, code.constant(16, lanes, INT32)), vector(lanes))


def _from_words(code: Code, words: Value) -> list[Value]:
    """The lower and the upper halves of words as bfloat16."""
    builder, lanes = code.builder, words.type.count
    lower = builder.shl(words, code.constant(16, lanes, INT32))
    upper = builder.and_(words, code.constant(UPPER_HALF, lanes, INT32))
    return [builder.bitcast(half, vector(lanes)) for half in (lower, upper)]


def _from_bytes(kind: str, code: Code, raw: Value) -> Value:
    lanes = raw.type.count
    upper = code.builder.shl(code.builder.zext(raw, vector(lanes, SHORT)), code.constant(8, lanes, SHORT))
    return _from_upper_bytes(kind, code, upper)


def _from_upper_bytes(kind: str, code: Code, upper: Value) -> Value:
    """Codes of fp8 that are the upper bytes of 16-bit words: of e5m2, these are float16."""
    if kind == "fp8_e5m2":
        return from_half(code, upper)
    # A float16 with the exponent and mantissa of a code of e4m3 is 2**-8 times its value, subnormals included. A shift
    # to the right moves sign and magnitude into place; the mask clears the extra copy of the sign.
    builder, lanes = code.builder, upper.type.count
    nan = code.constant(0x7F00, lanes, SHORT)
    is_nan = builder.icmp_unsigned("==", builder.and_(upper, nan), nan)
    shifted = builder.ashr(upper, code.constant(1, lanes, SHORT))
    bits = builder.and_(shifted, code.constant(0xBFFF, lanes, SHORT))
    bits = builder.select(is_nan, code.constant(0x7E00, lanes, SHORT), bits)
    return builder.fmul(from_half(code, bits), code.constant(256.0, lanes))


def _by_pairs(code: Code, kind: str, raw: Value) -> list[Value]:
    """A chunk of fp8, the even and the odd codes of its words apart."""
    builder = code.builder
    words = builder.bitcast(raw, vector(2 * LANES, SHORT))
    even = builder.shl(words, code.constant(8, 2 * LANES, SHORT))
    odd = builder.and_(words, code.constant(-256, 2 * LANES, SHORT))
    halves = []
    for first in (0, 4):  # words of each 16 bytes
        lanes = [quarter * 8 + first + i for quarter in range(4) for i in range(4)]
        halves += [_from_upper_bytes(kind, code, code.shuffle(codes, lanes)) for codes in (even, odd)]
    return halves


def _by_tables(code: Code, kind: str, raw: Value) -> list[Value]:
    """A chunk of fp8, both bytes of its bfloat16 by a table of 128; the sign is that of the code."""
    builder = code.builder
    exact = np.arange(128, dtype=np.uint8).view(FP8[kind]).astype(ml_dtypes.bfloat16).view(np.uint16)
    lower, upper = (_lookup(code, raw, part.astype(np.uint8)) for part in (exact & 0xFF, exact >> 8))
    upper = builder.or_(upper, builder.and_(raw, code.constant(-128, 64, BYTE)))
    halves = []
    for first in (0, 8):  # what `unpack` does within each 16 bytes
        lanes = [quarter * 16 + first + i + 64 * which for quarter in range(4) for i in range(8) for which in (0, 1)]
        words = builder.bitcast(code.shuffle(lower, lanes, upper), vector(LANES, INT32))
        halves += _from_words(code, words)
    return halves


def _lookup(code: Code, indices: Value, table: Any) -> Value:
    first, second = (ir.Constant(indices.type, [int(x) for x in part]) for part in (table[:64], table[64:]))
    return code.call("llvm.x86.avx512.vpermi2var.qi.512", indices.type, [first, indices, second])


WIDEN: dict[str, Callable[[Code, Value], Value]] = {
    "float32": lambda _, raw: raw,
    "float16": from_half,
    "bfloat16": _from_bfloat16,
    **{kind: partial(_from_bytes, kind) for kind in FP8},
}


def make_load(kind: str) -> Any:
    """The function ``load(address)``: one element as a float32."""
    element = {4: FLOAT, 2: SHORT, 1: BYTE}[ELEMENT_BYTES[kind]]

    @intrinsic
    def load(typing: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = Code(builder)
            return code.lane(WIDEN[kind](code, code.load(arguments[0], vector(1, element))), 0)

        return types.float32(types.int64), codegen

    return load
