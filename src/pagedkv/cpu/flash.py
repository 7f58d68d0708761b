"""The steps of flash attention that decode and prefill share: one tile of keys against a few query rows.

A query row is one query head of one token. Its state is a running maximum, a running sum and a float32 accumulator
(online softmax: Milakov and Gimelshein, 2018); rows never touch each other, so the bits of a row do not depend on
which rows it is computed with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .compile import device
from .logits import make_modify
from .simd import (
    add,
    broadcast,
    exp,
    fma,
    get_float,
    get_int,
    keep,
    load,
    maximum,
    multiply,
    part,
    put_float,
    put_int,
    splat,
    store,
    total,
    totals,
)
from .tiles import AHEAD_CURSOR, FLOAT_BYTES, INT_BYTES, TILE, Ahead, TileConfig, ask, lines_of_part

DOT_LANES = 16
NOTHING = np.float32(-np.inf)
ZERO = np.float32(0)
ONE = np.float32(1)
SCORES = FLOAT_BYTES * TILE
ASK_EVERY = 4  # tokens of a tile of values


class Scratch(NamedTuple):
    """Addresses of what a thread works in: a kernel's arrays cost a reference count wherever they are passed."""

    tile: Any  # float32 (TILE, head_dim) keys or values
    queries: Any  # float32 (rows, head_dim)
    acc: Any  # float32 (rows, head_dim)
    scores: Any  # float32 (rows of one step, TILE) logits, then weights
    maximum: Any  # float32 (rows,) the largest logit so far
    sum: Any  # float32 (rows,) the sum of the weights so far
    rescale: Any  # float32 (rows,) the factor of the accumulator in this step
    position: Any  # int64 (rows,) the token's position in its sequence
    head: Any  # int64 (rows,) the query head
    ahead: Any  # Ahead: the rows to ask for meanwhile


class Steps(NamedTuple):
    """The device functions of one TileConfig and score_mod."""

    attend_keys: Callable[..., Any]
    attend_values: Callable[..., Any]


