"""The second kernel of v2: merge the outputs of a head's partitions into its output.

Grid. x = seq_idx * num_heads + head_idx.

Who owns what. A thread block of 4 warps owns one query head; a thread owns partitions while the weights are computed,
and elements of head_dim for the sum.

The formula is that of device/merging.py, but its steps stand here and in softmax.py, with exact divisions, one beside
the other as in vLLM.

Shared memory. Static: red_smem, 8 float32; the weights of 128 partitions at a time; the length that all
threads agree on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..device.conversions import narrow
from ..device.intrinsics.thread import address, larger, store_2, store_4
from ..device.language import cuda, float32, int32, int64, types, uint16, uint32
from ..device.logits import NONE
from ..device.sizes import ELEMENT_BITS
from ..device.source import KernelSource
from ..device.visible import VISIBLE, first_key_of_last
from .config import NUM_THREADS, NUM_WARPS, PARTITION_SIZE
from .softmax import block_max, block_sum, exp_minus
from .tables import length_of

BYTES, INTS, FLOATS = types.CPointer(types.uint8), types.CPointer(int32), types.CPointer(float32)
SIGNATURE = types.void(
    *(BYTES, FLOATS, FLOATS, FLOATS, FLOATS, INTS, FLOATS),  # out, lse, tmp_out, exp_sums, max_logits, seq_lens, sinks
    *(int64, int64, VISIBLE, *[int64] * 3),  # sizes, visible, a size and strides
)


@dataclass(frozen=True, slots=True)
class ReductionConfig:
    """The compile-time constants of the reduction: head_dim, and the kind of elements of `out`."""

    head_dim: int
    kind: str


def make_v2_reduce(config: ReductionConfig) -> KernelSource:
    """The kernel that merges the partitions of each query head.

    The weight of a partition is exp_sum * exp(max_logit - the largest max_logit), and the sink is one more term of the
    denominator. Strides are in bytes.
    """
    HEAD_DIM, ROWS_PER_THREAD = config.head_dim, -(-config.head_dim // NUM_THREADS)
    NUM_SUMS = 2 * NUM_WARPS
    rounded, NUM_BYTES = narrow(config.kind), ELEMENT_BITS[config.kind] // 8

    def v2_reduce(
        out, lse, tmp_out, exp_sums, max_logits, seq_lens, sinks,
        num_heads, max_seq_len, visible, max_num_partitions, out_seq_stride, out_head_stride,
    ):  # fmt: skip
        red_smem, agreed = cuda.shared.array(NUM_SUMS, float32), cuda.shared.array(1, uint32)
        weights = cuda.shared.array(NUM_THREADS, float32)
        thread_idx = int64(cuda.threadIdx.x)
        seq_idx = int64(uint32(cuda.blockIdx.x) // uint32(num_heads))
        head_idx = cuda.blockIdx.x - seq_idx * num_heads
        row = seq_idx * num_heads + head_idx
        first_partition = row * max_num_partitions

        # Thread 0 reads the length for the block: it may change while the kernel runs, and all threads must agree.
        if thread_idx == 0:
            agreed[0] = length_of(seq_lens, seq_idx, max_seq_len)
        cuda.syncthreads()
        seq_len = int64(agreed[0])
        first_seen = uint32(first_key_of_last(uint32(seq_len), visible) // uint32(PARTITION_SIZE))
        num_partitions = (seq_len + PARTITION_SIZE - 1) // PARTITION_SIZE - int64(first_seen)
        sink = sinks[head_idx] if address(sinks) != 0 and seq_len > 0 else NONE

        qk_max = sink
        for i in range(thread_idx, num_partitions, NUM_THREADS):
            qk_max = larger(qk_max, max_logits[first_partition + i])
        qk_max = block_max(red_smem, qk_max)

        exp_sum = float32(0)
        accs = cuda.local.array(ROWS_PER_THREAD, float32)
        for first in range(0, num_partitions, NUM_THREADS):
            weight = float32(0)
            if first + thread_idx < num_partitions:
                partition = first_partition + first + thread_idx
                weight = exp_sums[partition] * exp_minus(max_logits[partition], qk_max)
            exp_sum = float32(exp_sum + weight)
            weights[thread_idx] = weight
            cuda.syncthreads()
            for i in range(ROWS_PER_THREAD):
                row_idx = thread_idx + i * NUM_THREADS
                if row_idx < HEAD_DIM:
                    for j in range(min(num_partitions - first, NUM_THREADS)):
                        value = tmp_out[(first_partition + first + j) * HEAD_DIM + row_idx]
                        accs[i] = float32(accs[i] + weights[j] * value)
            cuda.syncthreads()
        exp_sum = float32(block_sum(red_smem[NUM_WARPS:], exp_sum) + exp_minus(sink, qk_max))

        inv_sum = float32(0) if exp_sum == float32(0) else float32(float32(1) / exp_sum)
        for i in range(ROWS_PER_THREAD):
            row_idx = thread_idx + i * NUM_THREADS
            if row_idx < HEAD_DIM:
                where = address(out) + seq_idx * out_seq_stride + head_idx * out_head_stride + row_idx * NUM_BYTES
                bits = rounded(float32(accs[i] * inv_sum))
                if NUM_BYTES == 4:
                    store_4(where, bits)
                else:
                    store_2(where, uint16(bits))
        if thread_idx == 0 and address(lse) != 0:
            lse[row] = float32(qk_max + math.log(exp_sum))

    return KernelSource(v2_reduce, SIGNATURE, NUM_THREADS)
