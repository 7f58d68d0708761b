"""Weights: the softmax of a tile's scores, online (Milakov and Gimelshein, 2018), and the states that it leaves.

    scores            (TILE, R) of a group of R rows, in place
    maximum, total    (R,) the largest logit and the sum of weights so far
    factor            (R,) by which the accumulators are to be multiplied

The sum of a tile's weights is 16 sums, each over every sixteenth token, added in a fixed tree: the first ones with
those four further, then in pairs.

Weights of int8 values are multiplied by the scales of their values, and leave whole numbers in place of the logits: of
each VALUE_STEP tokens, in the memory of their logits,

    pairs    int32 (VALUE_STEP / 2, R) of two int16: tokens t and t + PAIR, the first ones of each STEP in order
    factors  float32 (R,) that the whole numbers are multiplied by, from the largest product of the row

A state is what attention over some keys leaves: the largest logit, the sum of weights, and the sum of values times
their weights, both relative to the largest logit (flash-decoding, Dao et al., 2023). Decode and prefill merge the
state of each split into a running one, in token order.
"""

from __future__ import annotations

import math
from typing import Any

from .code import FLOAT, FLOAT_BYTES, INT32, INT64, LANES, TILE, VALUE_STEP, Code, Value, step, vector
from .widen import PAIR

NOTHING = -math.inf  # the largest of no logits


