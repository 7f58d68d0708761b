"""The inner loop of the kernel that splits keys: each warp copies its own tiles, and waits for no other warp.

The copy of the next K starts when S is computed, and that of the next V when this V is used, so a warp always has one
of them in flight, and mostly both.
"""

from __future__ import annotations

from typing import Any

from ....device.cache_rows import Cache
from ....device.intrinsics.thread import divmod_32, for_each, local_array
from ....device.intrinsics.warp import any_lane, barrier_of_warp, end_group, sync_warp, wait_but
from ....device.language import cuda, float32, int64, uint32
from ....device.logits import UNSEEN
from ....device.source import device_function
from ...config import TensorConfig
from ..copies import make_begin_query, make_clear_gaps, make_convert_rows, make_find_row, make_row_scales
from ..products import make_fragment_offsets, make_multiply_keys, make_multiply_values
from ..softmax import make_hide_unseen, make_logits, make_softmax, make_softmax_by_sums
from ..tile import CHUNK_DIMS
from .rows import make_rows
from .shape import PIECE, PartShape


def make_attend_part(config: TensorConfig, shape: PartShape) -> Any:
    """The device function ``attend_part(registers, shared, thread, lane, warp, item, query, k, v, pages, ...)``.

    ``..., visible, options, span, unit``, as for the kernel of many rows, but the span is the warp's, and may be empty.
    It leaves O, sums and shifts in registers. All threads call it.
    """
    KEYS, PIECES, LANES, CHUNKS = shape.keys, shape.pieces, shape.lanes, shape.chunks
    ROW_BYTES, TILE_BYTES, PIECE_BYTES = shape.row_bytes, shape.tile_bytes, PIECE * shape.row_bytes
    K_START, CODES, CODES_BYTES, IS_CODED = shape.k_start, shape.codes_start, shape.codes_bytes, config.is_coded
    VECTOR_BYTES, IS_WHOLE, HAS_GAP = config.vector_bytes, shape.lanes == shape.chunks, shape.has_gap
    THROUGH_SHARED, CODES_OF_PIECE = shape.through_shared, shape.copied_bytes
    SLOTS, SLOTS_BYTES = shape.slots_start, shape.slots_bytes
    clear_gaps, begin_query = make_clear_gaps(shape), make_begin_query(config, shape)
    find_row, rows = make_find_row(config, shape), make_rows(config, shape)
    convert_rows = make_convert_rows(config, shape)
    fragment_offsets, multiply_keys = make_fragment_offsets(shape), make_multiply_keys(config, shape)
    begin_values, multiply_values = make_multiply_values(config, shape)
    logits, hide_unseen = make_logits(config, shape), make_hide_unseen(config, shape)
    softmax = (make_softmax_by_sums if shape.watches_sums else make_softmax)(config, shape)
    BY_ROW, SCALES, SCALES_BYTES = config.by_row, shape.scales_start, shape.scales_bytes
    V_SCALES, FACTORS, row_scales = 4 * KEYS, 16 * KEYS, make_row_scales(config, shape)
    convert_values = make_convert_rows(config, shape, is_scaled=BY_ROW)
    wait_one, wait_two = wait_but(1), wait_but(2)

    @device_function
    def sync_lanes(warp):
        """Make earlier stores of each lane visible to its warp."""
        if THROUGH_SHARED:
            barrier_of_warp(uint32(warp + 1))
        else:
            sync_warp()

    @device_function
    def find_piece(i, blocks, positions, pages, first, lane):
        blocks[i], positions[i] = find_row(pages, uint32(first + PIECE * i), lane, uint32(0))

    @device_function
    def copy_scales_of_piece(i, where, pages, blocks, positions):
        row_scales.copy(uint32(where + 4 * PIECE * i), pages, blocks[i], positions[i], uint32(0))

    @device_function
    def store_factors_of_piece(i, where, factors):
        row_scales.store_factor(uint32(where + 4 * PIECE * i), uint32(factors + 4 * PIECE * i), uint32(0))

    @device_function
    def convert_values_of_piece(i, codes, place, has_chunk, of_values):
        place = uint32(place + PIECE_BYTES * i)
        convert_values(uint32(codes + CODES_OF_PIECE * i), place, has_chunk, uint32(of_values + 4 * PIECE * i))

    @device_function
    def convert_piece(i, codes, place, has_chunk):
        convert_rows(uint32(codes + CODES_OF_PIECE * i), uint32(place + PIECE_BYTES * i), has_chunk, uint32(0))

    @device_function
    def attend_part(registers, shared, thread, lane, warp, item, query, k, v, pages, visible, options, span, unit):
        row, chunk = divmod_32(lane, LANES)
        has_chunk = True if IS_WHOLE else chunk < CHUNKS
        place = uint32(shared + uint32(uint32(row * ROW_BYTES) + uint32(uint32(chunk ^ uint32(row & 7)) << 4)))
        clear_gaps(shared, thread)
        if IS_CODED and THROUGH_SHARED and HAS_GAP:
            cuda.syncthreads()  # slots take the place of zeros that other warps store
        if warp == 0:
            begin_query(place, query, row, chunk, item, has_chunk)
        end_group()
        offset = int64(chunk if has_chunk else uint32(0)) * VECTOR_BYTES
        keys = Cache(k.address + offset, k.block_stride, k.token_stride)
        values = Cache(v.address + offset, v.block_stride, v.token_stride)
        k_tile = uint32(uint32(shared + K_START) + uint32(warp * 2 * TILE_BYTES))
        v_tile = uint32(k_tile + TILE_BYTES)
        k_place = uint32(place + uint32(k_tile - shared))
        v_place = uint32(k_place + TILE_BYTES)
        k_codes = uint32(uint32(shared + CODES) + uint32(uint32(warp * 2 * CODES_BYTES) + uint32(lane * CHUNK_DIMS)))
        v_codes = uint32(k_codes + CODES_BYTES)
        k_copies, v_copies = k_codes if IS_CODED else k_place, v_codes if IS_CODED else v_place

        first, blocks, positions = span.first, local_array(PIECES, uint32), local_array(PIECES, uint32)
        slots = v_tile if IS_CODED else uint32(uint32(shared + SLOTS) + uint32(warp * SLOTS_BYTES))
        for_each(find_piece, PIECES, (blocks, positions, pages, first, lane))
        if THROUGH_SHARED:
            for_each(rows.share, PIECES, (slots, keys, blocks, positions, lane))
            sync_lanes(warp)
        scales = uint32(uint32(shared + SCALES) + uint32(warp * SCALES_BYTES))  # tiles of KEYS take turns in two places
        found = row_scales.place(lane, uint32(0)) if BY_ROW else uint32(0)
        if first <= span.last:
            for_each(rows.copy, PIECES, (k_copies, slots, keys, blocks, positions, row, has_chunk))
            if BY_ROW:
                where = uint32(uint32(scales + found) + uint32(uint32(first & KEYS) << 3))
                for_each(copy_scales_of_piece, PIECES, (where, pages, blocks, positions))
        end_group()
        if THROUGH_SHARED:
            sync_lanes(warp)
            for_each(rows.share, PIECES, (slots, values, blocks, positions, lane))
            sync_lanes(warp)
        if first <= span.last:
            for_each(rows.copy, PIECES, (v_copies, slots, values, blocks, positions, row, has_chunk))
        end_group()
        for_each(find_piece, PIECES, (blocks, positions, pages, uint32(first + KEYS), lane))
        wait_two()
        cuda.syncthreads()  # so that Q is there for all

        offsets, largest_exponent = fragment_offsets(lane), local_array(1, float32)
        largest_exponent[0] = UNSEEN
        g, t = uint32(lane >> 2), uint32(lane & 3)
        while any_lane(first <= span.last):
            is_followed = any_lane(uint32(first + KEYS) <= span.last)
            wait_one()
            now = uint32(scales + uint32(uint32(first & KEYS) << 3))
            if IS_CODED:
                for_each(convert_piece, PIECES, (k_codes, k_place, has_chunk))
            if BY_ROW:
                factors = uint32(uint32(scales + FACTORS) + found)
                for_each(store_factors_of_piece, PIECES, (uint32(now + found), factors))
            sync_lanes(warp)
            multiply_keys(registers, offsets, shared, k_tile)
            if THROUGH_SHARED:
                for_each(rows.share, PIECES, (slots, keys, blocks, positions, lane))
            if THROUGH_SHARED or not IS_CODED:
                sync_lanes(warp)
            if is_followed:
                for_each(rows.copy, PIECES, (k_copies, slots, keys, blocks, positions, row, has_chunk))
                if BY_ROW:
                    where = uint32(uint32(scales + found) + uint32(uint32(uint32(first + KEYS) & KEYS) << 3))
                    for_each(copy_scales_of_piece, PIECES, (where, pages, blocks, positions))
            end_group()
            mine = uint32(first + uint32(t << 1))
            logits(registers, options, mine, uint32(now + uint32(t << 3)))
            if uint32(first - span.unmasked) >= span.num_unmasked:
                hide_unseen(registers, visible, shared, mine, uint32(0), g)
            softmax(registers, largest_exponent, unit, uint32(uint32(scales + FACTORS) + uint32(t << 3)))
            wait_one()
            if IS_CODED and THROUGH_SHARED:
                sync_lanes(warp)  # V takes the place of the slots
            if IS_CODED:
                of_values = uint32(uint32(now + V_SCALES) + uint32(row << 2))
                for_each(convert_values_of_piece, PIECES, (v_codes, v_place, has_chunk, of_values))
            sync_lanes(warp)
            begin_values(registers, offsets, v_tile)
            multiply_values(registers, offsets, v_tile)
            if IS_CODED and THROUGH_SHARED:
                sync_lanes(warp)  # slots take the place of V
            if THROUGH_SHARED:
                for_each(rows.share, PIECES, (slots, values, blocks, positions, lane))
            if THROUGH_SHARED or not IS_CODED:
                sync_lanes(warp)
            if is_followed:
                for_each(rows.copy, PIECES, (v_copies, slots, values, blocks, positions, row, has_chunk))
            end_group()
            for_each(find_piece, PIECES, (blocks, positions, pages, uint32(first + 2 * KEYS), lane))
            first = uint32(first + KEYS)

    return attend_part
