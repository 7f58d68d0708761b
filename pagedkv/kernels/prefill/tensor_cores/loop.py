"""The inner loop on tensor cores: each tile of keys is copied while the one before is used."""

from __future__ import annotations

from typing import Any

from ...device.cache_rows import Cache
from ...device.intrinsics.thread import divmod_32, local_array
from ...device.intrinsics.warp import end_group, wait_but
from ...device.language import cuda, float32, int64, uint32
from ...device.source import device_function
from ..config import TensorConfig
from .copies import (
    make_begin_query,
    make_clear_gaps,
    make_convert_rows,
    make_copy_rows,
    make_find_row,
    make_row_and_piece,
    make_row_scales,
)
from .products import make_fragment_offsets, make_multiply_keys, make_multiply_values
from .softmax import make_hide_unseen, make_logits, make_softmax
from .tile import CHUNK, TileShape


def make_attend_tiles(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``attend_tiles(registers, shared, thread, lane, warp, item, query, k, v, pages, ...)``.

    ``..., visible, options, span, unit``. It leaves O, sums and shifts in registers; unit takes logits to units of
    log(2).
    """
    KEYS, STAGES, Q_LANES, CHUNKS = shape.keys, shape.stages, shape.q_lanes, shape.chunks
    PIECES, PIECE_DIMS, IN_PAIRS = shape.pieces_of_row, shape.piece_dims, shape.in_pairs
    ROW_BYTES, TILE_BYTES, WARP_BYTES = shape.row_bytes, shape.tile_bytes, shape.rows_of_warp * shape.row_bytes
    K_START, V_START, CODES, CODES_BYTES = shape.k_start, shape.v_start, shape.codes_start, shape.codes_bytes
    IS_CODED, Q_IS_WHOLE, IS_WHOLE = config.is_coded, shape.q_lanes == shape.chunks, shape.lanes == shape.pieces_of_row
    PIECE_BYTES = PIECE_DIMS if IS_CODED else CHUNK
    row_and_piece = make_row_and_piece(shape)
    clear_gaps, begin_query = make_clear_gaps(shape), make_begin_query(config, shape)
    find_row, copy_rows, convert_rows = (
        make_find_row(config, shape),
        make_copy_rows(config, shape),
        make_convert_rows(config, shape),
    )
    fragment_offsets, multiply_keys = make_fragment_offsets(shape), make_multiply_keys(config, shape)
    begin_values, multiply_values = make_multiply_values(config, shape)
    logits, softmax = make_logits(config, shape), make_softmax(config, shape)
    hide_unseen = make_hide_unseen(config, shape)
    BY_ROW, SCALES, FACTORS, row_scales = config.by_row, shape.scales_start, 16 * KEYS, make_row_scales(config, shape)
    convert_values, V_SCALES = make_convert_rows(config, shape, is_scaled=BY_ROW), 4 * KEYS
    wait_all = wait_but(0)

    @device_function
    def chunk_at(shared, row, chunk):
        return uint32(shared + uint32(uint32(row * ROW_BYTES) + uint32(uint32(chunk ^ uint32(row & 7)) << 4)))

    @device_function
    def attend_tiles(registers, shared, thread, lane, warp, item, query, k, v, pages, visible, options, span, unit):
        row, chunk = divmod_32(thread, Q_LANES)
        has_chunk = True if Q_IS_WHOLE else chunk < CHUNKS
        place = chunk_at(shared, row, chunk)
        clear_gaps(shared, thread)
        begin_query(place, query, row, chunk, item, has_chunk)
        if IN_PAIRS:
            row, chunk = row_and_piece(thread)
            has_chunk = True if IS_WHOLE else chunk < PIECES
            place = chunk_at(shared, row, uint32(chunk << 1))
        offset = int64(chunk if has_chunk else uint32(0)) * PIECE_BYTES
        keys = Cache(k.address + offset, k.block_stride, k.token_stride)
        values = Cache(v.address + offset, v.block_stride, v.token_stride)
        k_place, v_place = uint32(place + K_START), uint32(place + V_START)
        k_codes = uint32(uint32(shared + CODES) + uint32(thread * PIECE_DIMS))
        v_codes = uint32(k_codes + CODES_BYTES)

        first, stage = span.first, uint32(0)
        block, position = find_row(pages, first, lane, warp)
        scales, mine = uint32(shared + SCALES), uint32(0)  # tiles of KEYS take turns in two places
        if BY_ROW:
            mine = row_scales.place(lane, warp)
            row_scales.copy(uint32(scales + mine + uint32(uint32(first & KEYS) << 3)), pages, block, position, chunk)
        copy_rows(k_codes if IS_CODED else k_place, keys, block, position, has_chunk)
        if IS_CODED or STAGES == 2:
            copy_rows(v_codes if IS_CODED else v_place, values, block, position, has_chunk)
        end_group()
        v_block, v_position = block, position
        block, position = find_row(pages, uint32(first + KEYS), lane, warp)

        offsets, largest_exponent = fragment_offsets(lane), local_array(1, float32)
        g, t = uint32(lane >> 2), uint32(lane & 3)
        q_tile = uint32(shared + uint32(warp * WARP_BYTES))
        k_tile, v_tile = uint32(shared + K_START), uint32(shared + V_START)
        while first <= span.last:
            wait_all()
            cuda.syncthreads()
            is_followed = uint32(first + KEYS) <= span.last
            if IS_CODED:
                now = uint32(scales + uint32(uint32(first & KEYS) << 3))
                convert_rows(k_codes, k_place, has_chunk, uint32(0))
                convert_values(v_codes, v_place, has_chunk, uint32(uint32(now + V_SCALES) + uint32(row << 2)))
                if BY_ROW:
                    row_scales.store_factor(uint32(now + mine), uint32(uint32(scales + FACTORS) + mine), chunk)
                if is_followed:
                    copy_rows(k_codes, keys, block, position, has_chunk)
                    copy_rows(v_codes, values, block, position, has_chunk)
                    if BY_ROW:
                        later = uint32(scales + uint32(uint32(uint32(first + KEYS) & KEYS) << 3))
                        row_scales.copy(uint32(later + mine), pages, block, position, chunk)
                end_group()
                block, position = find_row(pages, uint32(first + 2 * KEYS), lane, warp)
                cuda.syncthreads()
            elif STAGES == 2:
                if is_followed:
                    other = uint32(TILE_BYTES - stage)
                    copy_rows(uint32(k_place + other), keys, block, position, has_chunk)
                    copy_rows(uint32(v_place + other), values, block, position, has_chunk)
                end_group()
                block, position = find_row(pages, uint32(first + 2 * KEYS), lane, warp)
            else:
                copy_rows(v_place, values, v_block, v_position, has_chunk)
                end_group()
            multiply_keys(registers, offsets, q_tile, uint32(k_tile + stage))
            if STAGES == 1 and not IS_CODED:
                wait_all()
                cuda.syncthreads()
                if is_followed:
                    copy_rows(k_place, keys, block, position, has_chunk)
                end_group()
                v_block, v_position = block, position
                block, position = find_row(pages, uint32(first + 2 * KEYS), lane, warp)
            begin_values(registers, offsets, uint32(v_tile + stage))
            key = uint32(first + uint32(t << 1))
            of_tile = uint32(uint32(scales + uint32(uint32(first & KEYS) << 3)) + uint32(t << 3))
            logits(registers, options, key, of_tile)
            if uint32(first - span.unmasked) >= span.num_unmasked:
                hide_unseen(registers, visible, shared, key, warp, g)
            softmax(registers, largest_exponent, unit, uint32(uint32(scales + FACTORS) + uint32(t << 3)))
            multiply_values(registers, offsets, uint32(v_tile + stage))
            first = uint32(first + KEYS)
            if STAGES == 2:
                stage = uint32(TILE_BYTES - stage)

    return attend_tiles
