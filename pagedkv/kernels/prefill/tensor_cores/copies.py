"""Copies of the kernel on tensor cores, from rows in global memory to rows in shared memory.

A row is cut into chunks of 8 elements. Chunk c of row r lies at chunk ``c ^ (r & 7)`` of its row, so that ldmatrix,
which reads the same chunk of 8 rows, and the copies, which write all chunks of some rows, both hit every bank once.

Each lane looks up one of the rows that it and its neighbours copy, two tiles ahead whatever the block size, and a
shuffle hands the row's offset to all of them. Tokens before the first one that a row sees repeat that one, and tokens
past the last one repeat the last: their logits are masked, and no other row is read.

Rows of fp8 caches are copied as codes, 16 at once if a row is a multiple of that. Each thread converts what it has
copied, so it waits for no other thread.
"""

from __future__ import annotations

from typing import Any

from ...device.cache_rows import make_address_at, make_row_offset, place_of_scale
from ...device.conversions import unpack
from ...device.halves import SIGNS, make_halves
from ...device.intrinsics.thread import bits_float, divmod_32, float_bits, for_each, load_4
from ...device.intrinsics.warp import (
    copy_4,
    copy_8,
    copy_vector,
    end_group,
    load_shared_pair,
    load_shared_word,
    load_shared_words,
    multiply_halves,
    pack_bfloat16,
    pack_float16,
    shuffle_among,
    store_shared_word,
    store_shared_words,
    wait_but,
)
from ...device.language import float32, int64, uint32
from ...device.source import Steps, device_function
from ..config import TensorConfig
from .tile import CHUNK, CHUNK_DIMS, TileShape


def make_chunk_place(shape: TileShape, rows_at_once: int) -> Any:
    """The device function ``chunk_place(first, i)``: the place of a thread's chunk of its i-th row.

    `first` is that of its first row. Rows are a power of two apart; if that is below 8, the chunk moves within its row,
    too.
    """
    AT_ONCE, ROW_BYTES = rows_at_once, shape.row_bytes

    @device_function
    def chunk_place(first, i):
        return uint32(uint32(first ^ uint32((AT_ONCE * i) % 8 << 4)) + uint32(AT_ONCE * ROW_BYTES * i))

    return chunk_place