def make_steps(config: TileConfig, score_mod: Callable[..., Any] | None) -> Steps:
    """The two halves of a step: logits and weights from a tile of keys, then the weighted sum of a tile of values."""
    lanes, dot_lanes = config.lanes, min(config.lanes, DOT_LANES)
    modify = make_modify(score_mod)
    tag = (config, score_mod)
    modified = score_mod is not None

    @device(tag)
    def dots_of_2(scores, tile, query, row, ahead, lines):
        """Two queries times the rows of a tile, four rows at a time."""
        for t in range(0, TILE, 4):
            ask(ahead, lines)
            key = tile + t * row
            a = splat(ZERO, dot_lanes)
            b, c, d, e, f, g, h = a, a, a, a, a, a, a
            for i in range(0, row, dot_lanes * FLOAT_BYTES):
                x, y = load(query + i, "float32", dot_lanes), load(query + row + i, "float32", dot_lanes)
                k = load(key + i, "float32", dot_lanes)
                a, e = fma(x, k, a), fma(y, k, e)
                k = load(key + row + i, "float32", dot_lanes)
                b, f = fma(x, k, b), fma(y, k, f)
                k = load(key + 2 * row + i, "float32", dot_lanes)
                c, g = fma(x, k, c), fma(y, k, g)
                k = load(key + 3 * row + i, "float32", dot_lanes)
                d, h = fma(x, k, d), fma(y, k, h)
            sums = totals(a, b, c, d, e, f, g, h)
            store(scores + t * FLOAT_BYTES, part(sums, 0, 4))
            store(scores + SCORES + t * FLOAT_BYTES, part(sums, 4, 4))

    @device(tag)
    def dots_of_1(scores, tile, query, row, ahead, lines):
        """One query times the rows of a tile, eight rows at a time; the sums have the same order."""
        for t in range(0, TILE, 8):
            ask(ahead, lines)
            key = tile + t * row
            a = splat(ZERO, dot_lanes)
            b, c, d, e, f, g, h = a, a, a, a, a, a, a
            for i in range(0, row, dot_lanes * FLOAT_BYTES):
                x = load(query + i, "float32", dot_lanes)
                a = fma(x, load(key + i, "float32", dot_lanes), a)
                b = fma(x, load(key + row + i, "float32", dot_lanes), b)
                c = fma(x, load(key + 2 * row + i, "float32", dot_lanes), c)
                d = fma(x, load(key + 3 * row + i, "float32", dot_lanes), d)
                e = fma(x, load(key + 4 * row + i, "float32", dot_lanes), e)
                f = fma(x, load(key + 5 * row + i, "float32", dot_lanes), f)
                g = fma(x, load(key + 6 * row + i, "float32", dot_lanes), g)
                h = fma(x, load(key + 7 * row + i, "float32", dot_lanes), h)
            store(scores + t * FLOAT_BYTES, totals(a, b, c, d, e, f, g, h))

    @device(tag)
    def softmax(scores, start, stop, highest, summed, rescale):
        """Turn logits into weights against the running maximum; moves the maximum, the sum and the factor."""
        logits = keep(load(scores, "float32", TILE), start, stop, NOTHING)
        before = get_float(highest)
        after = max(before, maximum(logits))
        base = after if after > NOTHING else ZERO
        weights = exp(add(logits, splat(-base, TILE)))
        store(scores, weights)
        factor = total(exp(splat(before - base, 1)))
        put_float(highest, after)
        put_float(summed, get_float(summed) * factor + total(weights))
        put_float(rescale, factor)

    @device(tag)
    def weigh(scratch, r, scores, head_dim, first, count, causal, window, softcap, slopes, seq):
        """Turn the dot products of query row r into weights."""
        position, state = get_int(scratch.position + r * INT_BYTES), r * FLOAT_BYTES
        start = max(np.int64(0), position - window + 1 - first)
        stop = min(count, position + 1 - first) if causal else count
        if start >= stop:
            store(scores, splat(ZERO, TILE))
            put_float(scratch.rescale + state, ONE)
            return
        if modified or softcap != ZERO or slopes != 0:
            head = get_int(scratch.head + r * INT_BYTES)
            slope = get_float(slopes + head * FLOAT_BYTES) if slopes != 0 else ZERO
            modify(scores, count, first, position, softcap, slope, head, seq)
        softmax(scores, start, stop, scratch.maximum + state, scratch.sum + state, scratch.rescale + state)

    @device(tag)
    def attend_keys(scratch, begin, end, head_dim, first, count, causal, window, softcap, slopes, seq):
        """Weights of a tile whose first key is at position `first`, for the query rows begin..end."""
        row = head_dim * FLOAT_BYTES
        scores, query = scratch.scores, scratch.queries + begin * row
        single = (end - begin) % 2
        pairs = (end - begin) // 2
        lines = -(-lines_of_part(scratch.ahead) // (TILE // 4 * pairs + TILE // 8 * single))
        for r in range(begin, end - single, 2):
            dots_of_2(scores, scratch.tile, query, row, scratch.ahead, lines)
            weigh(scratch, r, scores, head_dim, first, count, causal, window, softcap, slopes, seq)
            weigh(scratch, r + 1, scores + SCORES, head_dim, first, count, causal, window, softcap, slopes, seq)
            scores, query = scores + 2 * SCORES, query + 2 * row
        if single:
            dots_of_1(scores, scratch.tile, query, row, scratch.ahead, lines)
            weigh(scratch, end - 1, scores, head_dim, first, count, causal, window, softcap, slopes, seq)

    @device(tag)
    def add_to_4(acc, tile, weights, rescale, row, count, ahead, lines):
        """acc[r] = rescale[r] * acc[r] + sum of weights[r, t] * row t of the tile, for four query rows."""
        for i in range(0, row, lanes * FLOAT_BYTES):
            a = multiply(load(acc + i, "float32", lanes), broadcast(rescale, lanes))
            b = multiply(load(acc + row + i, "float32", lanes), broadcast(rescale + FLOAT_BYTES, lanes))
            c = multiply(load(acc + 2 * row + i, "float32", lanes), broadcast(rescale + 2 * FLOAT_BYTES, lanes))
            d = multiply(load(acc + 3 * row + i, "float32", lanes), broadcast(rescale + 3 * FLOAT_BYTES, lanes))
            for t in range(count):
                if t % ASK_EVERY == 0:
                    ask(ahead, lines)
                value = load(tile + t * row + i, "float32", lanes)
                weight = weights + t * FLOAT_BYTES
                a = fma(broadcast(weight, lanes), value, a)
                b = fma(broadcast(weight + SCORES, lanes), value, b)
                c = fma(broadcast(weight + 2 * SCORES, lanes), value, c)
                d = fma(broadcast(weight + 3 * SCORES, lanes), value, d)
            store(acc + i, a)
            store(acc + row + i, b)
            store(acc + 2 * row + i, c)
            store(acc + 3 * row + i, d)

    @device(tag)
    def add_to_1(acc, tile, weights, rescale, row, count, ahead, lines):
        """The same for one query row."""
        for i in range(0, row, lanes * FLOAT_BYTES):
            a = multiply(load(acc + i, "float32", lanes), broadcast(rescale, lanes))
            for t in range(count):
                if t % ASK_EVERY == 0:
                    ask(ahead, lines)
                value = load(tile + t * row + i, "float32", lanes)
                a = fma(broadcast(weights + t * FLOAT_BYTES, lanes), value, a)
            store(acc + i, a)

    @device(tag)
    def attend_values(scratch, begin, end, head_dim, count):
        """Add the weighted rows of a tile of values to the accumulators of the query rows begin..end."""
        row = head_dim * FLOAT_BYTES
        acc, weights, rescale = scratch.acc + begin * row, scratch.scores, scratch.rescale + begin * FLOAT_BYTES
        singles = (end - begin) % 4
        fours = end - begin - singles
        passes = (fours // 4 + singles) * (head_dim // lanes) * -(-count // ASK_EVERY)
        lines = -(-lines_of_part(scratch.ahead) // passes)
        for _ in range(0, fours, 4):
            add_to_4(acc, scratch.tile, weights, rescale, row, count, scratch.ahead, lines)
            acc, weights, rescale = acc + 4 * row, weights + 4 * SCORES, rescale + 4 * FLOAT_BYTES
        for _ in range(singles):
            add_to_1(acc, scratch.tile, weights, rescale, row, count, scratch.ahead, lines)
            acc, weights, rescale = acc + row, weights + SCORES, rescale + FLOAT_BYTES

    return Steps(attend_keys, attend_values)


@njit(nogil=True)
def scratch_floats(num_rows, step_rows, head_dim):
    """How many float32 a Scratch takes."""
    return (TILE + 2 * num_rows) * head_dim + step_rows * TILE + 3 * num_rows


@njit(nogil=True)
def scratch_ints(num_rows, heads):
    """How many int64 a Scratch takes."""
    return 2 * num_rows + 2 * heads * TILE + AHEAD_CURSOR


@njit(nogil=True)
def scratch_at(floats, ints, num_rows, step_rows, head_dim, heads, row_bytes):
    """Lay a Scratch out at two addresses, those of arrays that live as long as it is used."""
    queries = floats + TILE * head_dim * FLOAT_BYTES
    acc = queries + num_rows * head_dim * FLOAT_BYTES
    scores = acc + num_rows * head_dim * FLOAT_BYTES
    highest = scores + step_rows * SCORES
    summed = highest + num_rows * FLOAT_BYTES
    rescale = summed + num_rows * FLOAT_BYTES
    head = ints + num_rows * INT_BYTES
    rows = head + num_rows * INT_BYTES
    ahead = Ahead(rows, rows + 2 * heads * TILE * INT_BYTES, row_bytes)
    return Scratch(floats, queries, acc, scores, highest, summed, rescale, ints, head, ahead)


@njit(nogil=True)
def copy_floats(target, source, count):
    """Copy float32 values from one address to another."""
    for i in range(count):
        put_float(target + i * FLOAT_BYTES, get_float(source + i * FLOAT_BYTES))


@njit(nogil=True)
def start_row(scratch, row, position, head, query, head_dim):
    """Begin a query row: nothing seen yet."""
    put_int(scratch.position + row * INT_BYTES, position)
    put_int(scratch.head + row * INT_BYTES, head)
    put_float(scratch.maximum + row * FLOAT_BYTES, NOTHING)
    put_float(scratch.sum + row * FLOAT_BYTES, ZERO)
    copy_floats(scratch.queries + row * head_dim * FLOAT_BYTES, query, head_dim)
    for d in range(head_dim):
        put_float(scratch.acc + (row * head_dim + d) * FLOAT_BYTES, ZERO)


@njit(nogil=True)
def merge(out, partial_out, maxima, sums, count, split_stride, head_dim, sink, v_scale):
    """Merge `count` states of one query row in their order, into the address `out`; returns the LSE.

    State i has its accumulator, maximum and sum at i * split_stride rows from the addresses given. A `sink` of -inf
    is none.
    """
    step = split_stride * FLOAT_BYTES
    highest = sink
    for s in range(count):
        highest = max(highest, get_float(maxima + s * step))
    base = highest if highest > NOTHING else ZERO
    denominator = np.float32(math.exp(sink - base))
    for s in range(count):
        denominator += get_float(sums + s * step) * np.float32(math.exp(get_float(maxima + s * step) - base))
    for d in range(head_dim):
        put_float(out + d * FLOAT_BYTES, ZERO)
    if denominator == ZERO:
        return NOTHING
    for s in range(count):
        weight = np.float32(math.exp(get_float(maxima + s * step) - base)) / denominator * v_scale
        for d in range(0, head_dim * FLOAT_BYTES, FLOAT_BYTES):
            value = get_float(partial_out + s * step * head_dim + d)
            put_float(out + d, get_float(out + d) + weight * value)
    return base + np.float32(math.log(denominator))
