"""Scores: the dot products of query rows with the keys of a step.

Query rows come in groups of R (1 or 4). A vector has four dims of all four rows of a group, and a key's four dims are
repeated for each row; or it has eight dims of the only row. No sum ever runs along a vector: a dot product is eight
sums s0 .. s7, each over every eighth place of the rows in ascending order, added as
((s0 + s4) + (s1 + s5)) + ((s2 + s6) + (s3 + s7)), whatever R and the machine are.

    queries   (groups, places / 4, R, 4)
    scores    (groups, TILE, R)

Queries and keys of int16 (`widen`) are read as int32 that hold two dims each, and so are their places. Their sums are
whole numbers, exact in any order: 512 products of at most 32767 * 128 fit int32. A score is then the float32 of the
sum, times the product of its row's factor and its key's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from .code import (
    ELEMENT_BYTES,
    FLOAT,
    FLOAT_BYTES,
    INT32,
    INT64,
    LANES,
    STEP,
    TILE,
    Code,
    Value,
    num_accumulators,
    vector,
)
from .step_order import RowAddresses, RowsToPrefetch, prefetch_turn
from .widen import CHUNK_DIMS, INTEGERS, UNIT, RowsToWiden, chunk_vectors, repeated_int8, widen_chunk

PARTS = 8  # sums of a dot product


class ScoreFactors(NamedTuple):
    """What sums of whole numbers are multiplied by."""

    keys: Value  # the address of the factors of a step's keys
    rows: Value  # the address of those of the query rows


def parts_of(kind: str, group_rows: int) -> int:
    """The sums of a dot product: as many as fill a vector if they are whole numbers, whose order is free."""
    return LANES // group_rows if kind in INTEGERS else PARTS


def passes_of(kind: str, num_groups: int) -> int:
    """How often a step reads its keys: with many groups, once for each half of a dot product's sums.

    Then the sums of more groups stay in registers, and each load serves more multiply-adds.
    """
    return 2 if num_groups > 2 and kind not in INTEGERS else 1


def keys_at_once(kind: str, num_groups: int, group_rows: int) -> int:
    """Keys of a step whose sums with some groups stay in registers."""
    parts = parts_of(kind, group_rows) // passes_of(kind, num_groups)
    return min(STEP, num_accumulators() * LANES // (parts * group_rows * num_groups))


def dot_products(
    code: Code,
    kind: str,
    num_groups: int,
    group_rows: int,
    num_keys: int,
    scores: Value,
    queries: Value,
    query_stride: Value,
    keys: RowAddresses,
    num_vectors: Value,
    factors: ScoreFactors | None,
    to_prefetch: RowsToPrefetch | None,
    to_widen: RowsToWiden | None,
) -> None:
    """Store the scores of some groups with the keys of a step, which are whole chunks of `kind`.

    Keys are widened in registers. Between the arithmetic, prefetch the rows of a later step, a few lines at a time,
    since all of them at once would fill the processor's miss buffers, and widen the rows of the next one.
    """
    builder, parts_of_row = code.builder, parts_of(kind, group_rows)
    places, at_once = 4 if group_rows > 1 else parts_of_row, keys_at_once(kind, num_groups, group_rows)
    lanes, chains, chunk = places * group_rows, parts_of_row // places, chunk_vectors(kind) * LANES
    together = chains // passes_of(kind, num_groups)
    element, zero, multiply_add = (INT32, 0, code.add_products) if factors else (FLOAT, 0.0, code.fma)
    groups = code.rows(queries, query_stride, num_groups)

    def parts(address: Value) -> list[Value]:
        """A chunk of a key, as vectors of `places`, which may be repeated for each row already."""
        if kind == "int8" and group_rows > 1:
            # Bytes are repeated by the load, so that widening is all there is to do in registers.
            return [
                repeated_int8(code, code.plus(address, dim), group_rows) for dim in range(0, CHUNK_DIMS[kind], UNIT)
            ]
        if kind in ("float32", "int16"):
            return [code.load(address, vector(places, element), n * FLOAT_BYTES) for n in range(0, chunk, places)]
        widened = widen_chunk(code, kind, address)
        return [code.shuffle(x, range(n, n + places)) for x in widened for n in range(0, LANES, places)]

    def some_keys(block: Value) -> None:
        first = code.times(block, at_once)
        rows = keys.after(code, first)
        addresses = [rows.at(code, t) for t in range(at_once)]

        def turn(chain: int, i: Value, sums: list[Value]) -> list[Value]:
            """Add the products of a chunk that belong to the chains from `chain` on."""
            if to_prefetch is not None:
                prefetch_turn(code, to_prefetch, first, at_once, i, CHUNK_DIMS[kind])
            if to_widen is not None and chain == 0:
                to_widen.widen(code, first, at_once, i)
            of_key = code.times(i, CHUNK_DIMS[kind] * ELEMENT_BYTES[kind])
            at = [builder.add(q, code.times(i, chunk * group_rows * FLOAT_BYTES)) for q in groups]
            own = [n for n in range(chunk // places) if chain <= n % chains < chain + together]
            q = {n: [code.load(x, vector(lanes, element), n * lanes * FLOAT_BYTES) for x in at] for n in own}
            for t, address in enumerate(addresses):
                found = parts(builder.add(address, of_key))
                for n in own:
                    repeated = code.repeat(found[n], lanes)
                    for g in range(num_groups):
                        mine = (g * at_once + t) * together + n % together
                        sums[mine] = multiply_add(q[n][g], repeated, sums[mine])
            return sums

        turns = builder.sdiv(num_vectors, INT64(chunk_vectors(kind)))
        zeros = [code.constant(zero, lanes, element)] * (num_groups * at_once * together)
        passes = [code.loop(turns, zeros, partial(turn, chain)) for chain in range(0, chains, together)]
        sums = [x for of_sum in zip(*passes, strict=True) for x in of_sum]
        for g in range(num_groups):
            of_group = sums[g * at_once * chains : (g + 1) * at_once * chains]
            if factors is None:
                totals = _totals(code, of_group, chains, group_rows)
            else:
                of_keys = builder.add(factors.keys, code.times(first, FLOAT_BYTES))
                of_rows = code.plus(factors.rows, g * group_rows * FLOAT_BYTES)
                totals = _scaled_totals(code, of_group, ScoreFactors(of_keys, of_rows), group_rows)
            place = builder.add(scores, code.times(first, group_rows * FLOAT_BYTES))
            code.store(totals, place, g * TILE * group_rows * FLOAT_BYTES)

    code.repeatedly(INT64(num_keys // at_once), some_keys)


def _totals(code: Code, sums: list[Value], chains: int, group_rows: int) -> Value:
    """The dot products of all keys and rows of a group, as one vector."""
    add = code.builder.fadd
    fours = (
        [add(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        if chains > 1
        else [code.halve(x, add, PARTS // 2) for x in sums]
    )
    return _add_neighbours(code, add, code.joined(fours), group_rows * len(fours))


def _scaled_totals(code: Code, sums: list[Value], factors: ScoreFactors, group_rows: int) -> Value:
    """The dot products of all keys and rows of a group from sums of whole numbers, as one vector."""
    builder, keys = code.builder, len(sums)
    totals = _add_neighbours(code, builder.add, code.joined(sums), group_rows * keys)
    of_rows = code.repeat(code.load(factors.rows, vector(group_rows)), group_rows * keys)
    of_keys = code.load(factors.keys, vector(keys))
    spread = code.shuffle(of_keys, [t for t in range(keys) for _ in range(group_rows)])
    return builder.fmul(builder.sitofp(totals, of_rows.type), builder.fmul(of_rows, spread))


def _add_neighbours(code: Code, add: Callable[[Value, Value], Value], x: Value, count: int) -> Value:
    """Add neighbours in x until `count` lanes are left."""
    while (lanes := x.type.count) > count:
        x = add(code.shuffle(x, range(0, lanes, 2)), code.shuffle(x, range(1, lanes, 2)))
    return x
