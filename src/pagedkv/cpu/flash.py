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

from .logits import make_modify
from .simd import add, broadcast, exp, fma, fold, keep, load, maximum, multiply, row_totals, splat, store, total
from .tiles import FLOAT_BYTES, TILE, TileConfig

DOT_LANES = 32
NOTHING = np.float32(-np.inf)
ZERO = np.float32(0)
ONE = np.float32(1)
SCORES = FLOAT_BYTES * TILE
TOTALS = 16
PARTIAL = FLOAT_BYTES * TOTALS


class Rows(NamedTuple):
    """What a work item knows of its query rows: arrays with one entry a row."""

    position: Any  # int64, the token's position in its sequence
    head: Any  # int64, the query head
    maximum: Any  # float32, the largest logit so far
    sum: Any  # float32, the sum of the weights so far
    rescale: Any  # float32, the factor of the accumulator in this step


class Scratch(NamedTuple):
    """Addresses of a thread's scratch, float32 all of it."""

    tile: Any  # (TILE, head_dim) keys or values
    queries: Any  # (rows, head_dim)
    acc: Any  # (rows, head_dim)
    partial: Any  # (TOTALS, TOTALS) partial sums of dot products
    scores: Any  # (rows of one step, TILE) logits, then weights
    rescale: Any  # (rows,) that of Rows


class Steps(NamedTuple):
    """The device functions of one TileConfig and score_mod."""

    attend_keys: Callable[..., Any]
    attend_values: Callable[..., Any]


def make_steps(config: TileConfig, score_mod: Callable[..., Any] | None) -> Steps:
    """The two halves of a step: logits and weights from a tile of keys, then the weighted sum of a tile of values."""
    lanes, dot_lanes = config.lanes, min(config.lanes, DOT_LANES)
    modify = make_modify(score_mod)
    modified = score_mod is not None

    @njit(nogil=True)
    def dot_products(scores, partial, tile, query, row):
        """scores[t] = query . row t of the tile, four rows at a time; `partial` takes the lanes of 16 sums."""
        for first in range(0, TILE, TOTALS):
            for t in range(0, TOTALS, 4):
                key = tile + (first + t) * row
                a = splat(ZERO, dot_lanes)
                b, c, d = a, a, a
                for i in range(0, row, dot_lanes * FLOAT_BYTES):
                    x = load(query + i, "float32", dot_lanes)
                    a = fma(x, load(key + i, "float32", dot_lanes), a)
                    b = fma(x, load(key + row + i, "float32", dot_lanes), b)
                    c = fma(x, load(key + 2 * row + i, "float32", dot_lanes), c)
                    d = fma(x, load(key + 3 * row + i, "float32", dot_lanes), d)
                cell = partial + t * PARTIAL
                store(cell, fold(a, TOTALS))
                store(cell + PARTIAL, fold(b, TOTALS))
                store(cell + 2 * PARTIAL, fold(c, TOTALS))
                store(cell + 3 * PARTIAL, fold(d, TOTALS))
            store(scores + first * FLOAT_BYTES, row_totals(partial))

    @njit(nogil=True)
    def softmax(scores, start, stop, before, summed):
        """Turn logits into weights against the running maximum: (maximum, sum, factor of what was before)."""
        logits = keep(load(scores, "float32", TILE), start, stop, NOTHING)
        highest = max(before, maximum(logits))
        base = highest if highest > NOTHING else ZERO
        weights = exp(add(logits, splat(-base, TILE)))
        store(scores, weights)
        rescale = total(exp(splat(before - base, 1)))
        return highest, summed * rescale + total(weights), rescale

    @njit(nogil=True)
    def attend_keys(rows, begin, end, scratch, head_dim, first, count, causal, window, softcap, slopes, seq):
        """Logits and weights of a tile whose first key is at position `first`, for the query rows begin..end."""
        row = head_dim * FLOAT_BYTES
        modifies = modified or softcap != ZERO or slopes.size > 0
        for r in range(begin, end):
            position = rows.position[r]
            start = max(np.int64(0), position - window + 1 - first)
            stop = min(count, position + 1 - first) if causal else count
            scores = scratch.scores + (r - begin) * SCORES
            if start < stop:
                dot_products(scores, scratch.partial, scratch.tile, scratch.queries + r * row, row)
                if modifies:
                    slope = slopes[rows.head[r]] if slopes.size else ZERO
                    modify(scores, count, first, position, softcap, slope, rows.head[r], seq)
                rows.maximum[r], rows.sum[r], rows.rescale[r] = softmax(
                    scores, start, stop, rows.maximum[r], rows.sum[r]
                )
            else:
                store(scores, splat(ZERO, TILE))
                rows.rescale[r] = ONE

    @njit(nogil=True)
    def add_to_4(acc, tile, weights, rescale, row, count):
        """acc[r] = rescale[r] * acc[r] + sum of weights[r, t] * row t of the tile, for four query rows."""
        for i in range(0, row, lanes * FLOAT_BYTES):
            a = multiply(load(acc + i, "float32", lanes), broadcast(rescale, lanes))
            b = multiply(load(acc + row + i, "float32", lanes), broadcast(rescale + FLOAT_BYTES, lanes))
            c = multiply(load(acc + 2 * row + i, "float32", lanes), broadcast(rescale + 2 * FLOAT_BYTES, lanes))
            d = multiply(load(acc + 3 * row + i, "float32", lanes), broadcast(rescale + 3 * FLOAT_BYTES, lanes))
            for t in range(count):
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

    @njit(nogil=True)
    def add_to_1(acc, tile, weights, rescale, row, count):
        """The same for one query row."""
        for i in range(0, row, lanes * FLOAT_BYTES):
            a = multiply(load(acc + i, "float32", lanes), broadcast(rescale, lanes))
            for t in range(count):
                value = load(tile + t * row + i, "float32", lanes)
                a = fma(broadcast(weights + t * FLOAT_BYTES, lanes), value, a)
            store(acc + i, a)

    @njit(nogil=True)
    def attend_values(begin, end, scratch, head_dim, count):
        """Add the weighted rows of a tile of values to the accumulators of the query rows begin..end."""
        row = head_dim * FLOAT_BYTES
        acc, weights, rescale = scratch.acc + begin * row, scratch.scores, scratch.rescale + begin * FLOAT_BYTES
        fours = (end - begin) // 4 * 4
        for r in range(0, fours, 4):
            add_to_4(acc + r * row, scratch.tile, weights + r * SCORES, rescale + r * FLOAT_BYTES, row, count)
        for r in range(fours, end - begin):
            add_to_1(acc + r * row, scratch.tile, weights + r * SCORES, rescale + r * FLOAT_BYTES, row, count)

    return Steps(attend_keys, attend_values)


