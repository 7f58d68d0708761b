"""Scores: the dot products of query rows with the keys of a step.

Query rows come in groups of R (1 or 4). A vector has four dims of all four rows of a group, and a key's four dims are
repeated for each row; or it has eight dims of the only row. No sum ever runs along a vector: a dot product is eight
sums s0 .. s7, each over every eighth place of the rows in ascending order, added as
((s0 + s4) + (s1 + s5)) + ((s2 + s6) + (s3 + s7)), whatever R and the machine are.

    queries   (groups, places / 4, R, 4)
    scores    (groups, TILE, R)
"""

from __future__ import annotations

from typing import Any

from .code import INT64, Code, Value, step, vector
from .machine import num_accumulators
from .shapes import CACHE_LINE, FLOAT_BYTES, INT_BYTES, LANES, STEP, TILE

PARTS = 8  # sums of a dot product


def _places(group_rows: int) -> int:
    """Of a row, in a vector."""
    return 4 if group_rows > 1 else PARTS


def keys_at_once(num_groups: int, group_rows: int) -> int:
    """Keys of a step whose sums with some groups stay in registers."""
    return min(STEP, num_accumulators() * LANES // (PARTS * group_rows * num_groups))


def make_dots(num_groups: int, group_rows: int, item: int) -> Any:
    """The step ``dots(scores, queries, rows, offset, num_vectors, ahead)`` of some groups and the STEP keys of a step.

    The addresses of keys lie at `rows`; a key is num_vectors * LANES float32 from there plus an offset. If `ahead` is
    not 0, as many keys of `item` bytes for a dim are prefetched from there on between the arithmetic, one line at a
    time in address order, which keeps the memory busy and never fills the processor's miss buffers.
    """
    places, at_once = _places(group_rows), keys_at_once(num_groups, group_rows)
    lanes, chains = places * group_rows, PARTS // places

    def emit(
        code: Code, scores: Value, queries: Value, rows: Value, offset: Value, num_vectors: Value, ahead: Value
    ) -> None:
        builder = code.builder
        groups = code.rows(queries, code.times(num_vectors, LANES * group_rows * FLOAT_BYTES), num_groups)

        def some(first: int, prefetches: bool) -> None:
            at = [INT_BYTES * (first + t) for t in range(at_once)]
            keys = [builder.add(code.load(rows, INT64, place), offset) for place in at]

            def turn(i: Value, sums: list[Value]) -> list[Value]:
                if prefetches:
                    asked = builder.add(ahead, code.times(i, STEP * LANES * item))
                    for line in range(first * LANES * item, (first + at_once) * LANES * item, CACHE_LINE):
                        code.prefetch(asked, line)
                of_key = code.times(i, LANES * FLOAT_BYTES)
                of_queries = [builder.add(q, code.times(of_key, group_rows)) for q in groups]
                for n in range(LANES // places):
                    q = [code.load(x, vector(lanes), n * lanes * FLOAT_BYTES) for x in of_queries]
                    for t, key in enumerate(keys):
                        k = code.load(builder.add(key, of_key), vector(places), n * places * FLOAT_BYTES)
                        repeated = code.repeat(k, lanes)
                        for g in range(num_groups):
                            chain = (g * at_once + t) * chains + n % chains
                            sums[chain] = code.fma(q[g], repeated, sums[chain])
                return sums

            zeros = [code.constant(0.0, lanes)] * (num_groups * at_once * chains)
            sums = code.loop(num_vectors, zeros, turn)
            for g in range(num_groups):
                mine = sums[g * at_once * chains : (g + 1) * at_once * chains]
                code.store(
                    _totals(code, mine, chains, group_rows), scores, FLOAT_BYTES * group_rows * (g * TILE + first)
                )

        def whole(prefetches: bool) -> None:
            for first in range(0, STEP, at_once):
                some(first, prefetches)

        code.prefetching(ahead, whole)

    return step(emit)


def _totals(code: Code, sums: list[Value], chains: int, group_rows: int) -> Value:
    """The dot products of all keys and rows of a group, as one vector."""
    add = code.builder.fadd
    fours = (
        [add(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        if chains > 1
        else [code.halve(x, add, PARTS // 2) for x in sums]
    )
    together = code.joined(fours)
    for _ in range(2):
        lanes = together.type.count
        together = add(code.shuffle(together, range(0, lanes, 2)), code.shuffle(together, range(1, lanes, 2)))
    assert together.type.count == group_rows * len(fours)
    return together


def make_pack() -> Any:
    """The step ``pack(target, group_rows, query, num_vectors)``: a row into its place in its group."""

    def emit(code: Code, target: Value, group_rows: Value, query: Value, num_vectors: Value) -> None:
        quarter = 4 * FLOAT_BYTES

        def turn(i: Value) -> None:
            part = code.load(code.builder.add(query, code.times(i, quarter)), vector(4))
            code.store(part, code.builder.add(target, code.builder.mul(code.times(i, quarter), group_rows)))

        code.repeatedly(code.times(num_vectors, LANES // 4), turn)

    return step(emit)
