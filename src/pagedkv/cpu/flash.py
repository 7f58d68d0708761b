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

from .compile import device, inlined
from .logits import make_modify
from .scratch import NOTHING, ZERO
from .simd import (
    ELEMENT_BITS,
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
    prefetch,
    put_float,
    splat,
    store,
    total,
    totals,
)
from .tiles import CACHE_LINE, FLOAT_BYTES, INT_BYTES, SCORES, TILE, token_rows

DOT_LANES = 16
ONE = np.float32(1)
STEP = 8  # keys of a step


class Steps(NamedTuple):
    """The device functions of one kind of rows and score_mod."""

    dots: Callable[..., Any]
    weigh: Callable[..., Any]
    add_values: Callable[..., Any]


def make_steps(kind: str, lanes: int, score_mod: Callable[..., Any] | None) -> Steps:
    """The steps of a tile: logits from its keys, weights from the logits, then the weighted sum of its values.

    Keys and values are rows of `kind`, named by addresses in memory. `ahead` is 0 or the address of what a later step
    reads, as many bytes as this one: they are prefetched between the arithmetic, one line at a time in address order,
    which keeps the memory busy and never fills the processor's miss buffers.
    """
    dot_lanes = min(lanes, DOT_LANES)
    item = ELEMENT_BITS[kind] // 8
    modify = make_modify(score_mod)
    tag = (kind, lanes, score_mod)
    modified = score_mod is not None
    ask_4, ask_1, ask_values = 2 * dot_lanes * item, STEP * dot_lanes * item, lanes * item

    @device(tag)
    def dots_of_4(scores, rows, offset, query, row, head_dim, ahead):
        """Four queries times STEP keys, two keys at a time."""
        for t in range(0, STEP, 2):
            j = get_int(rows + t * INT_BYTES) + offset
            k = get_int(rows + (t + 1) * INT_BYTES) + offset
            a = splat(ZERO, dot_lanes)
            b, c, d, e, f, g, h = a, a, a, a, a, a, a
            for i in range(0, head_dim, dot_lanes):
                if ahead != 0:
                    for line in range(0, ask_4, CACHE_LINE):
                        prefetch(ahead + line)
                    ahead += ask_4
                x, y = load(j + i * item, kind, dot_lanes), load(k + i * item, kind, dot_lanes)
                q = query + i * FLOAT_BYTES
                z = load(q, "float32", dot_lanes)
                a, b = fma(z, x, a), fma(z, y, b)
                z = load(q + row, "float32", dot_lanes)
                c, d = fma(z, x, c), fma(z, y, d)
                z = load(q + 2 * row, "float32", dot_lanes)
                e, f = fma(z, x, e), fma(z, y, f)
                z = load(q + 3 * row, "float32", dot_lanes)
                g, h = fma(z, x, g), fma(z, y, h)
            sums = totals(a, b, c, d, e, f, g, h)
            score = scores + t * FLOAT_BYTES
            store(score, part(sums, 0, 2))
            store(score + SCORES, part(sums, 2, 2))
            store(score + 2 * SCORES, part(sums, 4, 2))
            store(score + 3 * SCORES, part(sums, 6, 2))

    @device(tag)
    def dots_of_1(scores, rows, offset, query, head_dim, ahead):
        """One query times STEP keys, summed in the same order for the same bits."""
        k, m = get_int(rows) + offset, get_int(rows + INT_BYTES) + offset
        n, o = get_int(rows + 2 * INT_BYTES) + offset, get_int(rows + 3 * INT_BYTES) + offset
        p, r = get_int(rows + 4 * INT_BYTES) + offset, get_int(rows + 5 * INT_BYTES) + offset
        u, v = get_int(rows + 6 * INT_BYTES) + offset, get_int(rows + 7 * INT_BYTES) + offset
        a = splat(ZERO, dot_lanes)
        b, c, d, e, f, g, h = a, a, a, a, a, a, a
        for i in range(0, head_dim, dot_lanes):
            if ahead != 0:
                for line in range(0, ask_1, CACHE_LINE):
                    prefetch(ahead + line)
                ahead += ask_1
            x, at = load(query + i * FLOAT_BYTES, "float32", dot_lanes), i * item
            a = fma(x, load(k + at, kind, dot_lanes), a)
            b = fma(x, load(m + at, kind, dot_lanes), b)
            c = fma(x, load(n + at, kind, dot_lanes), c)
            d = fma(x, load(o + at, kind, dot_lanes), d)
            e = fma(x, load(p + at, kind, dot_lanes), e)
            f = fma(x, load(r + at, kind, dot_lanes), f)
            g = fma(x, load(u + at, kind, dot_lanes), g)
            h = fma(x, load(v + at, kind, dot_lanes), h)
        store(scores, totals(a, b, c, d, e, f, g, h))

    @device(tag)
    def dots(scratch, begin, end, t, rows, offset, head_dim, count, ahead):
        """Dot products of the query rows begin .. end with the keys t .. t + STEP of a tile.

        All STEP of them, whatever `count`: rows past the end repeat the last one, and `weigh` masks their logits.
        """
        row, at = head_dim * FLOAT_BYTES, rows + t * INT_BYTES
        scores, query = scratch.scores + begin * SCORES + t * FLOAT_BYTES, scratch.queries + begin * row
        singles = (end - begin) % 4
        for _ in range(begin, end - singles, 4):
            dots_of_4(scores, at, offset, query, row, head_dim, ahead)
            scores, query, ahead = scores + 4 * SCORES, query + 4 * row, 0
        for _ in range(singles):
            dots_of_1(scores, at, offset, query, head_dim, ahead)
            scores, query, ahead = scores + SCORES, query + row, 0

    @device(tag)
    def softmax(scores, start, stop, highest, summed, rescale):
        """Turn logits into weights relative to the running maximum; update the maximum, the sum and the factor."""
        logits = keep(load(scores, "float32", TILE), start, stop, NOTHING)
        before = get_float(highest)
        after = max(before, maximum(logits))
        base = after if after > NOTHING else ZERO
        weights = exp(add(logits, splat(-base, TILE)))
        store(scores, weights)
        if before == after:
            put_float(summed, get_float(summed) + total(weights))
            put_float(rescale, ONE)
            return
        factor = total(exp(splat(before - base, 1)))
        put_float(highest, after)
        put_float(summed, get_float(summed) * factor + total(weights))
        put_float(rescale, factor)

    @device(tag)
    def weigh(scratch, r, first, count, options, seq):
        """Turn the dot products of query row r with a tile whose first key is at position `first` into weights."""
        scores, state = scratch.scores + r * SCORES, r * FLOAT_BYTES
        position, window = get_int(scratch.position + r * INT_BYTES), options.window
        start = max(np.int64(0), position - window + 1 - first)
        stop = min(count, position + 1 - first) if options.causal else count
        if start >= stop:
            store(scores, splat(ZERO, TILE))
            put_float(scratch.rescale + state, ONE)
            return
        softcap, slopes = options.softcap, options.slopes
        if modified or softcap != ZERO or slopes != 0:
            head = get_int(scratch.head + r * INT_BYTES)
            slope = get_float(slopes + head * FLOAT_BYTES) if slopes != 0 else ZERO
            modify(scores, count, first, position, softcap, slope, head, seq)
        softmax(scores, start, stop, scratch.maximum + state, scratch.sum + state, scratch.rescale + state)

    @device(tag)
    def add_to_4(acc, rows, offset, weights, row, head_dim, count, ahead):
        """acc[r] += sum of weights[r, t] * row t, for four query rows."""
        for i in range(0, head_dim, lanes):
            at, z = acc + i * FLOAT_BYTES, i * item
            a, b = load(at, "float32", lanes), load(at + row, "float32", lanes)
            c, d = load(at + 2 * row, "float32", lanes), load(at + 3 * row, "float32", lanes)
            for t in range(count):
                if ahead != 0:
                    for line in range(0, ask_values, CACHE_LINE):
                        prefetch(ahead + line)
                    ahead += ask_values
                value = load(get_int(rows + t * INT_BYTES) + offset + z, kind, lanes)
                weight = weights + t * FLOAT_BYTES
                a = fma(broadcast(weight, lanes), value, a)
                b = fma(broadcast(weight + SCORES, lanes), value, b)
                c = fma(broadcast(weight + 2 * SCORES, lanes), value, c)
                d = fma(broadcast(weight + 3 * SCORES, lanes), value, d)
            store(at, a)
            store(at + row, b)
            store(at + 2 * row, c)
            store(at + 3 * row, d)

    @device(tag)
    def add_to_1(acc, rows, offset, weights, head_dim, count, ahead):
        """The same for one query row."""
        for i in range(0, head_dim, lanes):
            a = load(acc + i * FLOAT_BYTES, "float32", lanes)
            for t in range(count):
                if ahead != 0:
                    for line in range(0, ask_values, CACHE_LINE):
                        prefetch(ahead + line)
                    ahead += ask_values
                value = load(get_int(rows + t * INT_BYTES) + offset + i * item, kind, lanes)
                a = fma(broadcast(weights + t * FLOAT_BYTES, lanes), value, a)
            store(acc + i * FLOAT_BYTES, a)

    @device(tag)
    def rescale(scratch, r, head_dim):
        """Rescale the accumulator of query row r to the maximum as of this tile."""
        acc, factor = scratch.acc + r * head_dim * FLOAT_BYTES, scratch.rescale + r * FLOAT_BYTES
        for i in range(0, head_dim, lanes):
            at = acc + i * FLOAT_BYTES
            store(at, multiply(load(at, "float32", lanes), broadcast(factor, lanes)))

    @device(tag)
    def add_values(scratch, begin, end, t, rows, offset, head_dim, count, ahead):
        """Add the weighted values t .. t + count of a tile to the accumulators of the query rows begin .. end."""
        row, at = head_dim * FLOAT_BYTES, rows + t * INT_BYTES
        acc, weights = scratch.acc + begin * row, scratch.scores + begin * SCORES + t * FLOAT_BYTES
        if t == 0:
            for r in range(begin, end):
                if get_float(scratch.rescale + r * FLOAT_BYTES) != ONE:
                    rescale(scratch, r, head_dim)
        singles = (end - begin) % 4
        for _ in range(begin, end - singles, 4):
            add_to_4(acc, at, offset, weights, row, head_dim, count, ahead)
            acc, weights, ahead = acc + 4 * row, weights + 4 * SCORES, 0
        for _ in range(singles):
            add_to_1(acc, at, offset, weights, head_dim, count, ahead)
            acc, weights, ahead = acc + row, weights + SCORES, 0

    return Steps(dots, weigh, add_values)


