"""The last steps of the split kernel: the sums of warps, and of the splits of a sequence, become the output.

Every order of additions is fixed. A sequence with one split is finished by the thread block that owns it. The splits
of a longer one leave partial results in global memory, and the thread block that counts last adds them all.

Every thread block of a column of the grid counts, once and whether it had work or not: what a counter reaches depends
on the grid alone. So it is 0 again after every launch and every replay of a CUDA graph, whatever lengths were given,
and even if they change while the kernel runs.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ..device.conversions import narrow
from ..device.intrinsics import (
    ELEMENT_BITS,
    address,
    clear,
    divmod_32,
    exp2,
    float_bits,
    larger,
    local_array,
    store_4,
    store_8,
    store_16,
)
from ..device.logits import LOG2E, NONE
from ..device.source import device_function
from ..device.tensor_intrinsics import exchange, load_l2_2, load_l2_4, log2, reciprocal
from .config import MOST_SPLITS, NUM_THREADS, NUM_WARPS, WARP_SIZE, SplitConfig
from .sums import make_load_quad, team_bytes

LN2 = float32(0.6931471805599453)


def make_store_pair(config: SplitConfig) -> Any:
    """The device function ``store_pair(out, pair, x, y)``: dims 2 * pair and the next of a row of q's kind."""
    rounded, Q_BYTES = narrow(config.q_kind), ELEMENT_BITS[config.q_kind] // 8

    @device_function
    def store_pair(out, pair, x, y):
        if Q_BYTES == 4:
            store_8(out + int64(pair) * 8, float_bits(x), float_bits(y))
        else:
            store_4(out + int64(pair) * 4, uint32(rounded(x) | (rounded(y) << 16)))

    return store_pair


@device_function
def finite(maximum):
    """What exponents are measured from: the maximum, or 0 if there was no finite logit."""
    return float32(0) if maximum == NONE else maximum


@device_function
def sink_of(sinks, head):
    """The logit of a head's sink in units of log(2), or -inf."""
    return float32(sinks[head] * LOG2E) if address(sinks) != 0 else NONE


@device_function
def store_lse(lse, row, maximum, total):
    """The natural logarithm of total * 2**maximum; -inf for an empty sum."""
    if address(lse) != 0:
        lse[row] = NONE if total == float32(0) else float32(float32(maximum + log2(total)) * LN2)


@device_function
def inverse(total):
    """1 / total, or 0 for an empty sum, whose values are 0 too."""
    return float32(0) if total == float32(0) else reciprocal(total)


@device_function
def add(sums, weight, x):
    """sums[i] += weight * x[i] for four sums."""
    sums[0], sums[1] = float32(sums[0] + weight * x[0]), float32(sums[1] + weight * x[1])
    sums[2], sums[3] = float32(sums[2] + weight * x[2]), float32(sums[3] + weight * x[3])


def weights_bytes(config: SplitConfig) -> int:
    """Shared memory of the weights of all splits."""
    return 4 * config.num_heads * MOST_SPLITS


def make_leave(config: SplitConfig, pair_address: Any, store_quad: Any) -> Any:
    """The device function ``leave(thread, output, partials, num_splits, split, shared)``.

    After all warps have put their sums, it adds the teams: to the output of the only split of a sequence, to a partial
    result of one of several. Every thread of the block calls it.
    """
    NUM_HEADS, NUM_TEAMS, QUADS = config.num_heads, config.num_teams, config.head_dim // 4
    ROW_BYTES, TEAM_BYTES = 4 * config.head_dim, team_bytes(config)
    load_quad = make_load_quad(config)

    @device_function
    def leave(thread, output, partials, num_splits, split, shared):
        quad, weights = local_array(4, float32), shared.weights
        is_only = num_splits == 1
        partial = output.row * partials.most_splits + int64(split)

        if thread < output.num_heads:
            maximum, total = NONE, float32(0)
            for w in range(NUM_TEAMS):
                maximum = larger(maximum, shared.maxima[w * NUM_HEADS + thread])
            sink = sink_of(output.sinks, output.head + thread) if is_only else NONE
            maximum = larger(maximum, sink)
            for w in range(NUM_TEAMS):
                weight = exp2(float32(shared.maxima[w * NUM_HEADS + thread] - finite(maximum)))
                weights[w * NUM_HEADS + thread] = weight
                total = float32(total + weight * shared.sums[w * NUM_HEADS + thread])
            if is_only:
                total = float32(total + exp2(float32(sink - finite(maximum))))
                factor = float32(inverse(total) * output.v_factor)
                for w in range(NUM_TEAMS):
                    weights[w * NUM_HEADS + thread] = float32(weights[w * NUM_HEADS + thread] * factor)
                store_lse(output.lse, output.row + int64(thread), maximum, total)
            else:
                state = address(partials.states) + (partial + int64(thread) * partials.most_splits) * 8
                store_8(state, float_bits(maximum), float_bits(total))
        cuda.syncthreads()

        i = thread
        while i < uint32(output.num_heads * QUADS):
            h, q = divmod_32(i, QUADS)
            pair = uint32(q << 1)
            where = pair_address(shared.address, h, pair, int64(0))
            clear(quad, 4)
            for w in range(NUM_TEAMS):
                add(quad, weights[w * NUM_HEADS + int64(h)], load_quad(uint32(where + w * TEAM_BYTES)))
            if is_only:
                store_quad(output.address + int64(h) * output.head_stride, pair, quad)
            else:
                target = address(partials.sums) + (partial + int64(h) * partials.most_splits) * ROW_BYTES
                words = float_bits(quad[0]), float_bits(quad[1]), float_bits(quad[2]), float_bits(quad[3])
                store_16(target + int64(pair) * 8, words[0], words[1], words[2], words[3])
            i = uint32(i + NUM_THREADS)

    return leave


