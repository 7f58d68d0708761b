"""The inner loop of the split kernel on tensor cores for many query heads: warps share rows in shared memory.

The registers of a warp have room for the sums of 16 query heads. With more, a team of two or four warps takes the same
tokens, each member with heads of its own, from rows that the thread block has copied to shared memory
(stages.py). Everything else is as in tensor.py: lanes read from shared memory what they would load from
global memory there, and both products, the softmax and the sums are the same steps.

A turn of the loop: wait for the oldest stage, a barrier, start to copy the stage that will be the youngest to where the
last turn has read, look up the tokens of the one after it, use the oldest. All warps make the same number of turns;
tokens past the end are zeros, and masked.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ..device.intrinsics import clear, for_each, local_array, shared_address
from ..device.source import device_function
from ..device.tensor_intrinsics import end_group, shuffle, wait_but
from .config import SplitConfig
from .fragments import make_multiply_keys, make_multiply_values, software_factor
from .lanes import OTHERS, SLOT_BYTES, WARP_BYTES, make_bits_of_warp, slots_bytes
from .pages import make_find_token
from .query import make_stage_query
from .shape import TensorShape
from .softmax import make_logits, make_mask, make_set_units, make_soften, make_start, make_until_last
from .stages import (
    StageShape,
    make_copy_rows,
    make_find_rows,
    make_places,
    make_read_keys,
    make_read_values,
    make_zero_ring,
)
from .sums import make_put_sums


def make_attend_with_many_heads(config: SplitConfig, pair_address: Any) -> Any:
    """The device function ``attend(...)``, as that of tensor.py."""
    shape, stage = TensorShape(config), StageShape(config)
    CHUNKS, STEP, HEAD_TILES, NUM_HEADS = shape.num_chunks, shape.step, shape.head_tiles, config.heads_of_warp
    CHECKED = config.checked
    FACTOR, MEMBERS, VECTOR_BYTES = float32(software_factor(config)), config.head_shares, config.vector_bytes
    TOKENS, ROWS, LANES, AHEAD = stage.tokens, stage.rows_of_lane, stage.lanes, stage.num_stages - 1
    STAGE_BYTES, RING_BYTES, Q_BYTES = stage.stage_bytes, stage.ring_bytes, shape.q_bytes
    NUM_FOUND, NUM_WORDS, NUM_Q, NUM_RAW = ROWS * AHEAD, shape.buffer, shape.num_q, shape.num_raw
    NUM_S, NUM_P, NUM_O = shape.num_scores, shape.num_p, shape.num_o
    THROUGH_SHARED, NUM_SLOT_WORDS = config.through_shared, slots_bytes(config) // 4
    ALL = uint32(0xFFFFFFFF)
    find_token, bits_of_warp = make_find_token(config), make_bits_of_warp(config)
    find_rows, copy_rows = make_find_rows(config, stage), make_copy_rows(config, stage)
    zero_ring, places = make_zero_ring(stage), make_places(stage)
    read_keys, read_values = make_read_keys(stage), make_read_values(stage)
    wait_for_oldest, wait_for_all = wait_but(AHEAD - 1), wait_but(0)
    stage_query = make_stage_query(config, shape)
    multiply_keys, multiply_values = make_multiply_keys(config, shape), make_multiply_values(config, shape)
    logits, mask, soften = make_logits(config, shape), make_mask(shape), make_soften(config, shape)
    start, set_units, until_last = make_start(config, shape), make_set_units(config, shape), make_until_last(shape)
    put_sums = make_put_sums(config, shape, pair_address)

    @device_function
    def use_keys(i, raw, words, q_frags, q_shared, where):
        read_keys(i, words, where)
        multiply_keys(i, raw, words, int64(0), q_frags, q_shared)

    @device_function
    def use_values(i, o, words, p, p_rest, where):
        read_values(i, words, where)
        multiply_values(i, o, words, int64(0), p, p_rest)

    @device_function
    def find_stage(i, blocks, positions, goods, token, table, last, num_blocks, report, seq):
        token = uint32(token + uint32(TOKENS * i))
        find_rows(blocks, positions, goods, ROWS * i, token, table, last, num_blocks, report, seq)

    @device_function
    def copy_stage(i, shared, blocks, positions, goods, token, last, rows):
        slot, token = uint32(shared + uint32(STAGE_BYTES * i)), uint32(token + uint32(TOKENS * i))
        copy_rows(slot, blocks, positions, goods, ROWS * i, token, last, *rows)
        end_group()

    @device_function
    def attend(
        shared, maxima_shared, sums_shared, q, q_head_stride, num_heads, k_head, v_head, table, first, last,
        k_block_stride, k_token_stride, v_block_stride, v_token_stride, num_blocks, report, seq, q_pos, head,
        scale, softcap, slopes, thread,
    ):  # fmt: skip
        lane = uint32(thread & uint32(31))
        # Said to be the same in all lanes, as in tensor.py.
        warp = shuffle(uint32(thread >> uint32(5)), 0)
        team, member = uint32(warp // uint32(MEMBERS)), uint32(warp % uint32(MEMBERS))
        g, t = uint32(lane >> 2), uint32(lane & uint32(3))
        # The last members of the last tile may have no heads: nobody asks for what they find.
        first_head = min(uint32(member * uint32(NUM_HEADS)), num_heads)
        num_heads = min(uint32(NUM_HEADS), uint32(num_heads - first_head))
        first_head = first_head if num_heads > 0 else uint32(0)
        q, head = q + int64(first_head) * q_head_stride, uint32(head + first_head)
        q_shared = uint32(uint32(shared + uint32(RING_BYTES)) + uint32(member * uint32(Q_BYTES)))
        q_shared = uint32(q_shared + uint32(lane << 4))
        others = uint32(0)
        if THROUGH_SHARED:
            slots = shared_address(cuda.shared.array(NUM_SLOT_WORDS, uint32, alignment=16))
            others = uint32(uint32(slots + uint32(warp * uint32(WARP_BYTES))) + uint32(OTHERS * SLOT_BYTES))
        words, q_frags = local_array(NUM_WORDS, uint32), local_array(NUM_Q, uint32)
        raw, s, o = (
            local_array(NUM_RAW, float32),
            local_array(NUM_S, float32),
            local_array(NUM_O, float32),
        )
        p, p_rest = local_array(NUM_P, uint32), local_array(NUM_P, uint32)
        pivots, sums = local_array(HEAD_TILES, float32), local_array(HEAD_TILES, float32)
        factors, slope = local_array(HEAD_TILES, float32), local_array(HEAD_TILES, float32)
        units, heads = local_array(HEAD_TILES, float32), local_array(HEAD_TILES, uint32)
        blocks, positions = local_array(NUM_FOUND, uint32), local_array(NUM_FOUND, uint32)
        goods = local_array(NUM_FOUND, uint32)
        start(o, pivots, sums, heads, slope, slopes, head, num_heads, g)

        # The longest chain first: table entries of the first stages, and their rows.
        row, piece = uint32(thread // uint32(LANES)), uint32(thread % uint32(LANES))
        k_lane, v_lane = k_head + int64(piece) * VECTOR_BYTES, v_head + int64(piece) * VECTOR_BYTES
        rows = (k_lane, v_lane, k_block_stride, k_token_stride, v_block_stride, v_token_stride, row, piece)
        token = uint32(first + row)
        for_each(find_stage, AHEAD, (blocks, positions, goods, token, table, last, num_blocks, report, seq))
        zero_ring(shared, thread)
        for_each(copy_stage, AHEAD, (shared, blocks, positions, goods, token, last, rows))
        token = uint32(token + uint32(AHEAD * TOKENS))
        find_rows(blocks, positions, goods, int64(0), token, table, last, num_blocks, report, seq)

        stage_query(q_frags, q_shared, factors, q, q_head_stride, num_heads, g, t, int64(team), scale < float32(0))
        set_units(units, factors, float32(scale * FACTOR))

        base = uint32(first + uint32(team * uint32(STEP)))
        k_from, v_from = places(team, g, t)
        oldest, youngest = shared, uint32(shared + uint32(AHEAD * STAGE_BYTES))
        while first <= last:
            good = True
            if CHECKED:
                mine = uint32(base + uint32(lane & uint32(STEP - 1)))
                _, _, good = find_token(table, mine, last, num_blocks, report, seq)
            wait_for_oldest()
            cuda.syncthreads()
            copy_rows(youngest, blocks, positions, goods, int64(0), token, last, *rows)
            end_group()
            token = uint32(token + uint32(TOKENS))
            find_rows(blocks, positions, goods, int64(0), token, table, last, num_blocks, report, seq)

            clear(raw, NUM_RAW)
            for_each(use_keys, CHUNKS, (raw, words, q_frags, q_shared, uint32(oldest + k_from)))
            here = uint32(base + uint32(t << uint32(2)))
            logits(s, raw, factors, softcap, heads, slope, here, q_pos, seq)
            valid = bits_of_warp(others, good) if CHECKED else ALL
            valid = until_last(valid, base, last)
            if valid != ALL:
                mask(s, valid, t)
            soften(s, units, pivots, sums, o, p, p_rest, others, g, t)
            for_each(use_values, CHUNKS, (o, words, p, p_rest, uint32(oldest + v_from)))
            youngest = oldest
            oldest = uint32(oldest + uint32(STAGE_BYTES))
            oldest = shared if oldest == uint32(shared + uint32(RING_BYTES)) else oldest
            first, base = uint32(first + uint32(TOKENS)), uint32(base + uint32(TOKENS))
        wait_for_all()
        cuda.syncthreads()  # the sums take the place of rows and Q
        row = uint32(member * uint32(NUM_HEADS))
        put_sums(shared, maxima_shared, sums_shared, pivots, sums, o, row, g, t, team, uint32(0))
        return FACTOR

    return attend
