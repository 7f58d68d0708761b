"""Tiles: TILE tokens of one sequence, and where the rows of their keys and values lie.

A kernel turns token positions into the addresses of their rows (`put_row_addresses`). Decode reads rows where they lie
(`steps.tile_pass`); prefill, and both kernels in layout vllm, widen a tile of them first (`make_stages`), in the order
of `steps.widen.dim_order`. Addresses and strides are in bytes. Of int8 rows the scales of a tile are gathered, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...layouts import FORMATS, CacheSpec
from ..compile import device, helper
from .access import EIGHT, copy_eight, get_byte, get_float, get_int, get_int32, prefetch, put_float, put_int, put_short
from .steps.code import CACHE_LINE, ELEMENT_BYTES, FLOAT_BYTES, INT_BYTES, LANES, STEP, TILE
from .steps.widen import (
    CHUNK_DIMS,
    PAIR,
    is_shuffled,
    make_load,
    make_widen,
    make_widen_pairs,
    make_widen_piece,
    wide_bytes,
)

TABLE_BYTES = 4
ROWS_BYTES = INT_BYTES * TILE
SCORES = FLOAT_BYTES * TILE


class TileConfig(NamedTuple):
    """What the code of a kernel depends on."""

    kind: str  # the cache's dtype
    vllm: bool  # layout vllm
    staged: bool  # tiles are widened before their steps
    whole: bool  # the dims of a row are whole chunks; False where it makes no difference
    group_rows: int  # query rows that share a vector

    @property
    def scaled(self) -> bool:
        """Whether rows have scales of their own."""
        return FORMATS[self.kind].scale == "row"


class Strides(NamedTuple):
    """Bytes from one block, head, token and (vllm layout) vector of K or dimension of V to the next."""

    block: int
    head: int
    token: int
    inner: int


def tile_config(spec: CacheSpec, group_rows: int, *, staged: bool) -> TileConfig:
    """The config for a pair of caches; tiles are always staged in layout vllm, where the bytes of a row are apart."""
    vllm = spec.layout == "vllm"
    whole = not (staged or vllm) and spec.head_dim % CHUNK_DIMS[spec.kind] == 0
    return TileConfig(spec.kind, vllm, staged or vllm, whole, group_rows)


def cache_strides(strides: tuple[int, ...], layout: str) -> Strides:
    """The strides of a K or V cache by which kernels find rows."""
    if layout == "NHD":
        return Strides(strides[0], strides[2], strides[1], 0)
    if layout == "HND":
        return Strides(strides[0], strides[1], strides[2], 0)
    return Strides(strides[0], strides[1], strides[3], strides[2])


def scale_strides(strides: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    """Bytes from the scale of a block, of a head and of a token to the next one's."""
    return (strides[0], strides[2], strides[1]) if layout == "NHD" else (strides[0], strides[1], strides[2])


@helper
def address(array):
    """The address of an array's first element."""
    return np.int64(array.ctypes.data)


@helper
def vectors_of(head_dim):
    """Vectors of a widened row."""
    return (head_dim + LANES - 1) // LANES


@helper
def put_row_addresses(rows, base, strides, table, block_size, start, first, stop):
    """Store rows[t] = the address of token start + t in head 0; `table` is the address of a row of a block table.

    Tokens before `first` and from `stop` on repeat the nearest row in between, which is safe to read; its results are
    masked.
    """
    logical = first // block_size
    offset = first - logical * block_size
    row = np.int64(0)
    for t in range(first - start, min(TILE, stop - start)):
        block = np.int64(get_int32(table + logical * TABLE_BYTES))
        row = base + block * strides[0] + offset * strides[2]
        put_int(rows + t * INT_BYTES, row)
        offset += 1
        if offset == block_size:
            offset = 0
            logical += 1
    for t in range(stop - start, TILE):
        put_int(rows + t * INT_BYTES, row)
    for t in range(first - start):
        put_int(rows + t * INT_BYTES, get_int(rows + (first - start) * INT_BYTES))


