"""Paged attention v1 and v2, after vLLM's kernels of the same names: one query token per sequence, layout "vllm".

    q         (num_seqs, num_heads, head_dim)
    K cache   (num_blocks, num_kv_heads, head_dim / x, block_size, x)   x elements are 16 bytes
    V cache   (num_blocks, num_kv_heads, head_dim, block_size)

Grid. x = seq_idx * num_heads + head_idx: the heads that share a KV head are neighbours, and find its blocks in L2.
y, continued in z past the limit of y, is partition_idx: 0 in v1; v2 counts partitions from the first one seen.

Who owns what. A thread block of 4 warps owns one query head, over all tokens (v1) or those of one partition (v2). A
warp takes every fourth chunk: the tokens of one block, or 32 tokens of a block that is longer. In K a thread group of
32 / chunk_size lanes owns a token of the chunk. In V a lane owns the tokens of one 16-byte vector in every
NUM_ROWS_PER_ITER-th row (of head_dim), summed over lanes and warps at the end.

Shared memory. Static: q_vecs, head_dim float32; red_smem, 8 float32; the length that all threads agree on. Dynamic,
see `shared_bytes`: the logits of the thread block's tokens, and later out_smem, 2 * head_dim float32, in the same
memory.

Bad values. A length out of range counts as 0, and block ids are trusted: ../check.py looks at both first, if asked to.

v2 is v1 over a partition. It stores a float32 output, the largest logit and the sum of exponentials of every partition
for `make_v2_reduce` of reduction.py.
"""

from __future__ import annotations

import math

from ..device.cache_rows import SCALE_STRIDES, scale_of_row, scales_of_keys, scales_of_values
from ..device.intrinsics.thread import address, larger, shared_address
from ..device.language import cuda, float32, float64, int32, int64, types, uint32
from ..device.logits import NONE, make_modify
from ..device.sizes import SCALED_BY_ROW, WARP_SIZE
from ..device.source import KernelSource
from ..device.visible import VISIBLE
from . import config as constants
from .config import NUM_THREADS, NUM_WARPS, AttentionConfig
from .keys import make_query_key, make_stage_query, make_sum_of_group
from .softmax import block_max, softmax
from .tables import length_of, make_tokens_of
from .values import make_reduce_rows, make_weigh_values, make_write_row

BYTES, INTS, FLOATS = types.CPointer(types.uint8), types.CPointer(int32), types.CPointer(float32)
SIGNATURE = types.void(
    *(BYTES, FLOATS, FLOATS, FLOATS),  # out, lse, exp_sums, max_logits
    *(BYTES, BYTES, BYTES, INTS, INTS),  # q, k_cache, v_cache, block_tables, seq_lens
    *(FLOATS, FLOATS, FLOATS, FLOATS),  # alibi_slopes, sinks, k_scale, v_scale
    *(*[int64] * 3, VISIBLE, SCALE_STRIDES),  # sizes, visible, strides of scales
    *[int64] * 12,  # the stride of a table's row in entries, other strides in bytes
    *[float64] * 4,  # scale, softcap, and k_scale and v_scale where they are numbers
)


