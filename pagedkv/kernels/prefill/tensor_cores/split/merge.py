"""The last steps of the kernel that splits keys: add the warps, then the splits of a sequence, and store the output.

A state is a row's pivot, its sum of exponentials and its sums of values. Warps are added in the order of their keys,
and so are splits. A state without keys adds nothing, and adding the first one that has some changes no bit of it: a row
that sees keys of one warp alone has the bits that it has without splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....device.intrinsics.thread import (
    address,
    assign,
    bits_float,
    divmod_32,
    exp2,
    float_bits,
    for_each,
    larger,
    load_shared,
    local_array,
    multiply_and_add,
    store_4,
    store_8,
    store_16,
)
from ....device.intrinsics.warp import (
    load_l2_2,
    load_l2_4,
    load_shared_2,
    load_shared_word,
    pack_of,
    store_shared_2,
    store_shared_word,
)
from ....device.language import cuda, float32, int64, uint32
from ....device.logits import UNSEEN
from ....device.reductions import largest_of_warp, sum_of_quad, sum_of_warp
from ....device.source import Steps, device_function
from ....device.warp import WARP_SIZE
from ...config import TensorConfig
from ...output import finish
from .shape import SplitShape

MERGE_LOADS = 16  # splits that a thread reads at once when it adds them
FEW_LOADS = 4
LOWEST = float32(-UNSEEN)  # the pivot of a row without keys: its weight is 0 beside any row with keys
NOTHING = float32(-0.0)  # adding it changes no number, not even -0


class Partials(NamedTuple):
    """Partial states of an item's rows; row r of split s is at ``first + r * row_stride + s``."""

    sums: Any  # head_dim float32
    states: Any  # pivot and sum of exponentials
    first: Any
    row_stride: Any  # from a row to the next one
    num_splits: Any


class Splits(NamedTuple):
    """The splits that an item's rows see, by their numbers in the sequence."""

    first: Any
    count: Any


@device_function
def add(sums, weight, x):
    """sums[i] += weight * x[i] for four sums."""
    if weight != float32(0):
        sums[0], sums[1] = multiply_and_add(weight, x[0], sums[0]), multiply_and_add(weight, x[1], sums[1])
        sums[2], sums[3] = multiply_and_add(weight, x[2], sums[2]), multiply_and_add(weight, x[3], sums[3])


@device_function
def clear_sums(sums):
    sums[0], sums[1], sums[2], sums[3] = NOTHING, NOTHING, NOTHING, NOTHING


