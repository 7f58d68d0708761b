"""v1 and v2: load q into shared memory, and compute q . k of one token with the lanes of a thread group."""

from __future__ import annotations

from typing import Any

from ..device.conversions import multiply_add, unpack_words
from ..device.intrinsics.thread import for_each, load_16, load_shared, opaque, store_shared
from ..device.language import cuda, float32, uint32
from ..device.sizes import ALL_LANES
from ..device.source import device_function
from .config import NUM_THREADS, AttentionConfig

MOST_IN_FLIGHT = 8


def make_stage_query(config: AttentionConfig) -> Any:
    """The device function ``stage_query(q_vecs, q, thread_idx)``: widen a row of q and store it in shared memory."""
    Q_VEC_SIZE = 16 // config.q_bytes
    NUM_Q_VECS = config.head_dim // Q_VEC_SIZE
    widen, store_vec = unpack_words(config.q_kind, 4), store_shared(Q_VEC_SIZE)

    @device_function
    def stage_query(q_vecs, q, thread_idx):
        for vec_idx in range(thread_idx, NUM_Q_VECS, NUM_THREADS):
            where = uint32(q_vecs + uint32(vec_idx * (Q_VEC_SIZE * 4)))
            store_vec(where, widen(load_16(q + vec_idx * 16)))

    return stage_query


def make_query_key(config: AttentionConfig) -> Any:
    """The device function ``query_key(q_vecs, k, k_vec_stride, thread_group_offset)``: this lane's part of q . k.

    Lane thread_group_offset of a thread group takes every THREAD_GROUP_SIZE-th 16-byte vector of the token whose first
    vector is at the address k; the vectors of a token are k_vec_stride bytes apart. Up to MOST_IN_FLIGHT of them are in
    registers at a time.
    """
    VEC_SIZE, THREAD_GROUP_SIZE = config.vec_size, config.thread_group_size
    NUM_VECS = config.head_dim // VEC_SIZE
    NUM_VECS_PER_THREAD = -(-NUM_VECS // THREAD_GROUP_SIZE)
    NUM_STEPS = -(-NUM_VECS_PER_THREAD // MOST_IN_FLIGHT)
    VECS_PER_STEP = -(-NUM_VECS_PER_THREAD // NUM_STEPS)
    IS_EVEN = VECS_PER_STEP * NUM_STEPS * THREAD_GROUP_SIZE == NUM_VECS
    NUM_WORDS = 4 * VECS_PER_STEP
    load_q, add_products = load_shared(VEC_SIZE), multiply_add(config.kv_kind, 4, config.hardware_fp8)

    @device_function
    def load_vec(j, k_vecs, k, k_vec_stride, first_vec):
        vec_idx = first_vec + j * THREAD_GROUP_SIZE
        if IS_EVEN or vec_idx < NUM_VECS:
            k_vecs[4 * j], k_vecs[4 * j + 1], k_vecs[4 * j + 2], k_vecs[4 * j + 3] = load_16(k + vec_idx * k_vec_stride)

    @device_function
    def add_vec(j, qk, k_vecs, q_vecs, first_vec):
        vec_idx = first_vec + j * THREAD_GROUP_SIZE
        if IS_EVEN or vec_idx < NUM_VECS:
            q_vec = load_q(uint32(q_vecs + uint32(vec_idx * (VEC_SIZE * 4))))
            k_vec = (k_vecs[4 * j], k_vecs[4 * j + 1], k_vecs[4 * j + 2], k_vecs[4 * j + 3])
            qk[0] = add_products(qk[0], k_vec, q_vec)

    @device_function
    def query_key(q_vecs, k, k_vec_stride, thread_group_offset):
        qk = cuda.local.array(1, float32)
        k_vecs = cuda.local.array(NUM_WORDS, uint32)
        for step in range(opaque(NUM_STEPS)):
            first_vec = thread_group_offset + step * (VECS_PER_STEP * THREAD_GROUP_SIZE)
            for_each(load_vec, VECS_PER_STEP, (k_vecs, k, k_vec_stride, first_vec))
            for_each(add_vec, VECS_PER_STEP, (qk, k_vecs, q_vecs, first_vec))
        return qk[0]

    return query_key


def make_sum_of_group(config: AttentionConfig) -> Any:
    """The device function ``sum_of_group(qk)``: the sum of a float32 over a thread group, in each of its lanes."""
    THREAD_GROUP_SIZE = config.thread_group_size

    @device_function
    def sum_of_group(qk):
        mask = THREAD_GROUP_SIZE // 2
        while mask >= 1:
            qk = float32(qk + cuda.shfl_xor_sync(ALL_LANES, qk, mask))
            mask //= 2
        return qk

    return sum_of_group