def make_softmax(group_rows: int, *, masked: bool, rounded: bool) -> Any:
    """The step ``softmax(scores, maximum, total, factor, starts, stops, first, value_scales)``.

    If `masked`, a row sees the tokens from its start to before its stop, int32 positions (R,); the tile's first token
    is at position `first`. A tile of which a row sees nothing leaves its state unchanged.

    If `rounded`, weights become whole numbers with the scales (TILE,) of the tile's values.
    """
    tokens = LANES // group_rows  # tokens of a vector

    def emit(
        code: Code,
        scores: Value,
        maximum: Value,
        total: Value,
        factor: Value,
        starts: Value,
        stops: Value,
        first: Value,
        value_scales: Value,
    ) -> None:
        builder, turns = code.builder, INT64(TILE // LANES)

        def seen(i: Value, n: int, x: Value, otherwise: float) -> Value:
            """Vector n of a turn, with another number in place of those of tokens that their rows do not see."""
            if not masked:
                return x
            token = builder.add(
                code.numbers([n * tokens + lane // group_rows for lane in range(LANES)]),
                code.splat(builder.trunc(builder.add(first, code.times(i, LANES)), INT32), LANES),
            )
            inside = builder.and_(builder.icmp_signed(">=", token, since), builder.icmp_signed("<", token, until))
            return builder.select(inside, x, code.constant(otherwise, LANES))

        since, until = (code.repeat(code.load(x, vector(group_rows, INT32)), LANES) for x in (starts, stops))

        def vectors(i: Value) -> list[Value]:
            """The addresses of the vectors of a turn, LANES tokens of all rows."""
            at = builder.add(scores, code.times(i, LANES * group_rows * FLOAT_BYTES))
            return [code.plus(at, n * LANES * FLOAT_BYTES) for n in range(group_rows)]

        def find(i: Value, largest: list[Value]) -> list[Value]:
            logits = [seen(i, n, code.load(at, vector(LANES)), NOTHING) for n, at in enumerate(vectors(i))]
            return [code.larger(x, y) for x, y in zip(logits, largest, strict=True)]

        largest = code.loop(turns, [code.constant(NOTHING, LANES)] * group_rows, find)
        while len(largest) > 1:
            largest = [code.larger(x, y) for x, y in zip(largest[::2], largest[1::2], strict=True)]
        before = code.load(maximum, vector(group_rows))
        after = code.larger(code.halve(largest[0], code.larger, group_rows), before)
        is_some = builder.fcmp_ordered(">", after, code.constant(NOTHING, group_rows))
        base = builder.select(is_some, after, code.constant(0.0, group_rows))
        base_of_all = code.repeat(base, LANES)

        def weigh(i: Value, sums: list[Value]) -> list[Value]:
            weights = []
            for n, at in enumerate(vectors(i)):
                weights.append(code.exp(builder.fsub(seen(i, n, code.load(at, vector(LANES)), NOTHING), base_of_all)))
                if not rounded:
                    code.store(weights[n], at)
                sums[n] = builder.fadd(sums[n], weights[n])
            if rounded:
                round_weights(i, weights)
            return sums

        def round_weights(i: Value, weights: list[Value]) -> None:
            scales = code.load(builder.add(value_scales, code.times(i, LANES * FLOAT_BYTES)), vector(LANES))
            products = []
            for n, weight in enumerate(weights):
                spread = code.shuffle(scales, [n * tokens + lane // group_rows for lane in range(LANES)])
                # Not by 0 where a row does not see the token: the scale may be NaN.
                products.append(seen(i, n, builder.fmul(weight, spread), 0.0))
            largest = code.magnitudes(products[0])
            for product in products[1:]:
                largest = code.greater(largest, code.magnitudes(product))
            to_short, from_short = code.shares(code.halve(largest, code.greater, group_rows))
            by = code.repeat(to_short, LANES)
            whole = [code.shorts(builder.fmul(product, by)) for product in products]
            joined, at = code.joined(whole), vectors(i)[0]
            # Of each 2 * PAIR tokens the first and the last ones.
            low, high = (
                [
                    token * group_rows + r
                    for token in range(LANES)
                    if token // PAIR % 2 == half
                    for r in range(group_rows)
                ]
                for half in (0, 1)
            )
            lower = builder.and_(code.shuffle(joined, low), code.constant(0xFFFF, len(low), INT32))
            upper = builder.shl(code.shuffle(joined, high), code.constant(16, len(high), INT32))
            code.store(builder.or_(lower, upper), at)
            code.store(from_short, at, VALUE_STEP // 2 * group_rows * FLOAT_BYTES)

        sums = code.loop(turns, [code.constant(0.0, LANES)] * group_rows, weigh)
        # Vectors of four tokens, then tokens.
        quarter = 4 * group_rows
        fours = [code.shuffle(x, range(i, i + quarter)) for x in sums for i in range(0, LANES, quarter)]
        four = builder.fadd(builder.fadd(fours[0], fours[1]), builder.fadd(fours[2], fours[3]))
        pairs = [code.shuffle(four, range(i, i + group_rows)) for i in range(0, quarter, group_rows)]
        added = builder.fadd(builder.fadd(pairs[0], pairs[1]), builder.fadd(pairs[2], pairs[3]))

        same = builder.fcmp_ordered("==", before, after)
        rescale = builder.select(same, code.constant(1.0, group_rows), code.exp(builder.fsub(before, base)))
        code.store(after, maximum)
        code.store(builder.fadd(builder.fmul(code.load(total, vector(group_rows)), rescale), added), total)
        code.store(rescale, factor)

    return step(emit)


def make_merge_state() -> Any:
    """The step ``merge_state(acc, maximum, total, other_acc, other_maximum, other_total, num_vectors)`` of one row."""

    def emit(
        code: Code,
        acc: Value,
        maximum: Value,
        total: Value,
        other_acc: Value,
        other_maximum: Value,
        other_total: Value,
        num_vectors: Value,
    ) -> None:
        builder = code.builder
        both = code.pair(code.load(maximum, FLOAT), code.load(other_maximum, FLOAT))
        after = code.repeat(code.halve(both, code.larger, 1), 2)
        is_some = builder.fcmp_ordered(">", after, code.constant(NOTHING, 2))
        weights = code.exp(builder.fsub(both, builder.select(is_some, after, code.constant(0.0, 2))))
        mine, other = (code.shuffle(weights, [lane] * LANES) for lane in (0, 1))

        def turn(i: Value) -> None:
            place = code.times(i, LANES * FLOAT_BYTES)
            at = builder.add(acc, place)
            scaled = builder.fmul(mine, code.load(at, vector(LANES)))
            code.store(code.fma(other, code.load(builder.add(other_acc, place), vector(LANES)), scaled), at)

        code.repeatedly(num_vectors, turn)
        sums = builder.fmul(weights, code.pair(code.load(total, FLOAT), code.load(other_total, FLOAT)))
        code.store(code.lane(code.halve(sums, builder.fadd, 1), 0), total)
        code.store(code.lane(after, 0), maximum)

    return step(emit)


def make_rescale() -> Any:
    """The step ``rescale(target, acc, factor, num_vectors)``: a row of accumulators times the number at `factor`."""

    def emit(code: Code, target: Value, acc: Value, factor: Value, num_vectors: Value) -> None:
        by = code.splat(code.load(factor, FLOAT), LANES)

        def turn(i: Value) -> None:
            place = code.times(i, LANES * FLOAT_BYTES)
            scaled = code.builder.fmul(by, code.load(code.builder.add(acc, place), vector(LANES)))
            code.store(scaled, code.builder.add(target, place))

        code.repeatedly(num_vectors, turn)

    return step(emit)


def make_clear() -> Any:
    """The step ``clear(target, num_vectors)``, which stores zeros."""

    def emit(code: Code, target: Value, num_vectors: Value) -> None:
        zeros = code.constant(0.0, LANES)
        code.repeatedly(
            num_vectors, lambda i: code.store(zeros, code.builder.add(target, code.times(i, LANES * FLOAT_BYTES)))
        )

    return step(emit)
