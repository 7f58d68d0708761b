"""The end of the split kernel: add the warps, then the splits of a sequence, and store the output.

Every order of additions is fixed. If a sequence has one split, its thread block stores the output. If it has several,
each stores a partial result in global memory, and the thread block that counts last (device/last_block.py) adds them.
The formula of both is in device/merging.py.
"""

from __future__ import annotations

from typing import Any

from ..device.conversions import narrow
from ..device.intrinsics.thread import (
    address,
    assign,
    clear,
    divmod_32,
    float_bits,
    larger,
    load_shared,
    local_array,
    shared_address,
    store_4,
    store_8,
    store_16,
    unrolled,
)
from ..device.intrinsics.warp import load_l2_2, load_l2_4, store_shared_4
from ..device.language import cuda, float32, int64, uint32
from ..device.logits import LOG2E, NONE
from ..device.merging import inverse, lse_of, make_add, make_add_states, weight_of
from ..device.reductions import largest_of_warp, sum_of_warp
from ..device.sizes import WARP_SIZE
from ..device.source import Steps, device_function
from .config import MERGE_LOADS, MOST_SPLITS, NUM_THREADS, NUM_WARPS, SplitConfig
from .sums import warp_group_bytes

SPLITS_OF_LANE = MOST_SPLITS // WARP_SIZE  # four
add = make_add(4, may_be_empty=False)


@device_function
def sink_of(sinks, head):
    """The logit of a head's sink in units of log(2), or -inf."""
    return float32(sinks[head] * LOG2E) if address(sinks) != 0 else NONE


@device_function
def finish(output, h, maximum, total, sink, is_first):
    """Add the sink, whose logit the maximum already has, store a head's LSE, and return the factor of its values."""
    total = float32(total + weight_of(sink, maximum))
    if is_first and address(output.lse) != 0:
        output.lse[output.row + h] = lse_of(maximum, total)
    return float32(inverse(total) * output.v_factor)


def merge_bytes(config: SplitConfig) -> int:
    """Shared memory of the merge: weights of all splits, and sums that threads hand to the first one of a quad."""
    quads = config.num_heads * config.head_dim // 4
    return 4 * config.num_heads * MOST_SPLITS + 16 * quads * (config.threads_per_quad - 1)


def make_merge(config: SplitConfig, sums: Steps) -> Steps:
    """The device functions ``store_nothing``, ``merge_warps`` and ``merge_splits``."""
    NUM_HEADS, NUM_WARP_GROUPS, QUADS = config.num_heads, config.num_warp_groups, config.head_dim // 4
    ROW_BYTES, WARP_GROUP_BYTES, PAIRS = 4 * config.head_dim, warp_group_bytes(config), config.head_dim // 2
    rounded, Q_BYTES = narrow(config.q_kind), config.q_bytes

    @device_function
    def store_pair(out, pair, x, y):
        """Store dim 2 * pair and the next one of a row of q's kind."""
        if Q_BYTES == 4:
            store_8(out + int64(pair) * 8, float_bits(x), float_bits(y))
        else:
            store_4(out + int64(pair) * 4, uint32(rounded(x) | (rounded(y) << 16)))

    @device_function
    def store_quad(out, pair, sums):
        store_pair(out, pair, sums[0], sums[1])
        store_pair(out, uint32(pair + 1), sums[2], sums[3])

    @device_function
    def store_nothing(output, thread):
        """Store the result of an empty sequence."""
        i = thread
        while i < uint32(output.num_heads * PAIRS):
            h, pair = divmod_32(i, PAIRS)
            store_pair(output.address + int64(h) * output.head_stride, pair, float32(0), float32(0))
            i = uint32(i + NUM_THREADS)
        if thread < output.num_heads and address(output.lse) != 0:
            output.lse[output.row + int64(thread)] = NONE

    @device_function
    def merge_warps(thread, output, partials, num_splits, split, shared):
        """Add the warp groups: to the output if the sequence has one split, to a partial result if it has several.

        Every thread of the block calls it, after all warps have stored their sums.
        """
        quad, mine, weights = local_array(4, float32), local_array(4, float32), shared.weights
        is_only = num_splits == 1
        partial = output.row * partials.most_splits + int64(split)

        if thread < output.num_heads:
            maximum, total = NONE, float32(0)
            for w in range(NUM_WARP_GROUPS):
                maximum = larger(maximum, shared.maxima[w * NUM_HEADS + thread])
            sink = sink_of(output.sinks, output.head + thread) if is_only else NONE
            maximum = larger(maximum, sink)
            for w in range(NUM_WARP_GROUPS):
                weight = weight_of(shared.maxima[w * NUM_HEADS + thread], maximum)
                weights[w * NUM_HEADS + thread] = weight
                total = float32(total + weight * shared.sums[w * NUM_HEADS + thread])
            if is_only:
                factor = finish(output, int64(thread), maximum, total, sink, True)
                for w in range(NUM_WARP_GROUPS):
                    weights[w * NUM_HEADS + thread] = float32(weights[w * NUM_HEADS + thread] * factor)
            else:
                state = address(partials.states) + (partial + int64(thread) * partials.most_splits) * 8
                store_8(state, float_bits(maximum), float_bits(total))
        cuda.syncthreads()

        i = thread
        while i < uint32(output.num_heads * QUADS):
            h, q = divmod_32(i, QUADS)
            pair = uint32(q << 1)
            where = sums.pair_address(shared.address, h, pair, int64(0))
            clear(quad, 4)
            for w in range(NUM_WARP_GROUPS):
                assign(mine, int64(0), sums.load_quad(uint32(where + w * WARP_GROUP_BYTES)))
                add(quad, weights[w * NUM_HEADS + int64(h)], mine, int64(0))
            if is_only:
                store_quad(output.address + int64(h) * output.head_stride, pair, quad)
            else:
                target = address(partials.sums) + (partial + int64(h) * partials.most_splits) * ROW_BYTES
                words = float_bits(quad[0]), float_bits(quad[1]), float_bits(quad[2]), float_bits(quad[3])
                store_16(target + int64(pair) * 8, words[0], words[1], words[2], words[3])
            i = uint32(i + NUM_THREADS)

    add_splits = make_add_splits(config, store_quad)

    @unrolled(SPLITS_OF_LANE)
    def load_states(i, maxima, totals, partials, partial, num_splits, lane):
        split = lane + WARP_SIZE * i
        maxima[i], totals[i] = NONE, float32(0)
        if split < num_splits:
            maxima[i], totals[i] = load_l2_2(address(partials.states) + (partial + split) * 8)

    @unrolled(SPLITS_OF_LANE)
    def weigh(i, maxima, totals, maximum):
        maxima[i] = weight_of(maxima[i], maximum)
        totals[i] = float32(maxima[i] * totals[i])

    @unrolled(SPLITS_OF_LANE)
    def store_weights(i, weights, at, maxima, factor):
        weights[at + WARP_SIZE * i] = float32(maxima[i] * factor)

    @device_function
    def merge_splits(thread, output, partials, num_splits, weights):
        """Add the partial results of all splits to the output.

        A warp for each head finds the weights, each lane those of every 32nd split; then `add_splits` adds.
        """
        lane, h = int64(uint32(thread & 31)), int64(uint32(thread >> 5))
        maxima, totals = local_array(SPLITS_OF_LANE, float32), local_array(SPLITS_OF_LANE, float32)
        while h < int64(output.num_heads):
            partial = (output.row + h) * partials.most_splits
            load_states(maxima, totals, partials, partial, num_splits, lane)
            sink = sink_of(output.sinks, output.head + h)
            of_lane = larger(larger(maxima[0], maxima[1]), larger(maxima[2], maxima[3]))
            maximum = largest_of_warp(larger(of_lane, sink))
            weigh(maxima, totals, maximum)
            total = sum_of_warp(float32(float32(totals[0] + totals[1]) + float32(totals[2] + totals[3])))
            factor = finish(output, h, maximum, total, sink, lane == 0)
            store_weights(weights, h * MOST_SPLITS + lane, maxima, factor)
            h += NUM_WARPS
        cuda.syncthreads()
        add_splits(thread, output, partials, num_splits, weights)

    return Steps(store_nothing, merge_warps, merge_splits)