def make_store_quad(store_pair: Any) -> Any:
    """The device function ``store_quad(out, pair, sums)``: four sums as dims 2 * pair to 2 * pair + 3 of a row."""

    @device_function
    def store_quad(out, pair, sums):
        store_pair(out, pair, sums[0], sums[1])
        store_pair(out, uint32(pair + 1), sums[2], sums[3])

    return store_quad


def make_merge(config: SplitConfig, store_quad: Any) -> Any:
    """The device function ``merge_splits(thread, output, partials, num_splits, weights)``.

    It adds the partial results of all splits to the output. A warp for each head and a lane for each two splits find
    the weights; then a thread for each four dims adds.
    """
    QUADS, ROW_BYTES = config.head_dim // 4, 4 * config.head_dim

    @device_function
    def state_of(partials, partial, num_splits, split):
        if split < num_splits:
            return load_l2_2(address(partials.states) + (partial + split) * 8)
        return NONE, float32(0)

    @device_function
    def merge_splits(thread, output, partials, num_splits, weights):
        lane, h = int64(uint32(thread & 31)), int64(uint32(thread >> 5))
        while h < int64(output.num_heads):
            partial = (output.row + h) * partials.most_splits
            first, first_sum = state_of(partials, partial, num_splits, lane)
            second, second_sum = state_of(partials, partial, num_splits, lane + WARP_SIZE)
            maximum = larger(first, second)
            for b in range(5):
                maximum = larger(maximum, exchange(maximum, uint32(1 << b)))
            sink = sink_of(output.sinks, output.head + h)
            maximum = larger(maximum, sink)
            first, second = exp2(float32(first - finite(maximum))), exp2(float32(second - finite(maximum)))
            total = float32(first * first_sum + second * second_sum)
            for b in range(5):
                total = float32(total + exchange(total, uint32(1 << b)))
            total = float32(total + exp2(float32(sink - finite(maximum))))
            factor = float32(inverse(total) * output.v_factor)
            weights[h * MOST_SPLITS + lane] = float32(first * factor)
            weights[h * MOST_SPLITS + lane + WARP_SIZE] = float32(second * factor)
            if lane == 0:
                store_lse(output.lse, output.row + h, maximum, total)
            h += NUM_WARPS
        cuda.syncthreads()

        sums = local_array(4, float32)
        i = thread
        while i < uint32(output.num_heads * QUADS):
            head_of_tile, quad = divmod_32(i, QUADS)
            h = int64(head_of_tile)
            where = address(partials.sums) + (output.row + h) * partials.most_splits * ROW_BYTES + int64(quad) * 16
            clear(sums, 4)
            at, split = h * MOST_SPLITS, int64(0)
            while split + 4 <= num_splits:
                a, b = load_l2_4(where), load_l2_4(where + ROW_BYTES)
                c, d = load_l2_4(where + 2 * ROW_BYTES), load_l2_4(where + 3 * ROW_BYTES)
                add(sums, weights[at], a)
                add(sums, weights[at + 1], b)
                add(sums, weights[at + 2], c)
                add(sums, weights[at + 3], d)
                where += 4 * ROW_BYTES
                at, split = at + 4, split + 4
            while split < num_splits:
                add(sums, weights[at], load_l2_4(where))
                where += ROW_BYTES
                at, split = at + 1, split + 1
            store_quad(output.address + h * output.head_stride, uint32(quad << 1), sums)
            i = uint32(i + NUM_THREADS)

    return merge_splits
