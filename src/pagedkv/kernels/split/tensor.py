"""The inner loop of the split kernel on tensor cores: caches of float16, bfloat16 and fp8, from memory to registers.

No shared memory, no barrier, no ldmatrix. The order of an mma's reduction index is free as long as both operands
agree, and so is the order of its rows and columns; so every lane loads 16 contiguous bytes of a row and hands the
pieces to several mma. A step is one or two tiles of 16 tokens; a warp takes every fourth step of its split. Where O of
all dims takes too many registers (`SplitConfig.dim_shares`), a pair of warps takes every second step: each has all of
S, and half of the dims of O.

    lane = 4 g + t, g = 0..7, t = 0..3                        m16n8k16: A 16 x 16, B 16 x 8, C 16 x 8

    S = Q K^T, heads x tokens, over head_dim
        B is K    token row(g), and row(g) + 2 for another B; row(g) = 4 (g >> 1) + (g & 1)
                  16 bytes at byte 64 v + 16 t of the row, for each vector v: k16 steps as they stand, since reduction
                  indices 2t, 2t + 1, 2t + 8, 2t + 9 are a quad of 4 neighbouring dims
        A is Q    the same quads of heads g (rows 0..7), see below for rows 8..15
        C is S    head g, tokens 4t, 4t + 1 of the tile, from another B 4t + 2, 4t + 3

    O^T = V^T P^T, dims x heads, over tokens
        A is V    tokens 4t .. 4t + 3, 16 bytes at byte 128 v + 16 g of the row; a permute pairs the tokens
                  row g is dim 8 g + 2 j of the vector, j = 0..3, row g + 8 the next one
                  (fp8: dim 16 g + 4 j + 2 z, z = 0, 1)
        B is P    head g, tokens 4t .. 4t + 3: both C of S, packed to 16 bits, where they are
        C is O    the same dims as A, of heads 2t and 2t + 1

Rows 8..15 of Q. With 9 to 16 heads they are heads 8..15. With fewer they would be free. If q is exact in 16 bits, they
hold the k16 step after that of rows 0..7 ("fold"): the fragment serves both steps, each with accumulators of its own of
which half is wanted. If q is float32, it is a sum of 2 or 3 terms of 16 bits, and they hold the second term (and what
is left beside the third one).

P has two terms of 16 bits, so that rounding it costs little accuracy (but infinite values may come out as NaN).

Two buffers of registers are in flight. The chunks of K and then of V that make a step take them in turns: when one
has been used, it is filled with what comes two later. Loads are never conditional: past the end they are of the last
token. The last step of a warp stands behind the loop; there alone, tokens past the end are masked: all of them, in a
warp that has none.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ..device.intrinsics import clear, for_each, local_array, shared_address
from ..device.source import device_function
from ..device.tensor_intrinsics import shuffle
from .config import SplitConfig
from .fragments import (
    make_load_keys,
    make_load_values,
    make_multiply_keys,
    make_multiply_values,
    make_zero_values,
    software_factor,
)
from .lanes import OTHERS, SLOT_BYTES, VALUES, WARP_BYTES, make_bits_of_warp, make_share, slots_bytes
from .pages import make_find_token, make_row_address, make_row_offset
from .query import make_stage_query
from .shape import TensorShape
from .softmax import make_logits, make_mask, make_set_units, make_soften, make_start, make_until_last
from .sums import make_put_sums


def make_attend_on_tensor_cores(config: SplitConfig, pair_address: Any) -> Any:
    """The device function ``attend(...)``: a warp's share of the split's tokens, its sums left in shared memory.

    It returns what the values are to be multiplied with.
    """
    shape = TensorShape(config)
    CHUNKS, BUFFER, STEP, NUM_TEAMS = shape.num_chunks, shape.buffer, shape.step, config.num_teams
    HEAD_TILES, CHECKED = shape.head_tiles, config.checked
    Q_IN_SHARED, Q_IS_SHARED = shape.q_in_shared, shape.q_is_shared
    FACTOR, DIM_SHARES = float32(software_factor(config)), config.dim_shares
    KEEP_Q, KEEP_T = shape.is_plain, shape.is_plain and shape.terms > 1 and shape.head_tiles == 2
    ROW_BYTES, V_VECTOR, V_MEMBER = config.row_bytes, shape.v_vector, 8 * shape.v_vector * shape.v_vectors
    NUM_BUFFERED, NUM_Q, NUM_RAW = 2 * shape.buffer, shape.num_q, shape.num_raw
    NUM_S, NUM_P, NUM_O = shape.num_scores, shape.num_p, shape.num_o
    THROUGH_SHARED, NUM_SLOT_WORDS = config.through_shared, slots_bytes(config) // 4
    ALL = uint32(0xFFFFFFFF)
    share, bits_of_warp = make_share(config), make_bits_of_warp(config)
    find_token, row_offset, row_address = make_find_token(config), make_row_offset(config), make_row_address(config)
    load_keys = make_load_keys(config, shape, row_address)
    load_values, zero_values = make_load_values(config, shape, row_address), make_zero_values(shape)
    stage_query = make_stage_query(config, shape)
    multiply_keys, multiply_values = make_multiply_keys(config, shape), make_multiply_values(config, shape)
    logits, mask, soften = make_logits(config, shape), make_mask(shape), make_soften(config, shape)
    start, set_units, until_last = make_start(config, shape), make_set_units(config, shape), make_until_last(shape)
    put_sums = make_put_sums(config, shape, pair_address)

    @device_function
    def use_keys(i, raw, buffers, q_frags, q_shared, k_lane, v_lane, k_offset, v_offset, room, g, t):
        """Chunk i of K, and what comes two later into its buffer if that belongs to this step."""
        at = (i % 2) * BUFFER
        multiply_keys(i, raw, buffers, at, q_frags, q_shared)
        if i + 2 < CHUNKS:
            load_keys(i + 2, buffers, at, k_lane, k_offset, g, t)
        elif i + 2 < 2 * CHUNKS:
            load_values(i + 2 - CHUNKS, buffers, at, v_lane, v_offset, room, t)

    @device_function
    def use_values(i, o, buffers, p, p_rest, k_lane, v_lane, next_k, v_offset, next_v, valid, room, g, t):
        """Chunk i of V, and what comes two later into its buffer."""
        at = ((CHUNKS + i) % 2) * BUFFER
        if CHECKED and valid != ALL:
            zero_values(buffers, at, valid, t)
        multiply_values(i, o, buffers, at, p, p_rest)
        if i + 2 < CHUNKS:
            load_values(i + 2, buffers, at, v_lane, v_offset, room, t)
        elif i + 2 < 2 * CHUNKS:
            load_keys(i + 2 - CHUNKS, buffers, at, k_lane, next_k, g, t)
        else:
            load_values(i + 2 - 2 * CHUNKS, buffers, at, v_lane, next_v, room, t)

    @device_function
    def use_last_values(i, o, buffers, p, p_rest, v_lane, v_offset, valid, room, t):
        """Chunk i of V in the warp's last step."""
        at = ((CHUNKS + i) % 2) * BUFFER
        if valid != ALL:
            zero_values(buffers, at, valid, t)
        multiply_values(i, o, buffers, at, p, p_rest)
        if i + 2 < CHUNKS:
            load_values(i + 2, buffers, at, v_lane, v_offset, room, t)

    @device_function
    def attend(
        shared, maxima_shared, sums_shared, q, q_head_stride, num_heads, k_head, v_head, table, first, last,
        k_block_stride, k_token_stride, v_block_stride, v_token_stride, num_blocks, report, seq, q_pos, head,
        scale, softcap, slopes, thread,
    ):  # fmt: skip
        lane = uint32(thread & uint32(31))
        # Said to be the same in all lanes, so that loops over steps need no code for lanes that part.
        warp = shuffle(uint32(thread >> uint32(5)), 0)
        team, member = uint32(warp // uint32(DIM_SHARES)), uint32(warp % uint32(DIM_SHARES))
        g, t = uint32(lane >> 2), uint32(lane & uint32(3))
        # Through a shuffle, so that ptxas keeps what it comes to instead of finding it again in each step. Options have
        # no registers for it, nor have up to 8 heads of 256 dims for t, and other ones gain nothing.
        q_shared = uint32(shared + uint32(lane * uint32(16)))
        if KEEP_T:
            t = shuffle(t, lane)
        if KEEP_Q:
            q_shared = shuffle(q_shared, lane)
        v_first = int64(g) * V_VECTOR + int64(member) * V_MEMBER
        k_lane, v_lane, room = k_head + int64(t) * 16, v_head + v_first, ROW_BYTES - v_first
        keys = values = both_values = others = uint32(0)
        if THROUGH_SHARED:
            slots = shared_address(cuda.shared.array(NUM_SLOT_WORDS, uint32, alignment=16))
            keys = uint32(slots + uint32(warp * uint32(WARP_BYTES)))
            values, others = uint32(keys + uint32(VALUES * SLOT_BYTES)), uint32(keys + uint32(OTHERS * SLOT_BYTES))
            both_values = uint32(uint32(values + values) + uint32(SLOT_BYTES))
        buffers, q_frags = local_array(NUM_BUFFERED, uint32), local_array(NUM_Q, uint32)
        raw, s, o = (
            local_array(NUM_RAW, float32),
            local_array(NUM_S, float32),
            local_array(NUM_O, float32),
        )
        p, p_rest = local_array(NUM_P, uint32), local_array(NUM_P, uint32)
        pivots, sums = local_array(HEAD_TILES, float32), local_array(HEAD_TILES, float32)
        factors, slope = local_array(HEAD_TILES, float32), local_array(HEAD_TILES, float32)
        units, heads = local_array(HEAD_TILES, float32), local_array(HEAD_TILES, uint32)
        start(o, pivots, sums, heads, slope, slopes, head, num_heads, g)

        # The longest chain first: table entries of the first two steps, and the first keys.
        base, mine = uint32(first + uint32(team * uint32(STEP))), uint32(lane & uint32(STEP - 1))
        block, position, good = find_token(table, uint32(base + mine), last, num_blocks, report, seq)
        k_offset = share(keys, row_offset(block, position, k_block_stride, k_token_stride))
        v_offset = share(values, row_offset(block, position, v_block_stride, v_token_stride))
        valid = bits_of_warp(others, good) if CHECKED else ALL
        token = uint32(uint32(base + mine) + uint32(NUM_TEAMS * STEP))
        block, position, good = find_token(table, token, last, num_blocks, report, seq)
        load_keys(int64(0), buffers, int64(0), k_lane, k_offset, g, t)
        if CHUNKS > 1:
            load_keys(int64(1), buffers, int64(BUFFER), k_lane, k_offset, g, t)

        stage_query(q_frags, q_shared, factors, q, q_head_stride, num_heads, g, t, int64(warp), scale < float32(0))
        set_units(units, factors, float32(scale * FACTOR))
        if Q_IN_SHARED:
            cuda.syncthreads()

        if CHUNKS == 1:
            load_values(int64(0), buffers, int64(BUFFER), v_lane, v_offset, room, t)
        while uint32(base + uint32(NUM_TEAMS * STEP)) <= last:
            clear(raw, NUM_RAW)
            for_each(
                use_keys, CHUNKS, (raw, buffers, q_frags, q_shared, k_lane, v_lane, k_offset, v_offset, room, g, t)
            )
            k_offset = share(keys, row_offset(block, position, k_block_stride, k_token_stride))
            values = uint32(both_values - values)
            next_v = share(values, row_offset(block, position, v_block_stride, v_token_stride))
            next_valid = bits_of_warp(others, good) if CHECKED else ALL
            token = uint32(uint32(base + mine) + uint32(2 * NUM_TEAMS * STEP))
            block, position, good = find_token(table, token, last, num_blocks, report, seq)
            if CHUNKS == 1:
                load_keys(int64(0), buffers, int64(0), k_lane, k_offset, g, t)
            here = uint32(base + uint32(t << uint32(2)))
            logits(s, raw, factors, softcap, heads, slope, here, q_pos, seq)
            if CHECKED and valid != ALL:
                mask(s, valid, t)
            soften(s, units, pivots, sums, o, p, p_rest, others, g, t)
            for_each(
                use_values,
                CHUNKS,
                (o, buffers, p, p_rest, k_lane, v_lane, k_offset, v_offset, next_v, valid, room, g, t),
            )
            base, v_offset, valid = uint32(base + uint32(NUM_TEAMS * STEP)), next_v, next_valid
        clear(raw, NUM_RAW)
        for_each(use_keys, CHUNKS, (raw, buffers, q_frags, q_shared, k_lane, v_lane, k_offset, v_offset, room, g, t))
        valid = until_last(valid, base, last)
        here = uint32(base + uint32(t << uint32(2)))
        logits(s, raw, factors, softcap, heads, slope, here, q_pos, seq)
        if valid != ALL:
            mask(s, valid, t)
        soften(s, units, pivots, sums, o, p, p_rest, others, g, t)
        for_each(use_last_values, CHUNKS, (o, buffers, p, p_rest, v_lane, v_offset, valid, room, t))
        if Q_IS_SHARED:
            cuda.syncthreads()  # the sums take the place of Q
        # Not those from before, which registers would hold through the loop; and a shuffle has hidden the range of t.
        warp, g, t = uint32(thread >> uint32(5)), uint32(uint32(thread >> 2) & uint32(7)), uint32(thread & uint32(3))
        team, member = uint32(warp // uint32(DIM_SHARES)), uint32(warp % uint32(DIM_SHARES))
        put_sums(shared, maxima_shared, sums_shared, pivots, sums, o, uint32(0), g, t, team, member)
        return FACTOR

    return attend
