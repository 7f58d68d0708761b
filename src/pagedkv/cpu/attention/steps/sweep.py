"""Sweeps: all steps of a tile, of keys or of values, for the KV heads of a work item.

Steps come token after token, and the heads of each, or head after head: the order in which rows lie in memory. While
one computes, the rows of a later one are prefetched, from this tile or from the next one: those that the same head
reads next, or a few heads further on where L1 has no room for so many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .code import ELEMENT_BYTES, INT64, Code, Value, step
from .dots import dots, keys_at_once
from .machine import prefetches_into_l1
from .rows import Ahead, Rows
from .shapes import FLOAT_BYTES, INT_BYTES, LANES, STEP, TILE
from .values import values, widens_in_registers
from .widen import widen_rows

REACH = 2**14  # bytes from what a step reads to what it prefetches into L1, which has room for three times as many


class Sweep(NamedTuple):
    """What the steps of a tile read, and in which order: the last arguments of both sweeps. Offsets are in bytes."""

    rows: Any  # the address of the addresses of the tile's rows in KV head 0
    offset: Any  # from there to the item's first KV head
    head_stride: Any  # from a KV head to the next one
    next_rows: Any  # the same of the tile that is read next; after the last one, any rows that may be prefetched
    next_offset: Any
    next_head_stride: Any
    count: Any  # tokens of the tile
    num_heads: Any  # KV heads of the item
    num_groups: Any  # of query rows, for each KV head
    head_dim: Any
    token_major: Any  # 1 if the heads of a token lie side by side in memory, 0 if the tokens of a head do
    tile: Any  # room for the widened rows of a step
    tile_rows: Any  # the address of their addresses


class Form(NamedTuple):
    """What the code of a sweep depends on."""

    kind: str  # dtype of the rows
    group_rows: int
    whole: bool  # rows are whole chunks, that may be widened in registers
    staged: bool  # rows are those of a scratch tile, in the processor's caches, so nothing is prefetched


def groups_at_once(form: Form) -> int:
    """Groups that take a step of keys together: more with a staged tile, which waits for L1, not for memory."""
    most = 4 if form.staged else 2
    return most if form.group_rows > 1 and keys_at_once(most, form.group_rows) >= 4 else 1


def make_score(form: Form) -> Any:
    """The step ``score(scores, queries, *Sweep)``: the dot products of all query rows with a tile of keys."""
    kind, R = form.kind, form.group_rows
    reads = kind if form.whole and (kind == "float32" or R == 1) else "float32"

    def emit(code: Code, scores: Value, queries: Value, *arguments: Value) -> None:
        sweep = Sweep(*arguments)
        num_vectors = _num_vectors(code, sweep)

        def take(row: Value, num_groups: int, t: Value, keys: Rows, ahead: Ahead | None) -> None:
            q = code.builder.add(queries, code.builder.mul(row, code.times(num_vectors, LANES * FLOAT_BYTES)))
            dots(code, reads, num_groups, R, _at(code, scores, row, t, R), q, keys, num_vectors, ahead)

        _take_steps(code, form, reads, STEP, groups_at_once(form), sweep, take)

    return step(emit)


def make_add(form: Form) -> Any:
    """The step ``add(acc, weights, *Sweep)``: the weighted values of a tile, added for all query rows."""
    kind, R = form.kind, form.group_rows
    # A group alone takes more values at once: fewer loads, but values that are not in L1 come once for each group.
    at_once = 1 if form.staged else groups_at_once(form)
    reads = kind if form.whole and widens_in_registers(kind, at_once * R) else "float32"
    step_tokens = TILE if form.staged else STEP

    def emit(code: Code, acc: Value, weights: Value, *arguments: Value) -> None:
        builder, sweep = code.builder, Sweep(*arguments)
        num_vectors = _num_vectors(code, sweep)
        row_bytes = code.times(num_vectors, LANES * FLOAT_BYTES)

        def take(row: Value, num_groups: int, t: Value, rows: Rows, ahead: Ahead | None) -> None:
            left = builder.sub(sweep.count, t)
            count = builder.select(builder.icmp_signed("<", left, INT64(step_tokens)), left, INT64(step_tokens))
            to, w = builder.add(acc, builder.mul(row, row_bytes)), _at(code, weights, row, t, R)
            values(code, reads, num_groups, R, to, row_bytes, w, rows, count, num_vectors, ahead)

        _take_steps(code, form, reads, step_tokens, at_once, sweep, take)

    return step(emit)


def _heads_ahead(code: Code, form: Form, sweep: Sweep) -> Value:
    """How many steps later rows are read when they are prefetched, if the heads of a token lie side by side."""
    if not prefetches_into_l1():
        return sweep.num_heads
    builder, step_bytes = code.builder, code.times(sweep.head_dim, STEP * ELEMENT_BYTES[form.kind])
    steps = code.plus(builder.sdiv(INT64(REACH - 1), step_bytes), 1)
    return builder.select(builder.icmp_signed("<", steps, sweep.num_heads), steps, sweep.num_heads)


def _num_vectors(code: Code, sweep: Sweep) -> Value:
    """Of a widened row."""
    return code.builder.sdiv(code.plus(sweep.head_dim, LANES - 1), INT64(LANES))


def _at(code: Code, scores: Value, row: Value, t: Value, group_rows: int) -> Value:
    """The address of the scores of a group that begins with a row, from token t on."""
    place = code.builder.add(code.times(row, TILE), code.times(t, group_rows))
    return code.builder.add(scores, code.times(place, FLOAT_BYTES))


def _take_steps(
    code: Code,
    form: Form,
    reads: str,
    step_tokens: int,
    most: int,
    sweep: Sweep,
    take: Callable[[Value, int, Value, Rows, Ahead | None], None],
) -> None:
    """``take(first query row, number of groups, t, rows, ahead)`` for all steps, with rows of the dtype `reads`.

    `most` groups at a time take a step together.
    """
    builder, R = code.builder, form.group_rows
    num_steps = builder.sdiv(code.plus(sweep.count, step_tokens - 1), INT64(step_tokens))
    by_token = builder.icmp_signed("!=", sweep.token_major, INT64(0))
    heads_ahead = builder.select(by_token, _heads_ahead(code, form, sweep), sweep.num_heads)

    def in_groups(emit: Callable[[Value, int], None], done: Value, count: int) -> None:
        """``emit(first, count)`` for the groups from `done` on, `count` at a time, and the rest fewer at a time."""
        whole = builder.sdiv(builder.sub(sweep.num_groups, done), INT64(count))
        code.repeatedly(whole, lambda i: emit(builder.add(done, code.times(i, count)), count))
        if count > 1:
            in_groups(emit, builder.add(done, code.times(whole, count)), count // 2)

    def of_groups(first: Value, count: int) -> None:
        """All steps of a staged tile, which stays in L1."""

        def one(n: Value) -> None:
            t = code.times(n, step_tokens)
            take(code.times(first, R), count, t, Rows(sweep.rows, sweep.offset).after(code, t), None)

        code.repeatedly(num_steps, one)

    def later(addresses: Value, t: Value, head: Value) -> Rows:
        """The rows that are read `heads_ahead` steps after those of a head from token t on."""
        target = builder.add(head, heads_ahead)
        is_next_step = builder.icmp_signed(">=", target, sweep.num_heads)
        is_next_tile = builder.and_(is_next_step, builder.icmp_signed(">=", code.plus(t, step_tokens), sweep.count))
        target = builder.select(is_next_step, builder.sub(target, sweep.num_heads), target)
        following = builder.select(is_next_step, code.plus(addresses, step_tokens * INT_BYTES), addresses)
        offset = builder.add(sweep.offset, builder.mul(target, sweep.head_stride))
        next_offset = builder.add(sweep.next_offset, builder.mul(target, sweep.next_head_stride))
        return Rows(
            builder.select(is_next_tile, sweep.next_rows, following), builder.select(is_next_tile, next_offset, offset)
        )

    def of_head(outer: Value, inner: Value) -> None:
        """A step of all groups of a KV head."""
        n, head = builder.select(by_token, outer, inner), builder.select(by_token, inner, outer)
        t = code.times(n, step_tokens)
        offset = builder.add(sweep.offset, builder.mul(head, sweep.head_stride))
        rows = Rows(sweep.rows, offset).after(code, t)
        ahead = Ahead(later(rows.addresses, t, head), ELEMENT_BYTES[form.kind])
        if reads != form.kind or not form.whole:
            stride = code.times(_num_vectors(code, sweep), LANES * FLOAT_BYTES)
            widen_rows(code, form.kind, sweep.tile, stride, rows, sweep.head_dim, whole=form.whole)
            rows = Rows(sweep.tile_rows, INT64(0))
        row = builder.mul(head, code.times(sweep.num_groups, R))
        in_groups(
            lambda first, count: take(builder.add(row, code.times(first, R)), count, t, rows, ahead), INT64(0), most
        )

    if form.staged:
        in_groups(of_groups, INT64(0), most)
        return
    outer_count = builder.select(by_token, num_steps, sweep.num_heads)
    inner_count = builder.select(by_token, sweep.num_heads, num_steps)
    code.repeatedly(outer_count, lambda outer: code.repeatedly(inner_count, lambda inner: of_head(outer, inner)))
