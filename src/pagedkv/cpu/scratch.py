"""What a thread works in: the state of its query rows, a tile, and the addresses of rows.

One allocation, passed on as addresses: numba counts references wherever an array is passed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .simd import get_float, put_float, put_int
from .tiles import CACHE_LINE, FLOAT_BYTES, INT_BYTES, ROWS_BYTES, SCORES, TILE, address, tile_rows

NOTHING = np.float32(-np.inf)  # the maximum of no logits
ZERO = np.float32(0)


class Scratch(NamedTuple):
    """Where each part begins; `rows` are the query rows of the largest work item."""

    k_rows: Any  # int64 (TILE,) addresses of the rows of a tile of keys
    next_k_rows: Any  # int64 (TILE,) those of the tile after it
    v_rows: Any  # int64 (TILE,) those of its values
    staged_rows: Any  # int64 (TILE,) those of `tile`
    tile: Any  # float32 (TILE, head_dim) staged keys or values
    queries: Any  # float32 (rows, head_dim)
    acc: Any  # float32 (rows, head_dim)
    scores: Any  # float32 (rows, TILE) logits, then weights
    position: Any  # int64 (rows,) the token's position in its sequence
    head: Any  # int64 (rows,) the query head
    maximum: Any  # float32 (rows,) the largest logit so far
    sum: Any  # float32 (rows,) the sum of the weights so far
    rescale: Any  # float32 (rows,) by which this tile rescales the accumulator


@njit(nogil=True)
def scratch_memory(num_rows, head_dim):
    """Memory for a Scratch, aligned to a cache line: a vector load that crosses lines costs two."""
    size = 4 * ROWS_BYTES + TILE * head_dim * FLOAT_BYTES
    size += num_rows * (2 * head_dim * FLOAT_BYTES + SCORES + 2 * INT_BYTES + 3 * FLOAT_BYTES)
    memory = np.zeros((size + CACHE_LINE) // FLOAT_BYTES, np.float32)
    return memory[-address(memory) % CACHE_LINE // FLOAT_BYTES :]


@njit(nogil=True)
def scratch_at(memory, num_rows, head_dim):
    """Lay out a Scratch at the address of its memory, which must outlive it."""
    tile = memory + 4 * ROWS_BYTES
    queries = tile + TILE * head_dim * FLOAT_BYTES
    acc = queries + num_rows * head_dim * FLOAT_BYTES
    scores = acc + num_rows * head_dim * FLOAT_BYTES
    position = scores + num_rows * SCORES
    head = position + num_rows * INT_BYTES
    maximum = head + num_rows * INT_BYTES
    total = maximum + num_rows * FLOAT_BYTES
    rescale = total + num_rows * FLOAT_BYTES
    v_rows, staged_rows = memory + 2 * ROWS_BYTES, memory + 3 * ROWS_BYTES
    tile_rows(staged_rows, tile, head_dim)
    return Scratch(
        memory, memory + ROWS_BYTES, v_rows, staged_rows,
        tile, queries, acc, scores, position, head, maximum, total, rescale,
    )  # fmt: skip


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
