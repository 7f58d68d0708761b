"""The last steps of the split kernel: add the warps, then the splits of a sequence, and store the output.

Every order of additions is fixed. The thread block of a sequence with one split stores the output. The splits of a
longer one store partial results in global memory, and the thread block that counts last (device/last_block.py) adds
them. The formula of both is in device/merging.py.
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
from ..device.source import Steps, device_function
from ..device.warp import WARP_SIZE
from .config import MERGE_LOADS, MOST_SPLITS, NUM_THREADS, NUM_WARPS, SplitConfig
from .sums import team_bytes

SPLITS_OF_LANE = MOST_SPLITS // WARP_SIZE  # in the merge: four
add = make_add(4, may_be_empty=False)


@device_function
def sink_of(sinks, head):
    """The logit of a head's sink in units of log(2), or -inf."""
    return float32(sinks[head] * LOG2E) if address(sinks) != 0 else NONE


@device_function
def finish(output, h, maximum, total, sink, is_first):
    """Add the sink, whose logit is in the maximum already, and store a head's LSE; returns the factor of its values."""
    total = float32(total + weight_of(sink, maximum))
    if is_first and address(output.lse) != 0:
        output.lse[output.row + h] = lse_of(maximum, total)
    return float32(inverse(total) * output.v_factor)


def merge_bytes(config: SplitConfig) -> int:
    """Shared memory of the merge: weights of all splits, and sums for the first of the threads that share four dims."""
    quads = config.num_heads * config.head_dim // 4
    return 4 * config.num_heads * MOST_SPLITS + 16 * quads * (config.merge_shares - 1)


def make_merge(config: SplitConfig, sums: Steps) -> Steps:
    """Add the sums of warps, or the partial results of splits, and store them."""
    NUM_HEADS, NUM_TEAMS, QUADS = config.num_heads, config.num_teams, config.head_dim // 4
    ROW_BYTES, TEAM_BYTES, PAIRS = 4 * config.head_dim, team_bytes(config), config.head_dim // 2
    rounded, Q_BYTES = narrow(config.q_kind), config.q_bytes

    @device_function
    def store_pair(out, pair, x, y):
        """Dims 2 * pair and the next of a row of q's kind."""
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
        """The result of an empty sequence."""
        i = thread
        while i < uint32(output.num_heads * PAIRS):
            h, pair = divmod_32(i, PAIRS)
            store_pair(output.address + int64(h) * output.head_stride, pair, float32(0), float32(0))
            i = uint32(i + NUM_THREADS)
        if thread < output.num_heads and address(output.lse) != 0:
            output.lse[output.row + int64(thread)] = NONE

    @device_function
    def leave(thread, output, partials, num_splits, split, shared):
        """Add the teams: to the output if the sequence has one split, to a partial result if it has several.

        Every thread of the block calls it, after all warps have put their sums.
        """
        quad, mine, weights = local_array(4, float32), local_array(4, float32), shared.weights
        is_only = num_splits == 1
        partial = output.row * partials.most_splits + int64(split)

        if thread < output.num_heads:
            maximum, total = NONE, float32(0)
            for w in range(NUM_TEAMS):
                maximum = larger(maximum, shared.maxima[w * NUM_HEADS + thread])
            sink = sink_of(output.sinks, output.head + thread) if is_only else NONE
            maximum = larger(maximum, sink)
            for w in range(NUM_TEAMS):
                weight = weight_of(shared.maxima[w * NUM_HEADS + thread], maximum)
                weights[w * NUM_HEADS + thread] = weight
                total = float32(total + weight * shared.sums[w * NUM_HEADS + thread])
            if is_only:
                factor = finish(output, int64(thread), maximum, total, sink, True)
                for w in range(NUM_TEAMS):
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
            for w in range(NUM_TEAMS):
                assign(mine, int64(0), sums.load_quad(uint32(where + w * TEAM_BYTES)))
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
    def put_weights(i, weights, at, maxima, factor):
        weights[at + WARP_SIZE * i] = float32(maxima[i] * factor)

    @device_function
    def merge_splits(thread, output, partials, num_splits, weights):
        """Add the partial results of all splits to the output.

        A warp for each head, with every 32nd split for each lane, finds the weights; then `add_splits`.
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
            put_weights(weights, h * MOST_SPLITS + lane, maxima, factor)
            h += NUM_WARPS
        cuda.syncthreads()
        add_splits(thread, output, partials, num_splits, weights)

    return Steps(store_nothing, leave, merge_splits)


def make_add_splits(config: SplitConfig, store_quad: Any) -> Any:
    """The device function ``add_splits(thread, output, partials, num_splits, weights)``."""
    QUADS, ROW_BYTES, NUM_QUADS = config.head_dim // 4, 4 * config.head_dim, config.num_heads * config.head_dim // 4
    SHARES, OTHERS = config.merge_shares, 4 * config.num_heads * MOST_SPLITS
    load_floats = load_shared(4)
    add_every = make_add_states(load_l2_4, add, 4, ROW_BYTES * SHARES, MERGE_LOADS, SHARES)

    @device_function
    def add_share(sums, h, quad, share, output, partials, num_splits, weights):
        """Every SHARES-th split of four dims."""
        row = (output.row + h) * partials.most_splits + int64(share)
        where = address(partials.sums) + row * ROW_BYTES + int64(quad) * 16
        clear(sums, 4)
        add_every(sums, where, weights, h * MOST_SPLITS, int64(share), int64(num_splits))

    @device_function
    def add_splits(thread, output, partials, num_splits, weights):
        """Add partial results to the output, in the order of their splits.

        A thread has four dims of a head. Where there are fewer of these than threads, `merge_shares` threads deal the
        splits out among them, and the first one adds up. One multiprocessor does all of it, while nothing else is left
        to do: its speed depends on how many loads a thread has in flight.
        """
        sums, mine = local_array(4, float32), local_array(4, float32)
        share, i = divmod_32(thread, NUM_QUADS)
        others = uint32(shared_address(weights) + OTHERS + uint32(thread << 4))
        while share < SHARES and i < uint32(output.num_heads * QUADS):
            head, quad = divmod_32(i, QUADS)
            h = int64(head)
            add_share(sums, h, quad, share, output, partials, num_splits, weights)
            if SHARES == 1:
                store_quad(output.address + h * output.head_stride, uint32(quad << 1), sums)
            elif share > 0:
                store_shared_4(uint32(others - 16 * NUM_QUADS), sums[0], sums[1], sums[2], sums[3])
            i = uint32(i + NUM_THREADS)
        if SHARES > 1:
            cuda.syncthreads()
            if thread < uint32(output.num_heads * QUADS):
                for n in range(SHARES - 1):
                    assign(mine, int64(0), load_floats(uint32(others + 16 * NUM_QUADS * n)))
                    add(sums, float32(1), mine, int64(0))
                head, quad = divmod_32(thread, QUADS)
                store_quad(output.address + int64(head) * output.head_stride, uint32(quad << 1), sums)

    return add_splits
