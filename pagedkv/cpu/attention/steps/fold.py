"""Folding the state of a split into a running one, in token order: the sums of decode and of prefill alike.

A state is what attention over some keys leaves: the largest logit, the sum of weights, and the sum of values times
their weights, both relative to the largest logit (flash-decoding, Dao et al., 2023).
"""

from __future__ import annotations

from typing import Any

from .code import FLOAT, Code, Value, step, vector
from .shapes import FLOAT_BYTES, LANES
from .softmax import NOTHING


def make_fold() -> Any:
    """The step ``fold(acc, maximum, total, other_acc, other_maximum, other_total, num_vectors)`` of one row."""

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
        both = code.both(code.load(maximum, FLOAT), code.load(other_maximum, FLOAT))
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
        sums = builder.fmul(weights, code.both(code.load(total, FLOAT), code.load(other_total, FLOAT)))
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
    """The step ``clear(target, num_vectors)``: zeros."""

    def emit(code: Code, target: Value, num_vectors: Value) -> None:
        zeros = code.constant(0.0, LANES)
        code.repeatedly(
            num_vectors, lambda i: code.store(zeros, code.builder.add(target, code.times(i, LANES * FLOAT_BYTES)))
        )

    return step(emit)
