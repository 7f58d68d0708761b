"""Weighted sums of values: accumulators += weights times values, token after token in ascending order.

accumulators   rows of float32, a stride apart
weights        (groups, TILE, R)
"""

from __future__ import annotations

from .code import (
    CACHE_LINE,
    ELEMENT_BYTES,
    FLOAT,
    FLOAT_BYTES,
    INT64,
    LANES,
    TILE,
    Code,
    Value,
    num_accumulators,
    vector,
)
from .step_order import RowAddresses, RowsToPrefetch
from .widen import CHUNK_DIMS, RowsToWiden, widen_chunk


def widens_in_registers(kind: str, num_rows: int) -> bool:
    """Whether the accumulators of a chunk of values and `num_rows` query rows stay in registers."""
    return num_rows * CHUNK_DIMS[kind] // LANES <= num_accumulators()


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
    builder, num_rows, chunk = code.builder, num_groups * group_rows, CHUNK_DIMS[kind] // LANES
    most = max(chunk, min(4, num_accumulators() // num_rows))
    targets = code.rows(acc, stride, num_rows)

    def columns(first: Value, width: int) -> None:
        """Add to the vectors first .. first + width of all rows."""
        place = code.times(first, LANES * FLOAT_BYTES)
        begin = code.times(first, LANES * ELEMENT_BYTES[kind])

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
                of_group = r // group_rows * TILE * group_rows + r % group_rows
                w = code.splat(code.load(weight, FLOAT, of_group * FLOAT_BYTES), LANES)
                those = slice(r * width, (r + 1) * width)
                sums[those] = [code.fma(w, v, x) for v, x in zip(value, sums[those], strict=True)]
            return sums

        at = [(builder.add(row, place), v * LANES * FLOAT_BYTES) for row in targets for v in range(width)]
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
