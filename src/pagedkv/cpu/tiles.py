"""Tiles: TILE tokens of one KV head as float32 rows, read from the blocks that hold them.

A kernel turns token positions into the addresses of their rows (`token_rows`) and widens the rows of one head into a
scratch tile (`stage_keys`, `stage_values`), where all query rows read them. While it computes it asks for the rows of
the tile after it (`ask`), a few cache lines at a time and in the order of their addresses: that keeps the memory busy
and never fills the processor's miss buffers. Every function is made for a `TileConfig`; addresses and strides are in
bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from ..layouts import CacheSpec
from .compile import device
from .simd import ELEMENT_BITS, get_int, get_int32, load, prefetch, put_int, store

TILE = 32
FLOAT_BYTES = 4
INT_BYTES = 8
TABLE_BYTES = 4
ROWS_BYTES = INT_BYTES * TILE
CACHE_LINE = 64
SUM_LANES = 64
NO_WINDOW = 2**62
NO_HEADS = np.empty(0, np.float32)


class TileConfig(NamedTuple):
    """What the code of a kernel depends on: the cache's dtype, the lanes of a vector, the layout."""

    kind: str
    lanes: int
    vllm: bool


class Strides(NamedTuple):
    """Bytes from one block, head, token and (vllm layout) vector of K or dimension of V to the next."""

    block: int
    head: int
    token: int
    inner: int


def tile_config(spec: CacheSpec) -> TileConfig:
    """The config for a pair of caches; lanes is the largest power of two up to SUM_LANES that divides head_dim."""
    return TileConfig(spec.kind, min(spec.head_dim & -spec.head_dim, SUM_LANES), spec.layout == "vllm")


def plain(array: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """A small array as the kernels are compiled for it: contiguous and writable, empty for None."""
    return NO_HEADS if array is None else np.require(array, requirements=["C", "W"])


def cache_strides(cache: npt.NDArray[Any], layout: str) -> Strides:
    """The strides of a K or V cache."""
    strides = cache.strides
    if layout == "NHD":
        return Strides(strides[0], strides[2], strides[1], 0)
    if layout == "HND":
        return Strides(strides[0], strides[1], strides[2], 0)
    return Strides(strides[0], strides[1], strides[3], strides[2])


@njit(nogil=True)
def address(array):
    """Where the first element of an array lies."""
    return np.int64(array.ctypes.data)


@njit(nogil=True)
def aligned(size):
    """Uninitialised float32 scratch that starts at a cache line: a vector load that crosses lines costs two."""
    scratch = np.empty(size + CACHE_LINE // FLOAT_BYTES, np.float32)
    skip = -address(scratch) % CACHE_LINE // FLOAT_BYTES
    return scratch[skip : skip + size]


@njit(nogil=True)
def token_rows(rows, base, strides, table, block_size, start, count):
    """rows[t] = the address of token start + t in head 0; `table` is the address of a row of a block table."""
    logical = start // block_size
    offset = start - logical * block_size
    for t in range(count):
        block = np.int64(get_int32(table + logical * TABLE_BYTES))
        put_int(rows + t * INT_BYTES, base + block * strides[0] + offset * strides[2])
        offset += 1
        if offset == block_size:
            offset = 0
            logical += 1


class Ahead(NamedTuple):
    """The rows of the tile after this one, and how far they have been asked for."""

    rows: Any  # address of their int64 addresses
    cursor: Any  # address of int64: the next row, the next byte in it, the number of rows, the lines of a head's K or V
    row_bytes: Any  # of a row; 0 when rows are not contiguous and nothing is asked for


AHEAD_CURSOR = 4


@njit(nogil=True)
def plan_ahead(ahead, k_rows, v_rows, k_strides, v_strides, first_head, heads, count):
    """List the rows of `heads` heads and `count` tokens: equal parts for each head, K then V, in address order."""
    _list_rows(ahead.rows, k_rows, k_strides, first_head, heads, count)
    _list_rows(ahead.rows + count * INT_BYTES, v_rows, v_strides, first_head, heads, count)
    put_int(ahead.cursor, 0)
    put_int(ahead.cursor + INT_BYTES, 0)
    put_int(ahead.cursor + 2 * INT_BYTES, 2 * heads * count)
    put_int(ahead.cursor + 3 * INT_BYTES, -(-ahead.row_bytes // CACHE_LINE) * count)


@njit(nogil=True)
def _list_rows(listed, rows, strides, first_head, heads, count):
    token_major = strides[2] > strides[1]
    outer, inner = (count, heads) if token_major else (heads, count)
    done = 0
    for i in range(outer):
        for j in range(inner):
            t, h = (i, j) if token_major else (j, i)
            put_int(listed, get_int(rows + t * INT_BYTES) + (first_head + h) * strides[1])
            listed += INT_BYTES
            done += 1
            if done == count:
                done = 0
                listed += count * INT_BYTES


@njit(nogil=True)
def ask(ahead, lines):
    """Ask for the next cache lines of the rows ahead."""
    row, byte = get_int(ahead.cursor), get_int(ahead.cursor + INT_BYTES)
    last = get_int(ahead.cursor + 2 * INT_BYTES)
    for _ in range(lines):
        if row >= last:
            break
        prefetch(get_int(ahead.rows + row * INT_BYTES) + byte)
        byte += CACHE_LINE
        if byte >= ahead.row_bytes:
            byte = 0
            row += 1
    put_int(ahead.cursor, row)
    put_int(ahead.cursor + INT_BYTES, byte)


@njit(nogil=True)
def lines_of_part(ahead):
    """How many cache lines one head's K or V has in the tile ahead."""
    return get_int(ahead.cursor + 3 * INT_BYTES)


class Tiles(NamedTuple):
    """The device functions of one TileConfig."""

    stage_keys: Callable[..., Any]
    stage_values: Callable[..., Any]


def make_tiles(config: TileConfig) -> Tiles:
    """The functions that read tiles of one kind of cache."""
    kind, lanes = config.kind, config.lanes
    item = ELEMENT_BITS[kind] // 8
    vector = 16 // item

    @device(config)
    def stage_rows(tile, rows, head, strides, head_dim, count):
        for t in range(count):
            row = get_int(rows + t * INT_BYTES) + head * strides[1]
            for d in range(0, head_dim, lanes):
                store(tile + (t * head_dim + d) * FLOAT_BYTES, load(row + d * item, kind, lanes))

    @device(config)
    def stage_vllm_keys(tile, rows, head, strides, head_dim, count):
        for c in range(head_dim // vector):
            for t in range(count):
                values = load(get_int(rows + t * INT_BYTES) + head * strides[1] + c * strides[3], kind, vector)
                store(tile + (t * head_dim + c * vector) * FLOAT_BYTES, values)

    @device(config)
    def stage_vllm_values(tile, rows, head, strides, head_dim, count):
        for d in range(head_dim):
            for t in range(count):
                value = load(get_int(rows + t * INT_BYTES) + head * strides[1] + d * strides[3], kind, 1)
                store(tile + (t * head_dim + d) * FLOAT_BYTES, value)

    if config.vllm:
        return Tiles(stage_vllm_keys, stage_vllm_values)
    return Tiles(stage_rows, stage_rows)
