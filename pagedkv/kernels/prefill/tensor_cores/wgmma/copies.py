"""What a warpgroup copies: its own rows of Q, and half of each tile of K and of V."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....device.cache_rows import Cache
from ....device.intrinsics.thread import divmod_32
from ....device.intrinsics.warp import end_group
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
    """The device functions ``copied_of``, ``begin``, ``find_rows``, ``copy_keys`` and ``copy_values``.

    ``begin(shared, lane, warp, item, tiles)`` starts to copy Q and the first tile of K of an item. ``find_rows(pages,
    first, lane, warp)`` finds rows of the tile that begins with token `first`, which ``copy_keys(copied, offset,
    rows)`` and ``copy_values`` start to copy; `offset` is that of a stage in bytes.
    """
    half = GroupShape(config)
    KEYS, LANES, Q_PANEL, PANEL = half.keys, half.lanes, shape.q_panel_bytes, shape.panel_bytes
    K_START, V_START, VECTOR_BYTES = shape.k_start, shape.v_start, config.vector_bytes
    copy_query, find_row = make_begin_query(config, half), make_find_row(config, half)
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
    def find_rows(pages, first, lane, warp):
        group, own_warp = divmod_32(warp, WARPS)
        return find_row(pages, uint32(first + uint32(group * KEYS)), lane, own_warp)

    @device_function
    def copy_keys(copied, offset, rows):
        copy_rows(uint32(copied.k_place + offset), copied.keys, rows[0], rows[1], True)

    @device_function
    def copy_values(copied, offset, rows):
        copy_rows(uint32(copied.v_place + offset), copied.values, rows[0], rows[1], True)

    @device_function
    def begin(shared, lane, warp, item, tiles):
        copied = copied_of(shared, lane, warp, tiles.k, tiles.v)
        copy_query(copied.q_place, tiles.query, copied.q_row, copied.chunk, item, True)
        copy_keys(copied, uint32(0), find_rows(tiles.pages, tiles.span.first, lane, warp))
        end_group()

    return Steps(copied_of, begin, find_rows, copy_keys, copy_values)
