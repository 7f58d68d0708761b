"""Passes over a tile: the scores of all its keys, or the sum of all its weighted values, for a work item's KV heads.

Steps go through rows in memory order (step_order.py). While one computes, the rows of a later one are prefetched, from
this tile or from the next one, and rows that cannot be widened in registers are widened one step earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .code import (
    ELEMENT_BYTES,
    FLOAT_BYTES,
    INT64,
    INT_BYTES,
    LANES,
    STEP,
    TILE,
    VALUE_STEP,
    Code,
    Value,
    prefetches_into_l1,
    step,
)
from .dots import ScoreFactors, dot_products, keys_at_once
from .step_order import RowAddresses, RowsToPrefetch, StepOrder, StepPosition, TilePass
from .values import add_values, widens_in_registers
from .widen import INTEGERS, RowsToWiden, wide_bytes, widen_pairs, widen_rows, widened_kind

L1_BYTES = 48 * 1024  # of processors that prefetch into it
# Bytes from what a step reads to what it prefetches into L2. Less one, which is a step less: as many steps as there are
# KV heads lead to the same head's later rows, in NHD often 4 KiB apart, which drive those that are read out of L1.
L2_REACH = 32 * 1024 - 1


class PassConfig(NamedTuple):
    """What the code of a pass depends on."""

    kind: str  # the format of the rows, or of those that they were widened to
    group_rows: int
    whole: bool  # rows are whole chunks, so registers may do for widening them
    staged: bool  # rows are those of a scratch tile, in the processor's caches, so nothing is prefetched


def groups_at_once(config: PassConfig) -> int:
    """Groups that take a step of keys together: more with a staged tile, which waits for L1, not for memory."""
    most = 4 if config.staged else 2
    return most if config.group_rows > 1 and keys_at_once(config.kind, most, config.group_rows) >= 4 else 1


def make_score_keys(config: PassConfig) -> Any:
    """The step ``score_keys(scores, queries, tile_pass)``: the dot products of all query rows with a tile of keys."""
    kind, R = config.kind, config.group_rows
    wide = kind if config.staged else widened_kind(kind)
    reads = kind if config.whole and (R == 1 or kind == "int8") else wide
    step_tokens = VALUE_STEP if wide in INTEGERS else STEP  # as many as of values, which a pass prefetches for the next

    def emit(code: Code, scores: Value, queries: Value, tile_pass: TilePass) -> None:
        builder, row_bytes = code.builder, code.times(_num_vectors(code, tile_pass), LANES * FLOAT_BYTES)
        in_vector = LANES * FLOAT_BYTES // wide_bytes(wide)
        num_vectors = builder.sdiv(code.plus(tile_pass.head_dim, in_vector - 1), INT64(in_vector))

        def compute(head: Value, row: Value, num_groups: int, t: Value, keys: RowAddresses, *meanwhile: Any) -> None:
            to, q, factors = _at(code, scores, row, t, R), builder.add(queries, builder.mul(row, row_bytes)), None
            if wide in INTEGERS:
                of_keys = builder.add(code.times(head, TILE), t)
                factors = ScoreFactors(
                    builder.add(tile_pass.key_factors, code.times(of_keys, FLOAT_BYTES)),
                    builder.add(tile_pass.row_factors, code.times(row, FLOAT_BYTES)),
                )
            stride = code.times(row_bytes, R)
            dot_products(code, reads, num_groups, R, step_tokens, to, q, stride, keys, num_vectors, factors, *meanwhile)

        _emit_steps(code, config, reads, step_tokens, groups_at_once(config), tile_pass, compute)

    return step(emit)


def make_add_values(config: PassConfig) -> Any:
    """The step ``add_values(acc, weights, tile_pass)``: the weighted values of a tile, added for all query rows."""
    kind, R = config.kind, config.group_rows
    # A group alone takes more values at once: fewer loads, but values that are not in L1 come once for each group.
    at_once = 1 if config.staged else groups_at_once(config)
    wide = kind if config.staged else widened_kind(kind)
    reads = kind if config.whole and widens_in_registers(kind, at_once * R) else wide
    are_pairs = kind in INTEGERS
    step_tokens = VALUE_STEP if are_pairs else TILE if config.staged else STEP

    def emit(code: Code, acc: Value, weights: Value, tile_pass: TilePass) -> None:
        builder, num_vectors = code.builder, _num_vectors(code, tile_pass)
        row_bytes = code.times(num_vectors, LANES * FLOAT_BYTES)

        def compute(_: Value, row: Value, num_groups: int, t: Value, rows: RowAddresses, *meanwhile: Any) -> None:
            left = builder.sub(tile_pass.count, t)
            count = code.smaller(left, INT64(step_tokens))
            to, w = builder.add(acc, builder.mul(row, row_bytes)), _at(code, weights, row, t, R)
            add_values(code, reads, num_groups, R, to, row_bytes, w, rows, count, num_vectors, *meanwhile)

        _emit_steps(code, config, reads, step_tokens, at_once, tile_pass, compute, are_pairs=are_pairs)

    return step(emit)


def _reach(code: Code, tile_pass: TilePass, bytes_of_dim: int, num_steps: Value, least: int) -> Value:
    """How many steps ahead rows are prefetched: from `least` to `num_steps`."""
    builder, step_bytes = code.builder, code.times(tile_pass.head_dim, bytes_of_dim)
    if prefetches_into_l1():
        # What the other heads' rows of the same tokens leave free in L1.
        free = builder.sub(INT64(L1_BYTES), builder.mul(tile_pass.num_heads, step_bytes))
        reach = code.smaller(builder.sdiv(free, step_bytes), tile_pass.num_heads)
    else:
        reach = builder.sdiv(INT64(L2_REACH), step_bytes)
    return code.smaller(code.greater(reach, INT64(least)), num_steps)


def _num_vectors(code: Code, tile_pass: TilePass) -> Value:
    """Vectors of a widened row."""
    return code.builder.sdiv(code.plus(tile_pass.head_dim, LANES - 1), INT64(LANES))


def _at(code: Code, scores: Value, row: Value, t: Value, group_rows: int) -> Value:
    """The address of the scores of a group from token t on, by the group's first row."""
    place = code.builder.add(code.times(row, TILE), code.times(t, group_rows))
    return code.builder.add(scores, code.times(place, FLOAT_BYTES))


