"""Weighted sums of values: accumulators += weights times values, token after token in ascending order.

    accumulators   rows of float32, a stride apart
    weights        (groups, TILE, R)

Of int8 values, the weights of a step of VALUE_STEP tokens are pairs of int16 and a factor of each row (softmax.py). The
sums over the step's tokens are whole numbers, exact in any order: 16 products of at most 32767 * 128 fit int32.
"""

from __future__ import annotations

from .code import (
    CACHE_LINE,
    ELEMENT_BYTES,
    FLOAT,
    FLOAT_BYTES,
    INT32,
    INT64,
    LANES,
    STEP,
    TILE,
    VALUE_STEP,
    Code,
    Value,
    num_accumulators,
    vector,
)
from .step_order import RowAddresses, RowsToPrefetch, prefetch_turn
from .widen import CHUNK_DIMS, INTEGERS, PAIR, RowsToWiden, pair_chunk, widen_chunk


def widens_in_registers(kind: str, num_rows: int) -> bool:
    """Whether the accumulators of a chunk of values and `num_rows` query rows stay in registers."""
    return num_rows * chunk_width(kind) <= num_accumulators()


def chunk_width(kind: str) -> int:
    """Vectors of accumulators that a chunk of values is added to; rows of pairs are read by the vector."""
    return 1 if kind == "int16" else CHUNK_DIMS[kind] // LANES


def add_values(
    code: Code,
    kind: str,
    num_groups: int,
    group_rows: int,
    acc: Value,
    stride: Value,
    weights: Value,
    rows: RowAddresses,
    count: Value,
    num_vectors: Value,
    to_prefetch: RowsToPrefetch | None,
    to_widen: RowsToWiden | None,
) -> None:
    """Add the weighted values of the first `count` tokens, which are whole chunks of `kind`, for some groups.

    Between the arithmetic, prefetch as many rows of a later step, and widen all rows of the next one.
    """
    builder, num_rows, chunk = code.builder, num_groups * group_rows, chunk_width(kind)
    most = max(chunk, min(4, num_accumulators() // num_rows))
    targets = code.rows(acc, stride, num_rows)

    def of_group(row: int) -> int:
        """Bytes from a weight of the first row to that of another one."""
        return (row // group_rows * TILE * group_rows + row % group_rows) * FLOAT_BYTES

    def columns(first: Value, width: int) -> None:
        """Add to the vectors first .. first + width of all rows."""
        place = code.times(first, LANES * FLOAT_BYTES)
        begin = code.times(first, LANES * ELEMENT_BYTES[kind])
        at = [(builder.add(row, place), v * LANES * FLOAT_BYTES) for row in targets for v in range(width)]

        def step_of_pairs(i: Value, sums: list[Value]) -> list[Value]:
            """The pairs of STEP tokens."""
            if to_prefetch is not None:
                turn = builder.udiv(first, INT64(width))
                prefetch_turn(code, to_prefetch, code.times(i, STEP), STEP, turn, width * LANES)
            mine = rows.after(code, code.times(i, STEP if kind == "int8" else PAIR))
            weight = builder.add(weights, code.times(i, PAIR * group_rows * FLOAT_BYTES))
            for p in range(PAIR):
                if kind == "int8":
                    both = [builder.add(mine.at(code, t), begin) for t in (p, p + PAIR)]
                    dims = range(0, width * LANES, CHUNK_DIMS[kind])
                    value = [v for dim in dims for v in pair_chunk(code, *(code.plus(row, dim) for row in both))]
                else:
                    row = builder.add(mine.at(code, p), place)
                    value = [code.load(row, vector(LANES, INT32), v * LANES * FLOAT_BYTES) for v in range(width)]
                for r in range(num_rows):
                    w = code.splat(code.load(weight, INT32, p * group_rows * FLOAT_BYTES + of_group(r)), LANES)
                    those = slice(r * width, (r + 1) * width)
                    sums[those] = [code.add_products(v, w, x) for v, x in zip(value, sums[those], strict=True)]
            return sums

        def token(t: Value, sums: list[Value]) -> list[Value]:
            if to_prefetch is not None:
                later = builder.add(
                    to_prefetch.rows.after(code, t).at(code, 0), code.times(first, LANES * to_prefetch.item)
                )
                for line in range(0, width * LANES * to_prefetch.item, CACHE_LINE):
                    code.prefetch(later, line)
            if to_widen is not None:
                to_widen.widen_column(code, t, first, width)
            row = builder.add(rows.after(code, t).at(code, 0), begin)
            parts = range(0, width * LANES * ELEMENT_BYTES[kind], CHUNK_DIMS[kind] * ELEMENT_BYTES[kind])
            value = [v for part in parts for v in widen_chunk(code, kind, code.plus(row, part))]
            weight = builder.add(weights, code.times(t, group_rows * FLOAT_BYTES))
            for r in range(num_rows):
                w = code.splat(code.load(weight, FLOAT, of_group(r)), LANES)
                those = slice(r * width, (r + 1) * width)
                sums[those] = [code.fma(w, v, x) for v, x in zip(value, sums[those], strict=True)]
            return sums

        if kind in INTEGERS:
            zeros = [code.constant(0, LANES, INT32)] * len(at)
            for i, whole in enumerate(code.loop(INT64(VALUE_STEP // STEP), zeros, step_of_pairs)):
                factor = code.load(weights, FLOAT, VALUE_STEP // 2 * group_rows * FLOAT_BYTES + of_group(i // width))
                number, (row, v) = builder.sitofp(whole, vector(LANES)), at[i]
                code.store(code.fma(code.splat(factor, LANES), number, code.load(row, vector(LANES), v)), row, v)
            return
        before = [code.load(row, vector(LANES), v) for row, v in at]
        for (row, v), after in zip(at, code.loop(count, before, token), strict=True):
            code.store(after, row, v)

    def all_columns(done: Value, width: int) -> None:
        """Add to the vectors from `done` on, `width` at a time, and the rest fewer at a time."""
        turns = builder.sdiv(builder.sub(num_vectors, done), INT64(width))
        code.repeatedly(turns, lambda i: columns(builder.add(done, code.times(i, width)), width))
        if width > chunk:
            all_columns(builder.add(done, code.times(turns, width)), width // 2)

    if to_widen is not None:  # rows that no token of this step comes with
        to_widen.widen_rows(code, count, num_vectors)
    all_columns(INT64(0), most)
