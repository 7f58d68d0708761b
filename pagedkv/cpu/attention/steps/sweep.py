"""Sweeps: all steps of a tile, of keys or of values, for the KV heads of a work item.

Steps come in the order in which rows lie in memory (course.py). While one computes, the rows of a later one are
prefetched, from this tile or from the next one, and rows that are not read in registers are widened one step ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .code import ELEMENT_BYTES, FLOAT_BYTES, INT64, INT_BYTES, LANES, STEP, TILE, Code, Value, prefetches_into_l1, step
from .course import Ahead, Course, Place, Rows, Sweep
from .dots import dots, keys_at_once
from .values import values, widens_in_registers
from .widen import Following, widen_rows

L1_BYTES = 48 * 1024  # of processors that prefetch into it
# Bytes from what a step reads to what it prefetches into L2. Less one, which is a step less: as many steps as there are
# KV heads lead to the same head's later rows, in NHD often 4 KiB apart, which drive those that are read out of L1.
L2_REACH = 32 * 1024 - 1


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

        def take(row: Value, num_groups: int, t: Value, keys: Rows, *beside: Any) -> None:
            q = code.builder.add(queries, code.builder.mul(row, code.times(num_vectors, LANES * FLOAT_BYTES)))
            dots(code, reads, num_groups, R, _at(code, scores, row, t, R), q, keys, num_vectors, *beside)

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

        def take(row: Value, num_groups: int, t: Value, rows: Rows, *beside: Any) -> None:
            left = builder.sub(sweep.count, t)
            count = code.smaller(left, INT64(step_tokens))
            to, w = builder.add(acc, builder.mul(row, row_bytes)), _at(code, weights, row, t, R)
            values(code, reads, num_groups, R, to, row_bytes, w, rows, count, num_vectors, *beside)

        _take_steps(code, form, reads, step_tokens, at_once, sweep, take)

    return step(emit)


def _reach(code: Code, form: Form, sweep: Sweep, num_steps: Value, least: int) -> Value:
    """How many steps later rows are read when they are prefetched: from `least` to `num_steps`."""
    builder, step_bytes = code.builder, code.times(sweep.head_dim, STEP * ELEMENT_BYTES[form.kind])
    if prefetches_into_l1():
        # What the other heads' rows of the same tokens leave free in L1.
        free = builder.sub(INT64(L1_BYTES), builder.mul(sweep.num_heads, step_bytes))
        reach = code.smaller(builder.sdiv(free, step_bytes), sweep.num_heads)
    else:
        reach = builder.sdiv(INT64(L2_REACH), step_bytes)
    return code.smaller(code.greater(reach, INT64(least)), num_steps)


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
    take: Callable[[Value, int, Value, Rows, Ahead | None, Following | None], None],
) -> None:
    """``take(first query row, number of groups, t, rows, ahead, following)`` for all steps.

    Rows are of the dtype `reads`, and `most` groups at a time take a step together.
    """
    builder, R = code.builder, form.group_rows

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
            take(code.times(first, R), count, t, Rows(sweep.rows, sweep.offset).after(code, t), None, None)

        code.repeatedly(course.num_steps, one)

    course = Course(code, sweep, step_tokens)
    if form.staged:
        in_groups(of_groups, INT64(0), most)
        return
    in_tile, beside = reads != form.kind or not form.whole, reads != form.kind and form.whole
    stride = code.times(_num_vectors(code, sweep), LANES * FLOAT_BYTES)

    def half(number: Value) -> tuple[Value, Rows]:
        """Where the rows of a step are widened, in one of the tile's two halves: their address, and their rows."""
        row = code.times(builder.and_(number, INT64(1)), STEP)
        rows = Rows(builder.add(sweep.tile_rows, code.times(row, INT_BYTES)), INT64(0))
        return builder.add(sweep.tile, builder.mul(row, stride)), rows

    def of_step(number: Value, places: list[Value]) -> list[Value]:
        """A step of all groups of a KV head."""
        at, reached = Place(*places[:4]), Place(*places[4:])
        rows, to_widen = course.rows(at), None
        ahead = Ahead(course.rows(reached), ELEMENT_BYTES[form.kind])
        if beside:
            following, (target, _) = course.after(at), half(code.plus(number, 1))
            to_widen = Following(form.kind, course.rows(following), target, stride, builder.not_(following.past))
        elif in_tile:
            widen_rows(code, form.kind, half(number)[0], stride, rows, sweep.head_dim)
        if in_tile:
            rows = half(number)[1]
        row, t = builder.mul(at.head, code.times(sweep.num_groups, R)), course.token(at)

        def of_groups(first: Value, count: int) -> None:
            beside_first = to_widen and to_widen.where(code, builder.icmp_signed("==", first, INT64(0)))
            take(builder.add(row, code.times(first, R)), count, t, rows, ahead, beside_first)

        in_groups(of_groups, INT64(0), most)
        return [*course.after(at), *course.after(reached)]

    start = course.place(INT64(0))
    reach = _reach(code, form, sweep, course.num_steps, 2 if beside else 1)  # the next step's rows are read in this one
    if beside:
        widen_rows(code, form.kind, sweep.tile, stride, course.rows(start), sweep.head_dim)
    code.loop(course.num_steps, [*start, *course.place(reach)], of_step)