def shared_bytes(config: AttentionConfig, num_tokens: int) -> int:
    """Dynamic shared memory of a thread block with at most `num_tokens` tokens in whole chunks."""
    return 4 * max(num_tokens, NUM_WARPS // 2 * config.head_dim)


def static_shared_bytes(config: AttentionConfig) -> int:
    """Static shared memory of a thread block, up to the multiple of 16 bytes where dynamic memory begins."""
    return 4 * (config.head_dim + 2 * NUM_WARPS) + 16


def make_v1(config: AttentionConfig) -> KernelSource:
    """The kernel in which each query head attends to all tokens of its sequence."""
    return _make_paged_attention(config, 0)


def make_v2(config: AttentionConfig) -> KernelSource:
    """The kernel in which each query head attends to one partition of its sequence."""
    return _make_paged_attention(config, constants.PARTITION_SIZE)


def _make_paged_attention(config: AttentionConfig, PARTITION_SIZE: int) -> KernelSource:
    HEAD_DIM, BLOCK_SIZE, CHUNK_SIZE = config.head_dim, config.block_size, config.chunk_size
    THREAD_GROUP_SIZE, V_VEC_SIZE, V_CHUNK_SIZE = config.thread_group_size, config.v_vec_size, config.v_chunk_size
    NUM_V_VECS_PER_ROW, NUM_ROWS_PER_THREAD = config.num_v_vecs_per_row, config.num_rows_per_thread
    NUM_SUMS = 2 * NUM_WARPS
    KV_BYTES, PACKED, BY_ROW = config.kv_bytes, config.packed, config.kv_kind in SCALED_BY_ROW
    stage_query, query_key, modify = make_stage_query(config), make_query_key(config), make_modify(config.score_mod)
    tokens_of = make_tokens_of(PARTITION_SIZE)
    sum_of_group = make_sum_of_group(config)
    weigh_values, reduce_rows = make_weigh_values(config), make_reduce_rows(config)
    write_row = make_write_row(config, "float32" if PARTITION_SIZE else config.q_kind)

    def paged_attention(
        out, lse, exp_sums, max_logits, q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, sinks, k_scale,
        v_scale, num_heads, group_size, max_seq_len, visible, scale_strides, table_stride, q_seq_stride, q_head_stride,
        out_seq_stride, out_head_stride, k_block_stride, k_head_stride, k_vec_stride, k_token_stride,
        v_block_stride, v_head_stride, v_row_stride, scale, softcap, k_number, v_number,
    ):  # fmt: skip
        q_vecs = shared_address(cuda.shared.array(HEAD_DIM, float32, alignment=16))
        red_smem, agreed = cuda.shared.array(NUM_SUMS, float32), cuda.shared.array(1, uint32)
        logits = cuda.shared.array(0, float32, alignment=16)
        warp_idx, lane = int64(cuda.threadIdx.x // WARP_SIZE), int64(cuda.threadIdx.x % WARP_SIZE)
        seq_idx = int64(uint32(cuda.blockIdx.x) // uint32(num_heads))
        head_idx = cuda.blockIdx.x - seq_idx * num_heads
        kv_head_idx = int64(uint32(head_idx) // uint32(group_size))
        max_num_partitions = cuda.gridDim.y * cuda.gridDim.z
        partition_idx = int64(cuda.blockIdx.y) + cuda.blockIdx.z * cuda.gridDim.y
        if PACKED:
            k_vec_stride, k_token_stride, v_row_stride = BLOCK_SIZE * 16, 16, BLOCK_SIZE * KV_BYTES

        # Thread 0 reads the length for the block: it may change while the kernel runs, and all threads must agree.
        if cuda.threadIdx.x == 0:
            agreed[0] = length_of(seq_lens, seq_idx, max_seq_len)
        stage_query(q_vecs, address(q) + seq_idx * q_seq_stride + head_idx * q_head_stride, cuda.threadIdx.x)
        cuda.syncthreads()

        # The thread block's tokens are first_token to last_token - 1, in chunks.
        seq_len = int64(agreed[0])
        first_token, last_token = tokens_of(seq_len, visible, partition_idx)
        if PARTITION_SIZE and first_token >= last_token:
            return
        start_token = first_token // CHUNK_SIZE * CHUNK_SIZE
        num_tokens = (last_token - start_token + CHUNK_SIZE - 1) // CHUNK_SIZE * CHUNK_SIZE

        # q . k: a thread group for each token of a chunk.
        thread_group_idx, thread_group_offset = lane // THREAD_GROUP_SIZE, lane % THREAD_GROUP_SIZE
        k_factor, v_factor = float32(k_number), float32(v_number)
        if not BY_ROW:
            k_factor = k_scale[kv_head_idx] if address(k_scale) != 0 else k_factor
            v_factor = v_scale[kv_head_idx] if address(v_scale) != 0 else v_factor
        of_keys = scales_of_keys(k_scale, scale_strides, kv_head_idx)
        of_values = scales_of_values(v_scale, scale_strides, kv_head_idx)
        qk_scale = float32(float32(scale) * k_factor)
        slope = alibi_slopes[head_idx] if address(alibi_slopes) != 0 else float32(0)
        qk_max = NONE
        for chunk in range(start_token + warp_idx * CHUNK_SIZE, last_token, NUM_WARPS * CHUNK_SIZE):
            physical_block_number = int64(block_tables[seq_idx * table_stride + chunk // BLOCK_SIZE])
            token_idx = chunk + thread_group_idx
            is_visible = first_token <= token_idx and token_idx < last_token
            qk = float32(0)
            if is_visible:
                k = address(k_cache) + physical_block_number * k_block_stride + kv_head_idx * k_head_stride
                k += token_idx % BLOCK_SIZE * k_token_stride
                qk = query_key(q_vecs, k, k_vec_stride, thread_group_offset)
            qk = sum_of_group(qk)
            if is_visible:
                if BY_ROW:
                    qk = float32(qk * scale_of_row(of_keys, physical_block_number, token_idx % BLOCK_SIZE))
                qk = modify(qk_scale * qk, float32(softcap), slope, seq_len - 1, token_idx, head_idx, seq_idx)
            else:
                qk = NONE
            if thread_group_offset == 0:
                logits[token_idx - start_token] = qk
            qk_max = larger(qk_max, qk)

        sink = NONE
        if not PARTITION_SIZE and address(sinks) != 0 and seq_len > 0:
            sink = sinks[head_idx]
        qk_max = block_max(red_smem, larger(qk_max, sink))
        exp_sum = softmax(logits, num_tokens, qk_max, sink, red_smem[NUM_WARPS:])

        if BY_ROW:
            for token_idx in range(first_token + cuda.threadIdx.x, last_token, NUM_THREADS):
                physical_block_number = int64(block_tables[seq_idx * table_stride + token_idx // BLOCK_SIZE])
                v_scale_of_row = scale_of_row(of_values, physical_block_number, token_idx % BLOCK_SIZE)
                at = token_idx - start_token
                logits[at] = float32(logits[at] * v_scale_of_row)
            cuda.syncthreads()

        # Weighted sum of V: a lane for one vector of tokens, in some of the rows.
        accs = cuda.local.array(NUM_ROWS_PER_THREAD, float32)
        for chunk in range(start_token + warp_idx * V_CHUNK_SIZE, last_token, NUM_WARPS * V_CHUNK_SIZE):
            physical_block_number = int64(block_tables[seq_idx * table_stride + chunk // BLOCK_SIZE])
            token_idx = chunk + lane % NUM_V_VECS_PER_ROW * V_VEC_SIZE
            if token_idx + V_VEC_SIZE > first_token and token_idx < last_token:
                v = address(v_cache) + physical_block_number * v_block_stride + kv_head_idx * v_head_stride
                v += token_idx % BLOCK_SIZE * KV_BYTES
                logits_vec = shared_address(logits) + uint32(token_idx - start_token) * uint32(4)
                first, last = first_token - token_idx, last_token - token_idx
                weigh_values(accs, uint32(logits_vec), v, v_row_stride, lane, first, last)
        reduce_rows(accs, logits, warp_idx, lane)

        if warp_idx == 0:
            row = seq_idx * out_seq_stride + head_idx * out_head_stride + partition_idx * (HEAD_DIM * 4)
            write_row(address(out) + row, accs, v_factor, lane)
        if cuda.threadIdx.x == 0:
            row = seq_idx * num_heads + head_idx
            if PARTITION_SIZE:
                exp_sums[row * max_num_partitions + partition_idx] = exp_sum
                max_logits[row * max_num_partitions + partition_idx] = qk_max
            elif address(lse) != 0:
                lse[row] = qk_max + math.log(exp_sum)

    return KernelSource(paged_attention, SIGNATURE, NUM_THREADS)