def make_add_splits(config: SplitConfig, store_quad: Any) -> Any:
    """The device function ``add_splits(thread, output, partials, num_splits, weights)``."""
    QUADS, ROW_BYTES, NUM_QUADS = config.head_dim // 4, 4 * config.head_dim, config.num_heads * config.head_dim // 4
    THREADS, OTHERS = config.threads_per_quad, 4 * config.num_heads * MOST_SPLITS
    load_floats = load_shared(4)
    add_every = make_add_states(load_l2_4, add, 4, ROW_BYTES * THREADS, MERGE_LOADS, THREADS)

    @device_function
    def add_part(sums, h, quad, part, output, partials, num_splits, weights):
        """Add every THREADS-th split, of four dims."""
        row = (output.row + h) * partials.most_splits + int64(part)
        where = address(partials.sums) + row * ROW_BYTES + int64(quad) * 16
        clear(sums, 4)
        add_every(sums, where, weights, h * MOST_SPLITS, int64(part), int64(num_splits))

    @device_function
    def add_splits(thread, output, partials, num_splits, weights):
        """Add partial results to the output, in the order of their splits.

        A thread has four dims of a head, a quad. With fewer quads than threads, `threads_per_quad` threads divide the
        splits among them, and the first one adds their sums. One multiprocessor does all of it when nothing else is
        left to do, so its speed depends on how many loads a thread has in flight.
        """
        sums, mine = local_array(4, float32), local_array(4, float32)
        part, i = divmod_32(thread, NUM_QUADS)
        others = uint32(shared_address(weights) + OTHERS + uint32(thread << 4))
        while part < THREADS and i < uint32(output.num_heads * QUADS):
            head, quad = divmod_32(i, QUADS)
            h = int64(head)
            add_part(sums, h, quad, part, output, partials, num_splits, weights)
            if THREADS == 1:
                store_quad(output.address + h * output.head_stride, uint32(quad << 1), sums)
            elif part > 0:
                store_shared_4(uint32(others - 16 * NUM_QUADS), sums[0], sums[1], sums[2], sums[3])
            i = uint32(i + NUM_THREADS)
        if THREADS > 1:
            cuda.syncthreads()
            if thread < uint32(output.num_heads * QUADS):
                for n in range(THREADS - 1):
                    assign(mine, int64(0), load_floats(uint32(others + 16 * NUM_QUADS * n)))
                    add(sums, float32(1), mine, int64(0))
                head, quad = divmod_32(thread, QUADS)
                store_quad(output.address + int64(head) * output.head_stride, uint32(quad << 1), sums)

    return add_splits
