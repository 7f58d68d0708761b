"""Tiles: TILE tokens of one sequence, and where the rows of their keys and values lie.

A kernel turns token positions into the addresses of their rows (`token_rows`). Decode reads rows where they lie and
widens them as it goes; prefill, whose query rows share them, and the vllm layout, whose rows are not contiguous, widen
those of one head into a scratch tile first (`stage_keys`, `stage_values`). Every function is made for a `TileConfig`;
addresses and strides are in bytes.
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

TILE = 64
FLOAT_BYTES = 4
INT_BYTES = 8
TABLE_BYTES = 4
ROWS_BYTES = INT_BYTES * TILE
SCORES = FLOAT_BYTES * TILE
CACHE_LINE = 64
SUM_LANES = 64


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
def token_rows(rows, base, strides, table, block_size, start, count):
    """rows[t] = the address of token start + t in head 0; `table` is the address of a row of a block table.

    Entries past `count` repeat the last row: it is safe to read, and its results are masked.
    """
    logical = start // block_size
    offset = start - logical * block_size
    row = np.int64(0)
    for t in range(count):
        block = np.int64(get_int32(table + logical * TABLE_BYTES))
        row = base + block * strides[0] + offset * strides[2]
        put_int(rows + t * INT_BYTES, row)
        offset += 1
        if offset == block_size:
            offset = 0
            logical += 1
    for t in range(count, TILE):
        put_int(rows + t * INT_BYTES, row)


@njit(nogil=True)
def tile_rows(rows, tile, head_dim):
    """rows[t] = the address of row t of a scratch tile."""
    for t in range(TILE):
        put_int(rows + t * INT_BYTES, tile + t * head_dim * FLOAT_BYTES)


class Tiles(NamedTuple):
    """The device functions of one TileConfig."""

    stage_keys: Callable[..., Any]
    stage_values: Callable[..., Any]


def make_tiles(config: TileConfig) -> Tiles:
    """The functions that widen the first `count` rows of one head into a float32 tile.

    `ahead` is the address of as many row addresses of the tile staged next, whose rows are prefetched meanwhile.
    """
    kind, lanes = config.kind, config.lanes
    item = ELEMENT_BITS[kind] // 8
    vector = 16 // item

    @device(config)
    def stage_rows(tile, rows, head, strides, head_dim, count, ahead, ahead_strides):
        for t in range(count):
            row = get_int(rows + t * INT_BYTES) + head * strides[1]
            later = get_int(ahead + t * INT_BYTES) + head * ahead_strides[1]
            for line in range(0, head_dim * item, CACHE_LINE):
                prefetch(later + line)
            for d in range(0, head_dim, lanes):
                store(tile + (t * head_dim + d) * FLOAT_BYTES, load(row + d * item, kind, lanes))

    @device(config)
    def stage_vllm_keys(tile, rows, head, strides, head_dim, count, ahead, ahead_strides):
        for c in range(head_dim // vector):
            for t in range(count):
                values = load(get_int(rows + t * INT_BYTES) + head * strides[1] + c * strides[3], kind, vector)
                store(tile + (t * head_dim + c * vector) * FLOAT_BYTES, values)

    @device(config)
    def stage_vllm_values(tile, rows, head, strides, head_dim, count, ahead, ahead_strides):
        for d in range(head_dim):
            for t in range(count):
                value = load(get_int(rows + t * INT_BYTES) + head * strides[1] + d * strides[3], kind, 1)
                store(tile + (t * head_dim + d) * FLOAT_BYTES, value)

    if config.vllm:
        return Tiles(stage_vllm_keys, stage_vllm_values)
    return Tiles(stage_rows, stage_rows)
