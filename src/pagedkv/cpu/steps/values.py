"""Sums of values: accumulators += weights times the values of some tokens, token after token in ascending order.

accumulators   rows of float32, a stride apart
weights        (groups, TILE, R)
"""

from __future__ import annotations

from typing import Any

from .code import FLOAT, INT64, Code, Value, step, vector
from .machine import num_accumulators
from .shapes import CACHE_LINE, FLOAT_BYTES, INT_BYTES, LANES, STEP, TILE


def make_values(num_groups: int, group_rows: int, item: int) -> Any:
    """The step ``values(acc, stride, weights, rows, offset, count, num_vectors, ahead)`` of the first `count` tokens.

    The addresses of values lie at `rows`; a value is num_vectors * LANES float32 from there plus an offset. If `ahead`
    is not 0, STEP values of `item` bytes for a dim are prefetched from there on between the arithmetic.
    """
    most = max(1, min(4, num_accumulators() // (num_groups * group_rows)))

    def emit(
        code: Code,
        acc: Value,
        stride: Value,
        weights: Value,
        rows: Value,
        offset: Value,
        count: Value,
        num_vectors: Value,
        ahead: Value,
    ) -> None:
        builder = code.builder
        targets = code.rows(acc, stride, num_groups * group_rows)

        def columns(first: Value, width: int, prefetches: bool) -> None:
            """The vectors first .. first + width of all rows."""
            asked = width * LANES * item  # for a token
            place = code.times(first, LANES * FLOAT_BYTES)
            of_row = builder.add(offset, place)

            def token(t: Value, sums: list[Value]) -> list[Value]:
                if prefetches:
                    at = builder.add(code.times(first, STEP * LANES * item), code.times(t, asked))
                    for line in range(0, asked, CACHE_LINE):
                        code.prefetch(builder.add(ahead, at), line)
                row = builder.add(code.load(builder.add(rows, code.times(t, INT_BYTES)), INT64), of_row)
                value = [code.load(row, vector(LANES), v * LANES * FLOAT_BYTES) for v in range(width)]
                weight = builder.add(weights, code.times(t, group_rows * FLOAT_BYTES))
                for r in range(num_groups * group_rows):
                    of_group = r // group_rows * TILE * group_rows + r % group_rows
                    w = code.splat(code.load(weight, FLOAT, of_group * FLOAT_BYTES), LANES)
                    those = slice(r * width, (r + 1) * width)
                    sums[those] = [code.fma(w, v, x) for v, x in zip(value, sums[those], strict=True)]
                return sums

            at = [(builder.add(row, place), v * LANES * FLOAT_BYTES) for row in targets for v in range(width)]
            before = [code.load(row, vector(LANES), v) for row, v in at]
            for (row, v), after in zip(at, code.loop(count, before, token), strict=True):
                code.store(after, row, v)

        def whole(prefetches: bool) -> None:
            turns = builder.sdiv(num_vectors, INT64(most))
            code.repeatedly(turns, lambda i: columns(code.times(i, most), most, prefetches))
            if most > 1:
                done = code.times(turns, most)
                left = builder.sub(num_vectors, done)
                code.repeatedly(left, lambda i: columns(builder.add(done, i), 1, prefetches))

        code.prefetching(ahead, whole)

    return step(emit)