def make_copy_query(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``copy_query(place, q, strides, row, last_row, has_chunk)``.

    The thread copies a chunk of some rows. place is where its chunk of the first one goes, number `row` of the
    sequence; q is the address of the chunk in row 0, and strides are those of a token and a head. Rows past the last
    one repeat it.
    """
    ROWS, AT_ONCE, GROUP_SIZE = shape.rows // shape.q_rows_at_once, shape.q_rows_at_once, config.group_size
    chunk_place = make_chunk_place(shape, AT_ONCE)

    @device_function
    def copy_row(i, place, q, strides, row, last_row):
        token, head = divmod_32(min(uint32(row + AT_ONCE * i), last_row), GROUP_SIZE)
        copy_vector(chunk_place(place, i), q + int64(token) * strides[0] + int64(head) * strides[1])

    @device_function
    def copy_query(place, q, strides, row, last_row, has_chunk):
        if has_chunk:
            for_each(copy_row, ROWS, (place, q, strides, row, last_row))

    return copy_query


def make_negate_query(shape: TileShape) -> Any:
    """The device function ``negate_query(place)``: change the sign of the chunks that a thread has copied."""
    ROWS, chunk_place = shape.rows // shape.q_rows_at_once, make_chunk_place(shape, shape.q_rows_at_once)

    @device_function
    def negate_row(i, place):
        where = chunk_place(place, i)
        x = load_shared_words(where)
        store_shared_words(
            where, uint32(x[0] ^ SIGNS), uint32(x[1] ^ SIGNS), uint32(x[2] ^ SIGNS), uint32(x[3] ^ SIGNS)
        )

    @device_function
    def negate_query(place):
        for_each(negate_row, ROWS, (place,))

    return negate_query


def make_begin_query(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``begin_query(place, query, row, chunk, item, has_chunk)``: copy Q to shared memory.

    The thread copies its chunk of this row of the item and of later ones. To negate q, it waits for its copies.
    """
    copy_query, negate_query, wait_all = make_copy_query(config, shape), make_negate_query(shape), wait_but(0)

    @device_function
    def begin_query(place, query, row, chunk, item, has_chunk):
        strides = (query.token_stride, query.head_stride)
        first, last = uint32(item.first_row + row), uint32(item.num_rows - 1)
        copy_query(place, query.address + int64(chunk) * CHUNK, strides, first, last, has_chunk)
        if query.is_negative:
            end_group()
            wait_all()
            if has_chunk:
                negate_query(place)

    return begin_query


def make_clear_gaps(shape: TileShape) -> Any:
    """The device function ``clear_gaps(shared, thread)``: zero the chunk that pads each row to whole steps."""
    HAS_GAP, ROWS = shape.has_gap, shape.all_rows
    GAP, ROW_BYTES, NUM_THREADS = shape.chunks, shape.row_bytes, shape.num_threads

    @device_function
    def clear_gaps(shared, thread):
        if HAS_GAP:
            row, zero = thread, uint32(0)
            while row < ROWS:
                where = uint32(uint32(row * ROW_BYTES) + uint32(uint32(GAP ^ uint32(row & 7)) << 4))
                store_shared_words(uint32(shared + where), zero, zero, zero, zero)
                row = uint32(row + NUM_THREADS)

    return clear_gaps


def make_row_and_piece(shape: TileShape) -> Any:
    """The device function ``row_and_piece(thread)``: which row of K or V a thread copies first, and which piece of it.

    The codes of a piece become two chunks, at an even and an odd place. Eight threads store at once. They have four
    pieces of an even and an odd row, which the swizzle sends to different places.
    """
    LANES, IN_PAIRS, BITS = shape.lanes, shape.in_pairs, shape.lanes.bit_length() - 1

    @device_function
    def row_and_piece(thread):
        if IN_PAIRS:
            piece = uint32(uint32(thread & 3) | uint32(uint32(uint32(thread >> 3) & (LANES // 4 - 1)) << 2))
            return uint32(uint32(uint32(thread >> 2) & 1) | uint32(uint32(thread >> (BITS + 1)) << 1)), piece
        return divmod_32(thread, LANES)

    return row_and_piece


def make_find_row(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``find_row(pages, first, lane, warp) -> block, position``.

    It finds a row of the tile that begins with token `first`. Of the lanes that share rows, lane i finds the i-th row
    that they copy; after the last row they begin again with the first one.
    """
    AT_ONCE, BLOCK_ROWS, BLOCK_SIZE = shape.warp_rows_at_once, shape.rows_at_once, config.block_size
    ROWS, row_and_piece = shape.rows_of_thread, make_row_and_piece(shape)

    @device_function
    def find_row(pages, first, lane, warp):
        (row, _), turn = row_and_piece(lane), uint32(lane % uint32(ROWS))
        row = uint32(uint32(warp * AT_ONCE) + uint32(row + uint32(turn * BLOCK_ROWS)))
        token = min(max(uint32(first + row), pages.first), pages.last)
        column = uint32(token // uint32(BLOCK_SIZE))
        return load_4(pages.table + int64(column) * 4), uint32(token - uint32(column * uint32(BLOCK_SIZE)))

    return find_row


LEAST_POWER, MOST_POWER = (127 - 24) << 23, (127 + 8) << 23  # bits of powers that codes keep all bits with in float16


@device_function
def power_of_scale(bits):
    """The power of two of a scale with these bits, between 2**-24 and 2**8."""
    return bits_float(min(max(uint32(bits & uint32(0x7F800000)), uint32(LEAST_POWER)), uint32(MOST_POWER)))


def make_row_scales(config: TensorConfig, shape: TileShape) -> Steps:
    """``place(lane, warp)``, ``copy(where, pages, block, position, piece)`` and ``store_factor(where, piece)``.

    They are of the row that the lane has found by `find_row`; of the lanes that have found it, the one with the lowest
    piece acts. `place` is what to add to the beginning of an array of scales for `where`. `copy` starts to copy the
    scales of the row. `store_factor` stores what the scale of its value has beside a power of two, the factor of P;
    factors is the place for it.
    """
    AT_ONCE, BLOCK_ROWS, ROWS, KEYS = shape.warp_rows_at_once, shape.rows_at_once, shape.rows_of_thread, shape.keys
    row_and_piece = make_row_and_piece(shape)

    @device_function
    def place(lane, warp):
        row, _ = row_and_piece(lane)
        row = uint32(row + uint32(uint32(lane % uint32(ROWS)) * BLOCK_ROWS))
        return uint32(uint32(uint32(warp * AT_ONCE) + row) << 2)

    @device_function
    def copy(where, pages, block, position, piece):
        is_first = piece < uint32(ROWS)
        copy_4(where, place_of_scale(pages.k_scales, block, position), uint32(4), is_first)
        copy_4(uint32(where + 4 * KEYS), place_of_scale(pages.v_scales, block, position), uint32(4), is_first)

    @device_function
    def store_factor(where, factors, piece):
        if piece < uint32(ROWS):
            bits = load_shared_word(uint32(where + 4 * KEYS))
            inverse = bits_float(uint32(uint32(0x7F000000) - float_bits(power_of_scale(bits))))
            store_shared_word(factors, float_bits(float32(bits_float(bits) * inverse)))

    return Steps(place, copy, store_factor)


def make_copy_row(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``copy_row(i, place, cache, offset, has_chunk)``: start copying the thread's i-th row.

    place is where the thread's chunk of its first row goes, and offset that of the row in the cache.
    """
    IS_CODED, IS_WHOLE, IN_PAIRS = config.is_coded, shape.lanes == shape.pieces_of_row, shape.in_pairs
    CODES = shape.copiers * shape.piece_dims
    address_at, chunk_place = (
        make_address_at(config.wide, config.vector_bytes),
        make_chunk_place(shape, shape.rows_at_once),
    )

    @device_function
    def copy_row(i, place, cache, offset, has_chunk):
        source = address_at(cache.address, offset)
        if IN_PAIRS:
            if IS_WHOLE or has_chunk:
                copy_vector(uint32(place + CODES * i), source)
        elif IS_CODED:
            copy_8(uint32(place + CODES * i), source, uint32(CHUNK_DIMS), has_chunk)
        elif IS_WHOLE or has_chunk:
            copy_vector(chunk_place(place, i), source)

    return copy_row


def make_copy_rows(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``copy_rows(place, cache, block, position, has_chunk)``: start copying a tile.

    place is where the thread's chunk of its first row goes; block and position come from `find_row`. Each lane looks up
    one row, and hands its offset to the other lanes that copy chunks of that row.
    """
    ROWS, WIDE, shuffle = shape.rows_of_thread, config.wide, shuffle_among(4 if shape.in_pairs else shape.lanes)
    row_offset, copy_row = make_row_offset(config.wide, config.vector_bytes), make_copy_row(config, shape)

    @device_function
    def copy_one(i, place, cache, offset, has_chunk):
        of_row = shuffle(uint32(offset), uint32(i))
        if WIDE:
            of_row = int64(shuffle(uint32(offset >> 32), uint32(i))) << 32 | int64(of_row)
        copy_row(i, place, cache, of_row, has_chunk)

    @device_function
    def copy_rows(place, cache, block, position, has_chunk):
        for_each(copy_one, ROWS, (place, cache, row_offset(cache, block, position), has_chunk))

    return copy_rows


def make_convert_rows(config: TensorConfig, shape: TileShape, *, is_scaled: bool = False) -> Any:
    """The device function ``convert_rows(codes, place, has_chunk, scales)``: a thread's chunks of a tile to operands.

    With `is_scaled` each row is multiplied by the power of two of its scale, which is exact; `scales` is where that of
    the thread's first row is.
    """
    ROWS, chunk_place = shape.rows_of_thread, make_chunk_place(shape, shape.rows_at_once)
    IS_FLOAT16, IN_PAIRS, CODES = config.q_kind == "float16", shape.in_pairs, shape.copiers * shape.piece_dims
    lower, upper = make_halves(config.kv_kind, config.hardware_fp8)
    widen, IS_SCALED, SCALE_BYTES = unpack(config.kv_kind, config.hardware_fp8), is_scaled, 4 * shape.rows_at_once

    @device_function
    def operands(word, power):
        if IS_FLOAT16:
            if IS_SCALED:
                both = pack_float16(power, power)
                return multiply_halves(lower(word), both), multiply_halves(upper(word), both)
            return lower(word), upper(word)
        a, b, c, d = widen(word)
        if IS_SCALED:
            a, b, c, d = float32(a * power), float32(b * power), float32(c * power), float32(d * power)
        return pack_bfloat16(a, b), pack_bfloat16(c, d)

    @device_function
    def store_chunk(where, first, second, power):
        a, b = operands(first, power)
        c, d = operands(second, power)
        store_shared_words(where, a, b, c, d)

    @device_function
    def convert_row(i, codes, place, scales):
        power = float32(1)
        if IS_SCALED:
            power = power_of_scale(load_shared_word(uint32(scales + SCALE_BYTES * i)))
        if IN_PAIRS:
            words = load_shared_words(uint32(codes + CODES * i))
            store_chunk(chunk_place(place, i), words[0], words[1], power)
            store_chunk(chunk_place(uint32(place ^ CHUNK), i), words[2], words[3], power)
        else:
            word = load_shared_pair(uint32(codes + CODES * i))
            store_chunk(chunk_place(place, i), word[0], word[1], power)

    @device_function
    def convert_rows(codes, place, has_chunk, scales):
        if has_chunk:
            for_each(convert_row, ROWS, (codes, place, scales))

    return convert_rows
