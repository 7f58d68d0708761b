"""The memory of a thread: the state of its query rows, a tile, and the addresses of rows.

It is one allocation, passed on as addresses, since numba counts references wherever an array is passed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..compile import device, helper
from .access import get_float, get_int, get_int32, put_float, put_int, put_int32
from .steps.code import CACHE_LINE, FLOAT_BYTES, INT_BYTES, LANES
from .steps.query_rows import make_load_query, make_round_query, make_store_result
from .steps.softmax import make_clear
from .tiles import ROWS_BYTES, SCORES, address, vectors_of

_clear = make_clear()
NOTHING = np.float32(-np.inf)  # the maximum of no logits
ZERO = np.float32(0)
ONE = np.float32(1)


class Scratch(NamedTuple):
    """The addresses where the parts of a thread's memory begin.

    `rows` are the query rows of the largest work item, `places` those of a widened row, and `tile_tokens` TILE where
    tiles are staged, otherwise twice STEP.
    """

    k_rows: Any  # int64 (TILE,) addresses of the rows of a tile of keys
    next_k_rows: Any  # int64 (TILE,) those of the tile after it
    v_rows: Any  # int64 (TILE,) those of its values
    tile_rows: Any  # int64 (TILE,) those of `tile`
    v_tile_rows: Any  # int64 (TILE,) those of `v_tile`
    tile: Any  # float32 (tile_tokens, places) widened keys, or the rows of two steps
    v_tile: Any  # float32 (tile_tokens, places) widened values, or the pairs of a step
    k_scales: Any  # float32 (KV heads, TILE) of rows that have them
    v_scales: Any  # float32 (KV heads, TILE)
    queries: Any  # float32 (groups, places / 4, R, 4)
    acc: Any  # float32 (rows, places)
    running: Any  # float32 (rows, places) the sums of the splits merged so far
    scores: Any  # float32 (groups, TILE, R) logits, then weights
    maximum: Any  # float32 (rows,) the largest logit so far
    sum: Any  # float32 (rows,) the sum of the weights so far
    running_maximum: Any  # float32 (rows,)
    running_sum: Any  # float32 (rows,)
    rescale: Any  # float32 (rows,) by which this tile rescales the accumulator
    row_factors: Any  # float32 (rows,) by which whole numbers of queries are multiplied
    starts: Any  # int32 (rows,) the first position that a row sees
    stops: Any  # int32 (rows,) the one after the last
    position: Any  # int64 (rows,) the token's position in its sequence
    head: Any  # int64 (rows,) the query head
    mask: Any  # int64 (rows,) where the row begins in the mask, in keys
    num_vectors: Any  # vectors of a widened row
    row_bytes: Any  # bytes of a widened row


@helper
def scratch_memory(num_rows, kv_heads, head_dim, tile_tokens):
    """Memory for a Scratch, aligned to a cache line: a vector load that crosses a line costs two."""
    row_bytes = vectors_of(head_dim) * LANES * FLOAT_BYTES
    size = 5 * ROWS_BYTES + 2 * tile_tokens * row_bytes + 2 * kv_heads * SCORES
    size += num_rows * (3 * row_bytes + SCORES + 8 * FLOAT_BYTES + 3 * INT_BYTES) + CACHE_LINE
    memory = np.zeros((size + CACHE_LINE) // FLOAT_BYTES, np.float32)
    return memory[-address(memory) % CACHE_LINE // FLOAT_BYTES :]


@helper
def scratch_at(memory, num_rows, kv_heads, head_dim, tile_tokens):
    """Lay out a Scratch at the address of its memory, which must outlive it."""
    num_vectors = vectors_of(head_dim)
    row_bytes = num_vectors * LANES * FLOAT_BYTES
    tile = memory + 5 * ROWS_BYTES
    v_tile = tile + tile_tokens * row_bytes
    k_scales = v_tile + tile_tokens * row_bytes
    v_scales = k_scales + kv_heads * SCORES
    queries = v_scales + kv_heads * SCORES
    acc = queries + num_rows * row_bytes
    running = acc + num_rows * row_bytes
    scores = running + num_rows * row_bytes
    position = scores + num_rows * SCORES
    head = position + num_rows * INT_BYTES
    mask = head + num_rows * INT_BYTES
    maximum = mask + num_rows * INT_BYTES
    each = num_rows * FLOAT_BYTES
    tile_rows, v_tile_rows = memory + 3 * ROWS_BYTES, memory + 4 * ROWS_BYTES
    for t in range(tile_tokens):
        put_int(tile_rows + t * INT_BYTES, tile + t * row_bytes)
        put_int(v_tile_rows + t * INT_BYTES, v_tile + t * row_bytes)
    return Scratch(
        memory, memory + ROWS_BYTES, memory + 2 * ROWS_BYTES, tile_rows, v_tile_rows, tile, v_tile,
        k_scales, v_scales, queries, acc, running, scores,
        maximum, maximum + each, maximum + 2 * each, maximum + 3 * each, maximum + 4 * each, maximum + 5 * each,
        maximum + 6 * each, maximum + 7 * each, position, head, mask, num_vectors, row_bytes,
    )  # fmt: skip


@helper
def copy_floats(target, source, count):
    """Copy float32 values from one address to another."""
    for i in range(count):
        put_float(target + i * FLOAT_BYTES, get_float(source + i * FLOAT_BYTES))


@helper
def whole_groups(num_rows, group_rows):
    """The rows of as many whole groups as `num_rows` rows need."""
    return (num_rows + group_rows - 1) // group_rows * group_rows


@helper
def start_row(scratch, row, seq, token, position, head, options, length):
    """Store the position and head of a sequence's query token, and which keys it sees."""
    put_int(scratch.position + row * INT_BYTES, position)
    put_int(scratch.head + row * INT_BYTES, head)
    before, after = options.visible
    padding = np.int64(get_int32(options.leftpad + seq * 4)) if options.leftpad != 0 else np.int64(0)
    put_int32(scratch.starts + row * FLOAT_BYTES, np.int32(max(padding, position - before)))
    put_int32(scratch.stops + row * FLOAT_BYTES, np.int32(min(length, position + after + 1)))
    if options.mask != 0:
        start = get_int(options.mask_starts + seq * INT_BYTES) << options.mask_shift
        put_int(scratch.mask + row * INT_BYTES, start + token * length)