@helper
def gather_scales(target, base, strides, table, block_size, start, first, stop, first_head, heads):
    """Store target[h, t] = the scale of token start + t in head first_head + h; only those of first .. stop."""
    logical = first // block_size
    offset = first - logical * block_size
    while first < stop:
        count = min(block_size - offset, stop - first)
        block = np.int64(get_int32(table + logical * TABLE_BYTES))
        source = base + block * strides[0] + first_head * strides[1] + offset * strides[2]
        to = target + (first - start) * FLOAT_BYTES
        whole = count // EIGHT * EIGHT if strides[2] == FLOAT_BYTES else 0
        for _ in range(heads):
            for t in range(0, whole, EIGHT):
                copy_eight(to + t * FLOAT_BYTES, source + t * FLOAT_BYTES)
            for t in range(whole, count):
                put_float(to + t * FLOAT_BYTES, get_float(source + t * strides[2]))
            source += strides[1]
            to += SCORES
        first += count
        offset = 0
        logical += 1


@helper
def prefetch_scales(base, strides, table, block_size, first, stop, first_head, heads):
    """Prefetch the scales of tokens first .. stop: those of a head if they lie side by side, or those of a token."""
    logical = first // block_size
    offset = first - logical * block_size
    is_by_head = strides[2] == FLOAT_BYTES
    while first < stop:
        count = min(block_size - offset, stop - first)
        block = np.int64(get_int32(table + logical * TABLE_BYTES))
        source = base + block * strides[0] + first_head * strides[1] + offset * strides[2]
        for _ in range(heads if is_by_head else 1):
            for t in range(0, count, CACHE_LINE // FLOAT_BYTES if is_by_head else 1):
                prefetch(source + t * strides[2])
            source += strides[1]
        first += count
        offset = 0
        logical += 1


def make_stages(config: TileConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions that widen the rows first .. stop of keys and of values into a tile.

    Both take (tile, row_bytes, rows, offset, inner, head_dim, first, stop, places). `first` is a multiple of STEP.
    Values of int8 become pairs of tokens, a row for two of them.
    """
    kind, item, wide = config.kind, ELEMENT_BYTES[config.kind], wide_bytes(config.kind)
    widen, widen_piece, load = make_widen(kind), make_widen_piece(kind), make_load(kind)
    widen_pairs = make_widen_pairs()
    piece_dims, chunk_dims = 16 // item, CHUNK_DIMS[kind]
    shuffled = is_shuffled(kind)

    @device(config)
    def stage_rows(tile, row_bytes, rows, offset, inner, head_dim, first, stop, places):
        for t in range(first, stop, STEP):
            widen(tile + t * row_bytes, row_bytes, rows + t * INT_BYTES, offset, head_dim)

    @device(config)
    def stage_vllm_keys(tile, row_bytes, rows, offset, inner, head_dim, first, stop, places):
        whole = head_dim // chunk_dims * chunk_dims
        for dim in range(0, head_dim, piece_dims):
            place, stride = dim, 4
            if shuffled and dim < whole:
                place, stride = dim - dim % chunk_dims + dim % chunk_dims // piece_dims * 4, LANES
            for t in range(first, stop):
                at = get_int(rows + t * INT_BYTES) + offset + dim // piece_dims * inner
                widen_piece(tile + t * row_bytes + place * wide, stride * wide, at)

    @device(config)
    def stage_vllm_values(tile, row_bytes, rows, offset, inner, head_dim, first, stop, places):
        for dim in range(head_dim):
            place = tile + get_int(places + dim * INT_BYTES) * FLOAT_BYTES
            for t in range(first, stop):
                put_float(place + t * row_bytes, load(get_int(rows + t * INT_BYTES) + offset + dim * inner))

    @device(config)
    def stage_pairs(tile, row_bytes, rows, offset, inner, head_dim, first, stop, places):
        for t in range(first, stop, STEP):
            widen_pairs(tile + t // 2 * row_bytes, row_bytes, rows + t * INT_BYTES, offset, head_dim)

    @device(config)
    def stage_vllm_pairs(tile, row_bytes, rows, offset, inner, head_dim, first, stop, places):
        for dim in range(head_dim):
            place = tile + get_int(places + dim * INT_BYTES) * FLOAT_BYTES
            for t in range(first, stop):
                row, half = t // STEP * PAIR + t % PAIR, t // PAIR % 2
                code = np.int8(get_byte(get_int(rows + t * INT_BYTES) + offset + dim * inner))
                put_short(place + row * row_bytes + half * 2, np.int16(code))

    if config.scaled:
        return (stage_vllm_keys, stage_vllm_pairs) if config.vllm else (stage_rows, stage_pairs)
    return (stage_vllm_keys, stage_vllm_values) if config.vllm else (stage_rows, stage_rows)
