"""The steps of flash attention that decode and prefill share: one tile of keys against a few query rows.

A query row is one query head of one token. Its state is a running maximum, a running sum and a float32 accumulator
(online softmax: Milakov and Gimelshein, 2018). States begin anew with every split of SPLIT tokens and are folded in
token order, in decode, which takes splits side by side, and in prefill, which takes them one after the other. Rows
never touch each other, so the bits of a row depend on its own keys alone, and not on how it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .access import get_float, get_int, get_int32
from .compile import helper, inlined
from .logits import make_modify
from .scratch import NOTHING, ONE, ZERO, start_states
from .steps.code import ELEMENT_BYTES
from .steps.dots import keys_at_once, make_dots
from .steps.fold import make_fold, make_rescale
from .steps.shapes import FLOAT_BYTES, INT_BYTES, TILE
from .steps.softmax import make_softmax
from .steps.values import make_values
from .tiles import SCORES, TileConfig, token_rows

SPLIT = 512  # tokens; a multiple of TILE

_fold, _rescale = make_fold(), make_rescale()


class Steps(NamedTuple):
    """The device functions of one TileConfig and score_mod."""

    dots: Callable[..., Any]
    weigh: Callable[..., Any]
    add_values: Callable[..., Any]


def make_steps(config: TileConfig, score_mod: Callable[..., Any] | None) -> Steps:
    """The steps of a tile: logits from its keys, weights from the logits, then the weighted sum of its values.

    Keys and values are float32 rows, named by the addresses of their addresses. `ahead` is 0 or the address of what a
    later step reads, as many bytes as this one, which is prefetched meanwhile.
    """
    R, item = config.group_rows, ELEMENT_BYTES[config.kind]
    MANY = 2 if R > 1 and keys_at_once(2, R) >= 4 else 1
    modify, modified = make_modify(score_mod), score_mod is not None
    many_dots, one_dots = make_dots(MANY, R, item), make_dots(1, R, item)
    many_values, one_values = make_values(MANY, R, item), make_values(1, R, item)
    softmax, masked_softmax = make_softmax(R, masked=False), make_softmax(R, masked=True)

    @inlined
    def dots(scratch, begin, num_rows, t, rows, offset, ahead):
        """Dot products of num_rows query rows from `begin` on with the STEP keys from token t of a tile on."""
        row, n = scratch.row_bytes, scratch.num_vectors
        scores, queries = scratch.scores + begin * SCORES + t * R * FLOAT_BYTES, scratch.queries + begin * row
        for _ in range(num_rows // (MANY * R)):
            many_dots(scores, queries, rows, offset, n, ahead)
            scores, queries, ahead = scores + MANY * R * SCORES, queries + MANY * R * row, 0
        if num_rows % (MANY * R) > 0:
            one_dots(scores, queries, rows, offset, n, ahead)

    @inlined
    def weigh(scratch, num_rows, first, count, options, seq):
        """Turn the logits of all rows with a tile whose first key is at position `first` into weights."""
        softcap, slopes = options.softcap, options.slopes
        if modified or softcap != ZERO or slopes != 0:
            for r in range(num_rows):
                scores = scratch.scores + r // R * R * SCORES + r % R * FLOAT_BYTES
                position, head = get_int(scratch.position + r * INT_BYTES), get_int(scratch.head + r * INT_BYTES)
                slope = get_float(slopes + head * FLOAT_BYTES) if slopes != 0 else ZERO
                modify(scores, R * FLOAT_BYTES, count, first, position, softcap, slope, head, seq)
        for r in range(0, num_rows, R):
            masked = False
            for row in range(r, r + R):
                start, stop = (
                    get_int32(scratch.starts + row * FLOAT_BYTES),
                    get_int32(scratch.stops + row * FLOAT_BYTES),
                )
                masked |= first < start or first + TILE > stop
            scores, state = scratch.scores + r * SCORES, r * FLOAT_BYTES
            maximum, total, factor = scratch.maximum + state, scratch.sum + state, scratch.rescale + state
            starts, stops = scratch.starts + state, scratch.stops + state
            if masked:
                masked_softmax(scores, maximum, total, factor, starts, stops, first)
            else:
                softmax(scores, maximum, total, factor, starts, stops, first)

    @inlined
    def add_values(scratch, begin, num_rows, t, rows, offset, count, ahead):
        """Add the weighted values t .. t + count of a tile to the accumulators of num_rows rows from `begin` on."""
        row, n = scratch.row_bytes, scratch.num_vectors
        acc, weights = scratch.acc + begin * row, scratch.scores + begin * SCORES + t * R * FLOAT_BYTES
        if t == 0:
            for r in range(begin, begin + num_rows):
                if get_float(scratch.rescale + r * FLOAT_BYTES) != ONE:
                    _rescale(scratch.acc + r * row, scratch.acc + r * row, scratch.rescale + r * FLOAT_BYTES, n)
        for _ in range(num_rows // (MANY * R)):
            many_values(acc, row, weights, rows, offset, count, n, ahead)
            acc, weights, ahead = acc + MANY * R * row, weights + MANY * R * SCORES, 0
        if num_rows % (MANY * R) > 0:
            one_values(acc, row, weights, rows, offset, count, n, ahead)

    return Steps(dots, weigh, add_values)


def make_walk(score: Any, weigh: Any, add: Any) -> Callable[..., Any]:
    """The device function that attends an item's query rows to the tokens start .. stop of its sequence.

    `start` is that of a tile. `score` multiplies the queries with a tile of keys and `add` sums a tile of values, each
    in its kernel's own way: (scratch, item, count, rows, strides, next_rows, next_strides), where `next_rows` are the
    ones that the other function reads next, to prefetch, or 0 after the last tile. An item is a NamedTuple with at
    least the fields seq, table (the address of its row of the block table), first (the first position that any row
    sees) and num_rows.
    """

    @inlined
    def walk(scratch, item, caches, options, start, stop):
        k_rows, next_k, v_rows = scratch.k_rows, scratch.next_k_rows, scratch.v_rows
        k_strides, v_strides, block_size, table = caches.k_strides, caches.v_strides, caches.block_size, item.table
        if start < stop:
            token_rows(next_k, caches.k, k_strides, table, block_size, start, max(start, item.first), stop)
        while start < stop:
            k_rows, next_k = next_k, k_rows
            token_rows(v_rows, caches.v, v_strides, table, block_size, start, max(start, item.first), stop)
            count, after = min(TILE, stop - start), start + TILE
            if after < stop:
                token_rows(next_k, caches.k, k_strides, table, block_size, after, after, stop)
            score(scratch, item, count, k_rows, k_strides, v_rows, v_strides)
            weigh(scratch, item.num_rows, start, count, options, item.seq)
            add(scratch, item, count, v_rows, v_strides, next_k if after < stop else np.int64(0), k_strides)
            start = after

    return walk


@helper
def fold(scratch, row, acc, maximum, total):
    """Fold the state at three addresses into the running one of a row; one that has seen nothing changes nothing."""
    if get_float(maximum) > NOTHING or get_float(total) != ZERO:
        state = row * FLOAT_BYTES
        running = scratch.running + row * scratch.row_bytes
        _fold(
            running,
            scratch.running_maximum + state,
            scratch.running_sum + state,
            acc,
            maximum,
            total,
            scratch.num_vectors,
        )


@helper
def fold_all(scratch, num_rows):
    """Fold the states of all rows into the running ones, and begin anew."""
    for r in range(num_rows):
        state = r * FLOAT_BYTES
        fold(scratch, r, scratch.acc + r * scratch.row_bytes, scratch.maximum + state, scratch.sum + state)
    start_states(scratch, num_rows)
