"""Copies of the kernel that splits keys: one lane looks up where a row of K and V lies, and several copy it.

Lanes exchange offsets by shuffles, or through shared memory where shuffles are calls (`PartShape.through_shared`).
"""

from __future__ import annotations

from ....device.cache_rows import make_row_offset
from ....device.intrinsics.thread import for_each
from ....device.intrinsics.warp import load_shared_pair, load_shared_words, store_shared_word
from ....device.language import int64, uint32
from ....device.source import Steps, device_function
from ...config import TensorConfig
from ..copies import make_copy_row, make_copy_rows
from .shape import PIECE, PartShape


def make_rows(config: TensorConfig, shape: PartShape) -> Steps:
    """``share(i, slots, cache, blocks, positions, lane)``, ``copy(i, place, slots, cache, blocks, positions, ...)``.

    ``..., row, has_chunk``. Both work on the i-th piece of a tile. With offsets that go through shared memory, the
    lanes store them in the warp's slots by `share`, synchronise, and `copy`. row is the first row that the lane copies,
    and place the address of its chunk there.
    """
    ROWS, WIDE, THROUGH_SHARED = shape.rows_of_thread, config.wide, shape.through_shared
    COPIED, SLOT_BYTES, HIGH = shape.copied_bytes, shape.slot_bytes, 4 * PIECE
    AT_A_TIME, words_at = (4, load_shared_words) if ROWS >= 4 else (2, load_shared_pair)
    TIMES, row_offset = ROWS // AT_A_TIME, make_row_offset(config.wide, config.vector_bytes)
    copy_row, copy_rows = make_copy_row(config, shape), make_copy_rows(config, shape)

    @device_function
    def share(i, slots, cache, blocks, positions, lane):
        where = uint32(uint32(slots + SLOT_BYTES * i) + uint32(lane << 2))
        offset = row_offset(cache, blocks[i], positions[i])
        store_shared_word(where, uint32(offset))
        if WIDE:
            store_shared_word(uint32(where + HIGH), uint32(offset >> 32))

    @device_function
    def copy_some(n, place, where, cache, has_chunk):
        low = words_at(uint32(where + 4 * AT_A_TIME * n))
        high = words_at(uint32(where + (HIGH + 4 * AT_A_TIME * n))) if WIDE else low
        for j in range(AT_A_TIME):
            offset = int64(high[j]) << 32 | int64(low[j]) if WIDE else low[j]
            copy_row(AT_A_TIME * n + j, place, cache, offset, has_chunk)

    @device_function
    def copy(i, place, slots, cache, blocks, positions, row, has_chunk):
        first = uint32(place + COPIED * i)
        if THROUGH_SHARED:
            where = uint32(uint32(slots + SLOT_BYTES * i) + uint32(row * (4 * ROWS)))
            for_each(copy_some, TIMES, (first, where, cache, has_chunk))
        else:
            copy_rows(first, cache, blocks[i], positions[i], has_chunk)

    return Steps(share, copy)