def make_walk(score: Any, weigh: Any, add: Any) -> Callable[..., Any]:
    """The device function that attends an item's query rows to the tokens start .. stop of its sequence.

    `score` multiplies the queries with a tile of keys and `add` sums a tile of values, each in its kernel's own way:
    (scratch, item, count, rows, strides, next_rows, next_strides), where `next_rows` are the ones that the other
    function reads next, to prefetch, or 0 after the last tile. An item is a NamedTuple with at least the fields seq,
    table (the address of its row of the block table) and num_rows.
    """

    @inlined
    def walk(scratch, item, caches, options, start, stop):
        k_rows, next_k, v_rows = scratch.k_rows, scratch.next_k_rows, scratch.v_rows
        k_strides, v_strides, block_size = caches.k_strides, caches.v_strides, caches.block_size
        count = min(TILE, stop - start)
        token_rows(next_k, caches.k, k_strides, item.table, block_size, start, count)
        while start < stop:
            k_rows, next_k = next_k, k_rows
            token_rows(v_rows, caches.v, v_strides, item.table, block_size, start, count)
            next_start = start + count
            next_count = max(0, min(TILE, stop - next_start))
            token_rows(next_k, caches.k, k_strides, item.table, block_size, next_start, next_count)
            score(scratch, item, count, k_rows, k_strides, v_rows, v_strides)
            for r in range(item.num_rows):
                weigh(scratch, r, start, count, options, item.seq)
            add(scratch, item, count, v_rows, v_strides, next_k if next_count > 0 else np.int64(0), k_strides)
            start, count = next_start, next_count

    return walk


@njit(nogil=True)
def merge(out, partial_out, maxima, sums, count, split_stride, head_dim, sink, v_scale):
    """Merge `count` states of one query row in order, write the output to the address `out` and return the LSE.

    State i has its accumulator, maximum and sum i * split_stride rows past the addresses given. A `sink` of -inf means
    no sink.
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
