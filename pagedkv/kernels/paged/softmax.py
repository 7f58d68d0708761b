"""v1 and v2: the maximum and the sum over a thread block, and the softmax of the logits in shared memory."""

from __future__ import annotations

from typing import Any

from ..device.intrinsics.thread import exp2, larger
from ..device.language import cuda, float32
from ..device.logits import LOG2E
from ..device.merging import finite
from ..device.sizes import ALL_LANES, WARP_SIZE
from ..device.source import device_function
from .config import NUM_THREADS, NUM_WARPS


def _make_over_block(combine: Any) -> Any:
    """The device function (red_smem, value): a float32 combined over all threads of the block, for every thread.

    red_smem has room for one float32 per warp.
    """

    @device_function
    def over_block(red_smem, value):
        warp_idx, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
        mask = WARP_SIZE // 2
        while mask >= 1:
            value = combine(value, cuda.shfl_xor_sync(ALL_LANES, value, mask))
            mask //= 2
        if lane == 0:
            red_smem[warp_idx] = value
        cuda.syncthreads()
        value = red_smem[lane % NUM_WARPS]
        mask = NUM_WARPS // 2
        while mask >= 1:
            value = combine(value, cuda.shfl_xor_sync(ALL_LANES, value, mask))
            mask //= 2
        return value

    return over_block


@device_function
def _plus(x, y):
    return float32(x + y)


block_max, block_sum = _make_over_block(larger), _make_over_block(_plus)


@device_function
def exp_minus(logit, maximum):
    """exp(logit - maximum) as float32; 0 for a maximum of -inf, when every logit is -inf."""
    return exp2(float32(float32(logit - finite(maximum)) * LOG2E))


@device_function
def softmax(logits, num_tokens, qk_max, sink, red_smem):
    """Replace the logits by their softmax with one more term, the sink's; return the sum of all exponentials.

    qk_max is the maximum of the logits and the sink. A sum of 0, no logit at all, gives zeros.
    """
    exp_sum = float32(0)
    for i in range(cuda.threadIdx.x, num_tokens, NUM_THREADS):
        val = exp_minus(logits[i], qk_max)
        logits[i] = val
        exp_sum = float32(exp_sum + val)
    exp_sum = float32(block_sum(red_smem, exp_sum) + exp_minus(sink, qk_max))

    inv_sum = float32(0) if exp_sum == float32(0) else float32(float32(1) / exp_sum)
    for i in range(cuda.threadIdx.x, num_tokens, NUM_THREADS):
        logits[i] = float32(logits[i] * inv_sum)
    cuda.syncthreads()
    return exp_sum
