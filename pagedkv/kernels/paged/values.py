"""Steps of v1 and v2: the sum of V's rows weighted by the softmax, over the tokens of a lane, a warp, a thread block.

A row is one element of head_dim. A lane owns row `lane // NUM_V_VECS_PER_ROW + i * NUM_ROWS_PER_ITER` for each of its
sums `accs[i]`, with the other lanes of the row's vectors.
"""

from __future__ import annotations

from typing import Any

from ..device.conversions import multiply_add, narrow
from ..device.intrinsics.masks import bit_masks, masked
from ..device.intrinsics.thread import for_each, load_8, load_16, load_shared, store_2, store_4
from ..device.language import cuda, float32, uint16
from ..device.sizes import ALL_LANES, ELEMENT_BITS
from ..device.source import device_function
from .config import NUM_WARPS, AttentionConfig


def make_weigh_values(config: AttentionConfig) -> Any:
    """The device function ``weigh_values(accs, logits, v, v_row_stride, lane, first, last)``: add one chunk to accs.

    v is the address of this lane's vector of tokens in row 0, rows are v_row_stride bytes apart, and `logits` is the
    shared address of the softmax of these tokens. Tokens of the vector outside first..last-1 are masked out, and not
    multiplied by 0, since 0 * NaN is NaN.
    """
    HEAD_DIM, NUM_ROWS_PER_ITER = config.head_dim, config.num_rows_per_iter
    NUM_ROWS, NUM_V_VECS_PER_ROW = config.num_rows_per_thread, config.num_v_vecs_per_row
    IS_EVEN = HEAD_DIM % NUM_ROWS_PER_ITER == 0
    V_VEC_SIZE, BITS = config.v_vec_size, 8 * config.kv_bytes
    NUM_WORDS = V_VEC_SIZE * config.kv_bytes // 4
    load_vec, load_logits = load_16 if NUM_WORDS == 4 else load_8, load_shared(V_VEC_SIZE)
    make_masks, select = bit_masks(NUM_WORDS), masked(NUM_WORDS)
    add_products = multiply_add(config.kv_kind, NUM_WORDS, config.hardware_fp8)

    @device_function
    def weigh_row(i, accs, logits_vec, masks, v, v_row_stride, first_row):
        row_idx = first_row + i * NUM_ROWS_PER_ITER
        if IS_EVEN or row_idx < HEAD_DIM:
            v_vec = select(load_vec(v + row_idx * v_row_stride), masks)
            accs[i] = add_products(accs[i], v_vec, logits_vec)

    @device_function
    def weigh_values(accs, logits, v, v_row_stride, lane, first, last):
        logits_vec, masks = load_logits(logits), make_masks(first * BITS, last * BITS)
        for_each(weigh_row, NUM_ROWS, (accs, logits_vec, masks, v, v_row_stride, lane // NUM_V_VECS_PER_ROW))

    return weigh_values


def make_reduce_rows(config: AttentionConfig) -> Any:
    """The device function ``reduce_rows(accs, out_smem, warp_idx, lane)``: warp 0 gets the sums over all warps.

    It adds the lanes of a row first. Then the upper half of the warps hands its sums to the lower half, twice.
    out_smem, 2 * head_dim float32, reuses the memory of the logits.
    """
    HEAD_DIM, NUM_ROWS_PER_ITER = config.head_dim, config.num_rows_per_iter
    NUM_ROWS, NUM_V_VECS_PER_ROW = config.num_rows_per_thread, config.num_v_vecs_per_row

    @device_function
    def sum_of_lanes(i, accs):
        mask = NUM_V_VECS_PER_ROW // 2
        while mask >= 1:
            accs[i] = float32(accs[i] + cuda.shfl_xor_sync(ALL_LANES, accs[i], mask))
            mask //= 2

    @device_function
    def store_row(i, accs, out_smem, first_row):
        row_idx = first_row + i * NUM_ROWS_PER_ITER
        if row_idx < HEAD_DIM:
            out_smem[row_idx] = accs[i]

    @device_function
    def add_row(i, accs, out_smem, first_row):
        row_idx = first_row + i * NUM_ROWS_PER_ITER
        if row_idx < HEAD_DIM:
            accs[i] = float32(accs[i] + out_smem[row_idx])

    @device_function
    def reduce_rows(accs, out_smem, warp_idx, lane):
        for_each(sum_of_lanes, NUM_ROWS, (accs,))
        cuda.syncthreads()  # every warp has read its logits

        first_row, is_first = lane // NUM_V_VECS_PER_ROW, lane % NUM_V_VECS_PER_ROW == 0
        mid = NUM_WARPS // 2
        while mid >= 1:
            if mid <= warp_idx < 2 * mid and is_first:
                for_each(store_row, NUM_ROWS, (accs, out_smem[(warp_idx - mid) * HEAD_DIM :], first_row))
            cuda.syncthreads()
            if warp_idx < mid and is_first:
                for_each(add_row, NUM_ROWS, (accs, out_smem[warp_idx * HEAD_DIM :], first_row))
            cuda.syncthreads()
            mid //= 2

    return reduce_rows


def make_write_row(config: AttentionConfig, kind: str) -> Any:
    """The device function ``write_row(out, accs, v_scale, lane)``: store sums as elements of `kind` at an address."""
    HEAD_DIM, NUM_ROWS_PER_ITER = config.head_dim, config.num_rows_per_iter
    NUM_ROWS, NUM_V_VECS_PER_ROW = config.num_rows_per_thread, config.num_v_vecs_per_row
    rounded, NUM_BYTES = narrow(kind), ELEMENT_BITS[kind] // 8

    @device_function
    def write_element(i, out, accs, v_scale, first_row):
        row_idx = first_row + i * NUM_ROWS_PER_ITER
        if row_idx < HEAD_DIM:
            bits = rounded(float32(accs[i] * v_scale))
            if NUM_BYTES == 4:
                store_4(out + row_idx * 4, bits)
            else:
                store_2(out + row_idx * 2, uint16(bits))

    @device_function
    def write_row(out, accs, v_scale, lane):
        if lane % NUM_V_VECS_PER_ROW == 0:
            for_each(write_element, NUM_ROWS, (out, accs, v_scale, lane // NUM_V_VECS_PER_ROW))

    return write_row