@helper
def start_states(scratch, num_rows):
    """Begin states that have seen no key, for all rows."""
    for r in range(num_rows):
        put_float(scratch.maximum + r * FLOAT_BYTES, NOTHING)
        put_float(scratch.sum + r * FLOAT_BYTES, ZERO)
    _clear(scratch.acc, num_rows * scratch.num_vectors)


@helper
def start_running(scratch, row, sink):
    """Begin a running state that has seen nothing but a sink; -inf stands for none."""
    put_float(scratch.running_maximum + row * FLOAT_BYTES, sink)
    put_float(scratch.running_sum + row * FLOAT_BYTES, ONE if sink > NOTHING else ZERO)
    _clear(scratch.running + row * scratch.row_bytes, scratch.num_vectors)


@lru_cache(maxsize=3)
def make_query_rows(*, even_odd: bool, rounded: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The device functions `put_query` and `finish_row`, for dims in order or with even ones before odd ones.

    Queries may be `rounded` to int16. All kernels share them, so that numba compiles them once for a process.
    """
    load_query, store_result = make_load_query(even_odd=even_odd), make_store_result(even_odd=even_odd)
    round_query = make_round_query()

    @device(even_odd)
    def put_query(scratch, row, group_rows, query, q_kind, factor, head_dim, places):
        """Load a query, times the number at `factor`, into its place among the rows of its group."""
        group, r = row // group_rows, row % group_rows
        target = scratch.queries + group * group_rows * scratch.row_bytes + r * 4 * FLOAT_BYTES
        load_query(target, group_rows, query, q_kind, factor, head_dim, places)

    @device(even_odd)
    def put_rounded(scratch, row, group_rows, query, q_kind, factor, head_dim, places):
        """Round a query to int16 into its place among the rows of its group."""
        group, r = row // group_rows, row % group_rows
        target = scratch.queries + group * group_rows * scratch.row_bytes + r * 4 * FLOAT_BYTES
        row_factor = scratch.row_factors + row * FLOAT_BYTES
        round_query(target, group_rows, query, q_kind, factor, head_dim, row_factor)

    @device(even_odd)
    def finish_row(out, q_kind, scratch, row, v_scale, head_dim, places):
        """Write the output of a row, in q's dtype, to the address `out` and return the LSE."""
        total = get_float(scratch.running_sum + row * FLOAT_BYTES)
        factor = scratch.rescale + row * FLOAT_BYTES
        put_float(factor, v_scale / total if total != ZERO else ZERO)  # without a key all sums are 0
        store_result(out, scratch.running + row * scratch.row_bytes, q_kind, factor, head_dim, places)
        if total == ZERO:
            return NOTHING
        maximum = get_float(scratch.running_maximum + row * FLOAT_BYTES)
        return np.float32((maximum if maximum > NOTHING else ZERO) + np.float32(np.log(total)))

    return put_rounded if rounded else put_query, finish_row