def make_put_sums(shape: SplitShape) -> Any:
    """The device function ``put_sums(registers, shared, warp, g, t)``: a warp's states to shared memory."""
    OF_ROWS, DIM_TILES, TILES, ROWS = 2 * shape.row_tiles, 2 * shape.k_steps, shape.chunks, shape.rows
    SUM_BYTES, STATE = shape.sum_bytes, 4 * shape.config.head_dim

    @device_function
    def put_pair(n, i, o, where):
        at = 4 * (i // 2 * DIM_TILES + n) + 2 * (i % 2)
        store_shared_2(uint32(where + 32 * n), o[at], o[at + 1])

    @device_function
    def put_row(i, registers, first, t):
        total = sum_of_quad(registers.sums[i])
        where = uint32(first + SUM_BYTES * (16 * (i // 2) + 8 * (i % 2)))
        for_each(put_pair, TILES, (i, registers.o, uint32(where + uint32(t << 3))))
        if t == 0:
            store_shared_2(uint32(where + STATE), float32(-registers.shifts[i]), total)

    @device_function
    def put_sums(registers, shared, warp, g, t):
        first = uint32(shared + uint32(uint32(uint32(warp * ROWS) + g) * SUM_BYTES))
        for_each(put_row, OF_ROWS, (registers, first, t))

    return put_sums


def make_merge(config: TensorConfig, shape: SplitShape) -> Steps:
    """Add the states of warps, or the partial states of splits, and store them."""
    ROWS, QUADS, SUM_BYTES, STATE = shape.rows, config.head_dim // 4, shape.sum_bytes, 4 * config.head_dim
    WARPS, THREADS, WARP_BYTES, ROW_BYTES = shape.num_warps, shape.num_threads, ROWS * SUM_BYTES, STATE
    SPLITS_OF_LANE, WEIGHT_BYTES = -(-shape.most_splits // WARP_SIZE), shape.weight_bytes
    FACTOR, GROUP_SIZE, BUFFERED = 4 * shape.most_splits, config.group_size, 4 * MERGE_LOADS
    pack, load_floats = pack_of(config.q_kind), load_shared(4)

    @device_function
    def store_quad(output, row, quad, sums, factor):
        token, head = divmod_32(row, GROUP_SIZE)
        target = output.address + int64(token) * output.token_stride + int64(head) * output.head_stride
        target += int64(quad) * 8
        # Without keys, values may still be NaN.
        zero = float32(0)
        is_zero = factor == zero
        a = zero if is_zero else float32(sums[0] * factor)
        b = zero if is_zero else float32(sums[1] * factor)
        c = zero if is_zero else float32(sums[2] * factor)
        d = zero if is_zero else float32(sums[3] * factor)
        store_4(target, pack(a, b))
        store_4(target + 4, pack(c, d))

    @device_function
    def finish_row(output, row, maximum, total, is_one):
        """The factor of the row's sums; one thread stores the LSE."""
        token, head = divmod_32(row, GROUP_SIZE)
        has_sink = address(output.sinks) != 0
        sink = output.sinks[int64(output.head) + int64(head)] if has_sink else float32(0)
        factor, lse = finish(total, float32(-maximum), has_sink, sink)
        if is_one and address(output.lse) != 0:
            output.lse[output.lse_row + int64(token) * output.num_heads + int64(head)] = lse
        return float32(factor * output.v_factor)

    @device_function
    def leave(thread, shared, first_row, count, output, partials, split):
        """Add the warps: to the output if the sequence has one split, to a partial state if it has several.

        For `count` rows from first_row on. Every thread calls it, after all warps have put their sums.
        """
        sums, is_only = local_array(4, float32), partials.num_splits == 1
        if thread < count:
            state = uint32(shared + uint32(uint32(thread * SUM_BYTES) + STATE))
            maximum, total = LOWEST, float32(0)
            for w in range(WARPS):
                x = load_shared_2(uint32(state + WARP_BYTES * w))
                maximum = larger(maximum, x[0])
            for w in range(WARPS):
                x = load_shared_2(uint32(state + WARP_BYTES * w))
                weight = exp2(float32(x[0] - maximum))
                store_shared_word(uint32(state + WARP_BYTES * w + 8), float_bits(weight))
                total = multiply_and_add(weight, x[1], total)
            if is_only:
                factor = finish_row(output, uint32(first_row + thread), maximum, total, True)
                store_shared_word(uint32(state + 12), float_bits(factor))
            else:
                at = partials.first + int64(thread) * partials.row_stride + int64(split)
                store_8(partials.states + at * 8, float_bits(maximum), float_bits(total))
        cuda.syncthreads()
        i = thread
        while i < uint32(count * QUADS):
            row, quad = divmod_32(i, QUADS)
            where = uint32(shared + uint32(row * SUM_BYTES))
            clear_sums(sums)
            for w in range(WARPS):
                weight = bits_float(load_shared_word(uint32(where + (WARP_BYTES * w + STATE + 8))))
                add(sums, weight, load_floats(uint32(uint32(where + WARP_BYTES * w) + uint32(quad << 4))))
            if is_only:
                factor = bits_float(load_shared_word(uint32(where + (STATE + 12))))
                store_quad(output, uint32(first_row + row), quad, sums, factor)
            else:
                at = partials.first + int64(row) * partials.row_stride + int64(split)
                words = float_bits(sums[0]), float_bits(sums[1]), float_bits(sums[2]), float_bits(sums[3])
                store_16(partials.sums + at * ROW_BYTES + int64(quad) * 16, words[0], words[1], words[2], words[3])
            i = uint32(i + THREADS)

    @device_function
    def load_state(i, pivots, totals, where, splits, lane):
        split = uint32(uint32(lane + WARP_SIZE * i) - splits.first)
        pivots[i], totals[i] = LOWEST, float32(0)
        if split < splits.count:
            pivots[i], totals[i] = load_l2_2(where + int64(split) * 8)

    @device_function
    def raise_maximum(i, maximum, pivots):
        maximum[0] = larger(maximum[0], pivots[i])

    @device_function
    def put_weight(i, where, pivots, totals, maximum, sums, splits, lane):
        split = uint32(uint32(lane + WARP_SIZE * i) - splits.first)
        weight = exp2(float32(pivots[i] - maximum))
        if split < splits.count:
            store_shared_word(uint32(where + uint32(split << 2)), float_bits(weight))
        sums[0] = multiply_and_add(weight, totals[i], sums[0])

    @device_function
    def weigh_splits(warp, lane, shared, first_row, count, output, partials, first_split):
        """The weights of all splits, and the LSE; a warp takes a row.

        The tokens of a split decide which lane has it, since the order in which lanes are added must not depend on the
        tile: with a window, a tile with earlier rows begins at another split.
        """
        pivots, totals = local_array(SPLITS_OF_LANE, float32), local_array(SPLITS_OF_LANE, float32)
        of_row, r, splits = local_array(1, float32), warp, Splits(first_split, partials.num_splits)
        while r < count:
            where = uint32(shared + uint32(r * WEIGHT_BYTES))
            at = partials.states + (partials.first + int64(r) * partials.row_stride) * 8
            for_each(load_state, SPLITS_OF_LANE, (pivots, totals, at, splits, lane))
            of_row[0] = LOWEST
            for_each(raise_maximum, SPLITS_OF_LANE, (of_row, pivots))
            maximum = largest_of_warp(of_row[0])
            of_row[0] = float32(0)
            args = (where, pivots, totals, maximum, of_row, splits, lane)
            for_each(put_weight, SPLITS_OF_LANE, args)
            total = sum_of_warp(of_row[0])
            factor = finish_row(output, uint32(first_row + r), maximum, total, lane == 0)
            if lane == 0:
                store_shared_word(uint32(where + FACTOR), float_bits(factor))
            r = uint32(r + WARPS)

    @device_function
    def load_split(j, buffer, where):
        assign(buffer, 4 * j, load_l2_4(where + ROW_BYTES * j))

    @device_function
    def add_split(j, sums, weights, buffer):
        weight = bits_float(load_shared_word(uint32(weights + 4 * j)))
        add(sums, weight, (buffer[4 * j], buffer[4 * j + 1], buffer[4 * j + 2], buffer[4 * j + 3]))

    @device_function
    def merge_splits(thread, shared, first_row, count, output, partials, first_split):
        """Add the partial states of all splits to the output; every thread calls it."""
        warp, lane = uint32(thread >> 5), uint32(thread & 31)
        weigh_splits(warp, lane, shared, first_row, count, output, partials, first_split)
        cuda.syncthreads()
        sums, buffer, i = local_array(4, float32), local_array(BUFFERED, float32), thread
        while i < uint32(count * QUADS):
            row, quad = divmod_32(i, QUADS)
            where = partials.sums + (partials.first + int64(row) * partials.row_stride) * ROW_BYTES + int64(quad) * 16
            weights, left = uint32(shared + uint32(row * WEIGHT_BYTES)), partials.num_splits
            factor = bits_float(load_shared_word(uint32(weights + FACTOR)))
            clear_sums(sums)
            while left >= MERGE_LOADS:
                for_each(load_split, MERGE_LOADS, (buffer, where))
                for_each(add_split, MERGE_LOADS, (sums, weights, buffer))
                where, weights = where + MERGE_LOADS * ROW_BYTES, uint32(weights + 4 * MERGE_LOADS)
                left = uint32(left - MERGE_LOADS)
            while left >= FEW_LOADS:
                for_each(load_split, FEW_LOADS, (buffer, where))
                for_each(add_split, FEW_LOADS, (sums, weights, buffer))
                where, weights = where + FEW_LOADS * ROW_BYTES, uint32(weights + 4 * FEW_LOADS)
                left = uint32(left - FEW_LOADS)
            while left > 0:
                for_each(load_split, 1, (buffer, where))
                for_each(add_split, 1, (sums, weights, buffer))
                where, weights = where + ROW_BYTES, uint32(weights + 4)
                left = uint32(left - 1)
            store_quad(output, uint32(first_row + row), quad, sums, factor)
            i = uint32(i + THREADS)

    return Steps(leave, merge_splits)