def _emit_steps(
    code: Code,
    config: PassConfig,
    reads: str,
    step_tokens: int,
    most: int,
    tile_pass: TilePass,
    compute: Callable[[Value, Value, int, Value, RowAddresses, RowsToPrefetch | None, RowsToWiden | None], None],
    *,
    are_pairs: bool = False,
) -> None:
    """Emit ``compute(KV head, first query row, number of groups, t, rows, to_prefetch, to_widen)`` for all steps.

    Rows are of the dtype `reads`, those of a tile for two tokens each if they `are_pairs`, and `most` groups at a time
    take a step together.
    """
    builder, R = code.builder, config.group_rows

    def in_groups(emit: Callable[[Value, int], None], done: Value, count: int) -> None:
        """``emit(first, count)`` for the groups from `done` on, `count` at a time, and the rest fewer at a time."""
        whole = builder.sdiv(builder.sub(tile_pass.num_groups, done), INT64(count))
        code.repeatedly(whole, lambda i: emit(builder.add(done, code.times(i, count)), count))
        if count > 1:
            in_groups(emit, builder.add(done, code.times(whole, count)), count // 2)

    def steps_of_staged_tile(first: Value, count: int) -> None:
        """Emit every step for some groups before the next groups: the tile stays in L1."""

        def one(n: Value) -> None:
            row = code.times(n, step_tokens // 2 if are_pairs else step_tokens)
            rows = RowAddresses(tile_pass.rows, tile_pass.offset).after(code, row)
            compute(INT64(0), code.times(first, R), count, code.times(n, step_tokens), rows, None, None)

        code.repeatedly(order.num_steps, one)

    order = StepOrder(code, tile_pass, step_tokens)
    if config.staged:
        in_groups(steps_of_staged_tile, INT64(0), most)
        return
    in_tile = reads != config.kind or not config.whole
    one_ahead = in_tile and config.whole and config.kind not in INTEGERS
    stride = code.times(_num_vectors(code, tile_pass), LANES * FLOAT_BYTES)

    def half(number: Value) -> tuple[Value, RowAddresses]:
        """The part of the tile that holds the widened rows of a step: its address, and the rows there."""
        row = code.times(builder.and_(number, INT64(1)), STEP) if one_ahead else INT64(0)
        rows = RowAddresses(builder.add(tile_pass.tile_rows, code.times(row, INT_BYTES)), INT64(0))
        return builder.add(tile_pass.tile, builder.mul(row, stride)), rows

    def one_step(number: Value, positions: list[Value]) -> list[Value]:
        """A step for all groups of a KV head."""
        this, reached = StepPosition(*positions[:4]), StepPosition(*positions[4:])
        rows, to_widen = order.rows(this), None
        to_prefetch = RowsToPrefetch(order.rows(reached), ELEMENT_BYTES[config.kind])
        if one_ahead:
            following, (target, _) = order.after(this), half(code.plus(number, 1))
            to_widen = RowsToWiden(config.kind, order.rows(following), target, stride, builder.not_(following.past))
        elif in_tile:
            to, rest = half(number)[0], (stride, rows, tile_pass.head_dim)
            if are_pairs:
                widen_pairs(code, VALUE_STEP, to, *rest)
            else:
                widen_rows(code, config.kind, step_tokens, to, *rest)
        if in_tile:
            rows = half(number)[1]
        row, t = builder.mul(this.head, code.times(tile_pass.num_groups, R)), order.token(this)

        def some_groups(first: Value, count: int) -> None:
            with_first = to_widen and to_widen.where(code, builder.icmp_signed("==", first, INT64(0)))
            compute(this.head, builder.add(row, code.times(first, R)), count, t, rows, to_prefetch, with_first)

        in_groups(some_groups, INT64(0), most)
        return [*order.after(this), *order.after(reached)]

    start = order.position(INT64(0))
    least = 2 if one_ahead else 1  # rows that are widened one step ahead have been prefetched by then
    reach = _reach(code, tile_pass, step_tokens * ELEMENT_BYTES[config.kind], order.num_steps, least)
    if one_ahead:
        widen_rows(code, config.kind, STEP, tile_pass.tile, stride, order.rows(start), tile_pass.head_dim)
    code.loop(order.num_steps, [*start, *order.position(reach)], one_step)
