"""Tiles: TILE tokens of one KV head as float32 rows, read from the blocks that hold them.

A kernel turns token positions into the addresses of their rows (`token_rows`) and widens the rows of one head into a
scratch tile (`stage_keys`, `stage_values`), where all query rows read them. Staging a row asks for one row of the tile
after it, in the order of the addresses (`rows_ahead`), since the memory is at its best on one stream. Every function
is made for a `TileConfig`; addresses and strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from ..layouts import CacheSpec
from .simd import ELEMENT_BITS, load, prefetch, store

TILE = 8
FLOAT_BYTES = 4
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


def cache_strides(cache: npt.NDArray[Any], layout: str, *, values: bool) -> Strides:
    """The strides of a K or V cache."""
    strides = cache.strides
    if layout == "NHD":
        return Strides(strides[0], strides[2], strides[1], 0)
    if layout == "HND":
        return Strides(strides[0], strides[1], strides[2], 0)
    if values:
        return Strides(strides[0], strides[1], strides[3], strides[2])
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
    """rows[t] = the address of token start + t in head 0."""
    logical = start // block_size
    offset = start - logical * block_size
    for t in range(count):
        rows[t] = base + np.int64(table[logical]) * strides[0] + offset * strides[2]
        offset += 1
        if offset == block_size:
            offset = 0
            logical += 1


@njit(nogil=True)
def rows_ahead(ahead, rows, strides, first_head, heads, count):
    """ahead[i] = the addresses of the rows of `heads` heads and `count` tokens, in the order they have in a block."""
    i = 0
    if strides[2] > strides[1]:
        for t in range(count):
            for h in range(heads):
                ahead[i] = rows[t] + (first_head + h) * strides[1]
                i += 1
    else:
        for h in range(heads):
            for t in range(count):
                ahead[i] = rows[t] + (first_head + h) * strides[1]
                i += 1


class Tiles(NamedTuple):
    """The device functions of one TileConfig."""

    stage_keys: Callable[..., Any]
    stage_values: Callable[..., Any]


def make_tiles(config: TileConfig) -> Tiles:
    """The functions that read tiles of one kind of cache."""
    kind, lanes = config.kind, config.lanes
    item = ELEMENT_BITS[kind] // 8
    vector = 16 // item

    @njit(nogil=True)
    def stage_rows(tile, rows, head, strides, head_dim, count, ahead):
        for t in range(count):
            if t < ahead.size:
                for offset in range(0, head_dim * item, CACHE_LINE):
                    prefetch(ahead[t] + offset)
            row = rows[t] + head * strides[1]
            for d in range(0, head_dim, lanes):
                store(tile + (t * head_dim + d) * FLOAT_BYTES, load(row + d * item, kind, lanes))

    @njit(nogil=True)
    def stage_vllm_keys(tile, rows, head, strides, head_dim, count, ahead):
        for c in range(head_dim // vector):
            for t in range(count):
                values = load(rows[t] + head * strides[1] + c * strides[3], kind, vector)
                store(tile + (t * head_dim + c * vector) * FLOAT_BYTES, values)

    @njit(nogil=True)
    def stage_vllm_values(tile, rows, head, strides, head_dim, count, ahead):
        for d in range(head_dim):
            for t in range(count):
                value = load(rows[t] + head * strides[1] + d * strides[3], kind, 1)
                store(tile + (t * head_dim + d) * FLOAT_BYTES, value)

    if config.vllm:
        return Tiles(stage_vllm_keys, stage_vllm_values)
    return Tiles(stage_rows, stage_rows)
