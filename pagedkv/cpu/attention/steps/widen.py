"""Widening rows of a cache, and the order in which their dims lie then: the one that costs least.

Rows of int8 become int16, those of all other formats float32. A row of int16 keeps the order of its dims, and is read
as int32, each with two neighbouring dims; of values, each int32 has the same dim of two tokens (`widen_pairs`).

Rows are widened in chunks of 64 bytes, 32 of int8. Where the two 16-bit halves of words become two vectors, these hold
even and odd dims. Queries and accumulators have the same order, so sums over dims do, too: it depends on the cache's
dtype and head_dim alone, never on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ....layouts import FORMATS
from .code import (
    BYTE,
    ELEMENT_BYTES,
    FLOAT,
    FLOAT_BYTES,
    INT32,
    INT64,
    LANES,
    SHORT,
    STEP,
    Code,
    Value,
    has_byte_permutes,
    step,
    vector,
)
from .halves import from_half
from .step_order import RowAddresses

UNIT = 8  # dims; whole chunks leave a few units of a row
CHUNK_DIMS = {"float32": 16, "float16": 16, "bfloat16": 32, "fp8_e4m3": 64, "fp8_e5m2": 64, "int8": 32, "int16": 32}
EVEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7)
PAIR = 4  # the two tokens of a pair are so far apart, both in one step


INTEGERS = ("int8", "int16")


def widened_kind(kind: str) -> str:
    """What rows of `kind` are widened to."""
    return "int16" if kind == "int8" else "float32"


def wide_bytes(kind: str) -> int:
    """Bytes of a dim of a widened row."""
    return 2 if kind in INTEGERS else FLOAT_BYTES


def chunk_vectors(kind: str) -> int:
    """Vectors of LANES numbers of 4 bytes in a widened chunk; a power of two."""
    return CHUNK_DIMS[kind] * wide_bytes(kind) // (LANES * FLOAT_BYTES)


def chunk_order(kind: str) -> tuple[int, ...]:
    """The dims of a chunk as they lie after widening, in vectors of LANES; of int8, those of pairs of values."""
    if kind == "bfloat16":
        return (*range(0, 32, 2), *range(1, 32, 2))
    if kind == "int8":  # what interleaving does within each 16 bytes
        return tuple(quarter + half + i for half in (0, 4) for quarter in range(0, 32, 8) for i in range(4))
    if ELEMENT_BYTES[kind] == 1:  # each 16 bytes are unpacked into two times 8, and each 8 into even and odd ones
        return tuple(
            16 * quarter + half + i
            for half in (0, 8)
            for parity in (0, 1)
            for quarter in range(4)
            for i in range(parity, 8, 2)
        )
    return tuple(range(LANES))


def unit_order(kind: str) -> tuple[int, ...]:
    """The dims of a unit as they lie after widening."""
    return tuple(range(UNIT)) if kind in ("float32", "float16", "int8") else EVEN_ODD


def is_shuffled(kind: str) -> bool:
    """Whether the dims of widened rows are in another order than those of the cache."""
    return unit_order(kind) == EVEN_ODD


@lru_cache(maxsize=64)
def dim_order(kind: str, head_dim: int) -> npt.NDArray[np.int64]:
    """The dim at each place of a widened row, (head_dim,)."""
    dims, chunk, unit = CHUNK_DIMS[kind], np.array(chunk_order(kind)), np.array(unit_order(kind))
    whole = head_dim // dims * dims
    parts = [first + chunk for first in range(0, whole, dims)]
    parts += [first + unit for first in range(whole, head_dim, UNIT)]
    return _frozen(np.concatenate(parts))


@lru_cache(maxsize=64)
def dim_places(kind: str, head_dim: int) -> npt.NDArray[np.int64]:
    """The place of each dim in a widened row, (head_dim,)."""
    return _frozen(np.argsort(dim_order(kind, head_dim)))


def _frozen(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    array.flags.writeable = False
    return array


UPPER_HALF = -(2**16)


def make_widen(kind: str) -> Any:
    """The step ``widen(target, target_stride, rows, offset, head_dim)``, see `widen_rows`."""

    def emit(code: Code, target: Value, stride: Value, rows: Value, offset: Value, head_dim: Value) -> None:
        widen_rows(code, kind, STEP, target, stride, RowAddresses(rows, offset), head_dim)

    return step(emit)


def widen_rows(
    code: Code, kind: str, count: int, target: Value, stride: Value, rows: RowAddresses, head_dim: Value
) -> None:
    """Widen `count` rows of `kind` to rows that begin a stride apart."""
    builder, dims, item, wide = code.builder, CHUNK_DIMS[kind], ELEMENT_BYTES[kind], wide_bytes(kind)
    chunks = builder.sdiv(head_dim, INT64(dims))
    pairs = [(rows.at(code, t), to) for t, to in enumerate(code.rows(target, stride, count))]

    def chunk(n: Value) -> None:
        begin, place = code.times(n, item * dims), code.times(n, wide * dims)
        for row, to in pairs:
            for v, widened in enumerate(widen_chunk(code, kind, builder.add(row, begin))):
                code.store(widened, builder.add(to, place), FLOAT_BYTES * LANES * v)

    def unit(n: Value) -> None:
        dim = builder.add(code.times(chunks, dims), code.times(n, UNIT))
        for row, to in pairs:
            widened = widen_unit(code, kind, builder.add(row, code.times(dim, item)))
            code.store(widened, builder.add(to, code.times(dim, wide)))

    code.repeatedly(chunks, chunk)
    code.repeatedly(builder.sdiv(builder.sub(head_dim, code.times(chunks, dims)), INT64(UNIT)), unit)


def make_widen_pairs() -> Any:
    """The step ``widen_pairs(target, target_stride, rows, offset, head_dim)`` of STEP rows, see `widen_pairs`."""

    def emit(code: Code, target: Value, stride: Value, rows: Value, offset: Value, head_dim: Value) -> None:
        widen_pairs(code, STEP, target, stride, RowAddresses(rows, offset), head_dim)

    return step(emit)


def widen_pairs(code: Code, count: int, target: Value, stride: Value, rows: RowAddresses, head_dim: Value) -> None:
    """Widen `count` rows of int8, whole steps, to half as many rows of pairs, which begin a stride apart."""
    builder, dims = code.builder, CHUNK_DIMS["int8"]
    chunks = builder.sdiv(head_dim, INT64(dims))
    first_ones = [t for t in range(count) if t % STEP < PAIR]
    targets = zip(first_ones, code.rows(target, stride, len(first_ones)), strict=True)
    pairs = [(rows.at(code, t), rows.at(code, t + PAIR), to) for t, to in targets]

    def chunk(n: Value) -> None:
        begin, place = code.times(n, dims), code.times(n, FLOAT_BYTES * dims)
        for first, second, to in pairs:
            for v, pair in enumerate(pair_chunk(code, builder.add(first, begin), builder.add(second, begin))):
                code.store(pair, builder.add(to, place), FLOAT_BYTES * LANES * v)

    def unit(n: Value) -> None:
        dim = builder.add(code.times(chunks, dims), code.times(n, UNIT))
        for first, second, to in pairs:
            units = [_to_shorts(code, code.load(builder.add(row, dim), vector(UNIT, BYTE))) for row in (first, second)]
            pair = code.shuffle(units[0], [i + UNIT * which for i in range(UNIT) for which in (0, 1)], units[1])
            code.store(builder.bitcast(pair, vector(UNIT, INT32)), builder.add(to, code.times(dim, FLOAT_BYTES)))

    code.repeatedly(chunks, chunk)
    code.repeatedly(builder.sdiv(builder.sub(head_dim, code.times(chunks, dims)), INT64(UNIT)), unit)


def pair_chunk(code: Code, first: Value, second: Value) -> list[Value]:
    """The same chunk of two rows of int8 as pairs of int16, in the order of `chunk_order`."""
    dims = CHUNK_DIMS["int8"]
    rows = [_to_shorts(code, code.load(row, vector(dims, BYTE))) for row in (first, second)]
    order = [dim + dims * which for dim in chunk_order("int8") for which in (0, 1)]
    halves = [code.shuffle(rows[0], order[i : i + dims], rows[1]) for i in (0, dims)]
    return [code.builder.bitcast(half, vector(LANES, INT32)) for half in halves]


def make_widen_piece(kind: str) -> Any:
    """The step ``widen_piece(target, stride, address)``: 16 bytes of a row as vectors that begin a stride apart."""

    def emit(code: Code, target: Value, stride: Value, address: Value) -> None:
        item = ELEMENT_BYTES[kind]
        if kind == "int8":
            widened = [_from_int8(code, code.load(address, vector(16, BYTE)))]
        elif item == 1:
            raw = code.load(address, vector(16, BYTE))
            dims = [half + i for half in (0, UNIT) for i in unit_order(kind)]
            widened = [WIDEN[kind](code, code.shuffle(raw, dims[i : i + 4])) for i in range(0, 16, 4)]
        elif kind == "bfloat16":
            widened = _from_words(code, code.load(address, vector(4, INT32)))
        else:
            widened = [WIDEN[kind](code, code.load(address, vector(16 // item, FLOAT if item == 4 else SHORT)))]
        for to, v in zip(code.rows(target, stride, len(widened)), widened, strict=True):
            code.store(v, to)

    return step(emit)


def widen_chunk(code: Code, kind: str, address: Value) -> list[Value]:
    """A widened chunk, as vectors of LANES."""
    if kind == "int16":
        return [code.load(address, vector(LANES, INT32))]
    if kind == "int8":
        return [_from_int8(code, code.load(address, vector(CHUNK_DIMS[kind], BYTE)))]
    if kind == "float32":
        return [code.load(address, vector(LANES))]
    if kind == "float16":
        return [from_half(code, code.load(address, vector(LANES, SHORT)))]
    if kind == "bfloat16":
        return _from_words(code, code.load(address, vector(LANES, INT32)))
    raw = code.load(address, vector(4 * LANES, BYTE))
    return _widen_by_tables(code, kind, raw) if has_byte_permutes() else _widen_by_pairs(code, kind, raw)


def widen_unit(code: Code, kind: str, address: Value) -> Value:
    """A widened unit, as a vector of UNIT dims."""
    element = {4: FLOAT, 2: SHORT, 1: BYTE}[ELEMENT_BYTES[kind]]
    raw = code.shuffle(code.load(address, vector(UNIT, element)), unit_order(kind))
    return WIDEN[kind](code, raw)


def _to_shorts(code: Code, raw: Value) -> Value:
    return code.builder.sext(raw, vector(raw.type.count, SHORT))


def _from_int8(code: Code, raw: Value) -> Value:
    """Codes of int8 as int32 that hold two int16 each."""
    return code.builder.bitcast(_to_shorts(code, raw), vector(raw.type.count // 2, INT32))


def repeated_int8(code: Code, address: Value, times: int) -> Value:
    """A unit of int8 as int32 that hold two int16 each, several times."""
    return _from_int8(code, code.repeat(code.load(address, vector(UNIT, BYTE)), UNIT * times))


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
    """Widen codes of fp8 that are the upper bytes of 16-bit words; those words are float16 if the codes are e5m2."""
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


def _widen_by_pairs(code: Code, kind: str, raw: Value) -> list[Value]:
    """Widen a chunk of fp8: first the even codes of its words, then the odd ones."""
    builder = code.builder
    words = builder.bitcast(raw, vector(2 * LANES, SHORT))
    even = builder.shl(words, code.constant(8, 2 * LANES, SHORT))
    odd = builder.and_(words, code.constant(-256, 2 * LANES, SHORT))
    halves = []
    for first in (0, 4):  # words of each 16 bytes
        lanes = [quarter * 8 + first + i for quarter in range(4) for i in range(4)]
        halves += [_from_upper_bytes(kind, code, code.shuffle(codes, lanes)) for codes in (even, odd)]
    return halves


def _widen_by_tables(code: Code, kind: str, raw: Value) -> list[Value]:
    """Widen a chunk of fp8 by two tables, each of 128 bytes of bfloat16; the sign is that of the code."""
    builder = code.builder
    exact = np.arange(128, dtype=np.uint8).view(FORMATS[kind].element).astype(ml_dtypes.bfloat16).view(np.uint16)
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
    "fp8_e4m3": partial(_from_bytes, "fp8_e4m3"),
    "fp8_e5m2": partial(_from_bytes, "fp8_e5m2"),
    "int8": _from_int8,
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


class RowsToWiden(NamedTuple):
    """The rows of the next step, which are whole chunks of `kind`, and where their widened rows go."""

    kind: str
    rows: RowAddresses
    target: Value  # the address of the first widened row
    stride: Value  # from a widened row to the next one, in bytes
    wanted: Value  # a bit: there is a next step, whose rows are not widened yet

    def where(self, code: Code, condition: Value) -> RowsToWiden:
        """The same rows, wanted only if the condition holds."""
        return self._replace(wanted=code.builder.and_(self.wanted, condition))

    def widen(self, code: Code, first: Value, count: int, vector: Value) -> None:
        """Widen a vector of `count` rows from `first` on.

        Chunks are widened as a whole, so each vector of a chunk stands for a share of the rows, of at least one.
        """
        builder, wanted, vectors = code.builder, self.wanted, chunk_vectors(self.kind)
        chunk, turn = self._chunk(code, vector), builder.urem(vector, INT64(vectors))
        share = max(count // vectors, 1)
        if count < vectors:
            wanted = builder.and_(wanted, builder.icmp_signed("<", turn, INT64(count)))
        with builder.if_then(wanted):
            self._widen(code, builder.add(first, code.times(turn, share)), share, chunk)

    def widen_column(self, code: Code, row: Value, first: Value, width: int) -> None:
        """Widen `width` vectors from `first` on of a row, or the chunk that they are in if it is their turn."""
        builder, turns = code.builder, INT64(chunk_vectors(self.kind) // width)
        turn = builder.urem(builder.udiv(first, INT64(width)), turns)
        is_own = builder.icmp_signed("==", builder.urem(row, turns), turn)
        with builder.if_then(builder.and_(self.wanted, is_own)):
            self._widen(code, row, 1, self._chunk(code, first))

    def widen_rows(self, code: Code, first: Value, num_vectors: Value) -> None:
        """Widen the rows from `first` on."""
        builder, chunks = code.builder, self._chunk(code, num_vectors)
        with builder.if_then(self.wanted):
            code.repeatedly(
                builder.sub(INT64(STEP), first),
                lambda t: code.repeatedly(chunks, lambda chunk: self._widen(code, builder.add(first, t), 1, chunk)),
            )

    def _chunk(self, code: Code, vector: Value) -> Value:
        return code.builder.udiv(vector, INT64(chunk_vectors(self.kind)))

    def _widen(self, code: Code, first: Value, count: int, chunk: Value) -> None:
        """Widen a chunk of `count` rows from `first` on."""
        builder, dims, rows = code.builder, CHUNK_DIMS[self.kind], self.rows.after(code, first)
        begin, place = (
            code.times(chunk, dims * ELEMENT_BYTES[self.kind]),
            code.times(chunk, dims * wide_bytes(self.kind)),
        )
        target = builder.add(builder.add(self.target, builder.mul(first, self.stride)), place)
        for t, to in enumerate(code.rows(target, self.stride, count)):
            for v, widened in enumerate(widen_chunk(code, self.kind, builder.add(rows.at(code, t), begin))):
                code.store(widened, to, FLOAT_BYTES * LANES * v)
