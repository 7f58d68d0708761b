"""What a warpgroup copies: its own rows of Q, and half of each tile of K and of V."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....device.cache_rows import Cache
from ....device.intrinsics.thread import divmod_32
from ....device.intrinsics.warpgroup import ROW
from ....device.language import int64, uint32
from ....device.source import Steps, device_function
from ...config import TensorConfig
from ..copies import make_begin_query, make_copy_rows, make_find_row
from .shape import PANEL_CHUNKS, ROWS, WARPS, GroupShape, WgmmaShape


class Copied(NamedTuple):
    """What a thread copies of an item, and where it goes: of Q, and in the first stage."""

    keys: Any  # Cache, from the thread's chunk on
    values: Any
    q_place: Any
    k_place: Any
    v_place: Any
    q_row: Any  # its first row of Q
    chunk: Any


def make_copies(config: TensorConfig, shape: WgmmaShape) -> Steps:
    """The device functions ``copied_of``, ``copy_query``, ``find_rows``, ``copy_keys`` and ``copy_values``.

    ``find_rows(pages, first, lane, warp)`` finds rows of the tile that begins with token `first`, which
    ``copy_keys(copied, stage, rows)`` and ``copy_values`` start to copy.
    """
    half = GroupShape(config)
    KEYS, LANES, Q_PANEL, PANEL = half.keys, half.lanes, shape.q_panel_bytes, shape.panel_bytes
    K_START, V_START, TILE_BYTES, VECTOR_BYTES = shape.k_start, shape.v_start, shape.tile_bytes, config.vector_bytes
    begin_query, find_row = make_begin_query(config, half), make_find_row(config, half)
    copy_rows = make_copy_rows(config, half)

    @device_function
    def copied_of(shared, lane, warp, k, v):
        group, own_warp = divmod_32(warp, WARPS)
        row, chunk = divmod_32(uint32(uint32(own_warp << 5) + lane), LANES)
        panel, column = divmod_32(chunk, PANEL_CHUNKS)
        place = uint32(shared + uint32(uint32(row * ROW) + uint32(uint32(column ^ uint32(row & 7)) << 4)))
        of_tile = uint32(place + uint32(uint32(panel * PANEL) + uint32(group * (KEYS * ROW))))
        offset = int64(chunk) * VECTOR_BYTES
        return Copied(
            Cache(k.address + offset, k.block_stride, k.token_stride),
            Cache(v.address + offset, v.block_stride, v.token_stride),
            uint32(place + uint32(uint32(panel * Q_PANEL) + uint32(group * (ROWS * ROW)))),
            uint32(of_tile + K_START),
            uint32(of_tile + V_START),
            uint32(row + uint32(group * ROWS)),
            chunk,
        )

    @device_function
    def copy_query(copied, query, item):
        begin_query(copied.q_place, query, copied.q_row, copied.chunk, item, True)

    @device_function
    def find_rows(pages, first, lane, warp):
        group, own_warp = divmod_32(warp, WARPS)
        return find_row(pages, uint32(first + uint32(group * KEYS)), lane, own_warp)

    @device_function
    def copy_keys(copied, stage, rows):
        copy_rows(uint32(copied.k_place + uint32(stage * TILE_BYTES)), copied.keys, rows[0], rows[1], True)

    @device_function
    def copy_values(copied, stage, rows):
        copy_rows(uint32(copied.v_place + uint32(stage * TILE_BYTES)), copied.values, rows[0], rows[1], True)

    return Steps(copied_of, copy_query, find_rows, copy_keys, copy_values)