@njit(nogil=True)
def scratch_size(num_rows, step_rows, head_dim):
    """How many float32 a Scratch takes, without the rescale factors."""
    return (TILE + 2 * num_rows) * head_dim + step_rows * TILE + TOTALS * TOTALS


@njit(nogil=True)
def scratch_at(memory, rescale, num_rows, step_rows, head_dim):
    """Lay a Scratch out in memory. Its owner must use that array afterwards: numba frees it after the last use."""
    queries = memory + TILE * head_dim * FLOAT_BYTES
    acc = queries + num_rows * head_dim * FLOAT_BYTES
    partial = acc + num_rows * head_dim * FLOAT_BYTES
    return Scratch(memory, queries, acc, partial, partial + TOTALS * PARTIAL, rescale)


@njit(nogil=True)
def fill(address, rows):
    """Copy (rows, head_dim) float32 values to an address."""
    for r in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            store(address + (r * rows.shape[1] + d) * FLOAT_BYTES, splat(rows[r, d], 1))


@njit(nogil=True)
def fetch(rows, address):
    """Copy (rows, head_dim) float32 values from an address."""
    for r in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            rows[r, d] = total(load(address + (r * rows.shape[1] + d) * FLOAT_BYTES, "float32", 1))


@njit(nogil=True)
def merge(out, partial_out, maxima, sums, first, last, row, sink, v_scale):
    """Merge the states first..last of one query row, in that order, into `out`; returns the LSE (sink -inf: none)."""
    highest = sink
    for s in range(first, last):
        highest = max(highest, maxima[s, row])
    base = highest if highest > NOTHING else ZERO
    denominator = np.float32(math.exp(sink - base))
    for s in range(first, last):
        denominator += sums[s, row] * np.float32(math.exp(maxima[s, row] - base))
    for d in range(out.size):
        out[d] = ZERO
    if denominator == ZERO:
        return NOTHING
    for s in range(first, last):
        weight = np.float32(math.exp(maxima[s, row] - base)) / denominator * v_scale
        for d in range(out.size):
            out[d] += weight * partial_out[s, row, d]
    return base + np.float32(math.log(denominator))
