"""The states of a thread block's rows over stretches of keys: what its threads have in registers, in global memory.

A state is O, the sums of exponentials and the shifts, in vectors of 16 bytes: the i-th vectors of all threads lie side
by side, those of O first. A thread reads what threads of its number wrote. Two states become one by the formula of
device/merging.py.
"""

from __future__ import annotations

from typing import Any

from ....device.intrinsics.thread import assign, exp2, float_bits, for_each, local_array, multiply_and_add, store_16
from ....device.intrinsics.warp import load_l2_4
from ....device.language import float32, int64, uint32
from ....device.source import Steps, device_function
from ...config import TensorConfig
from ..prologue import make_prologue
from ..tile import TileShape

VECTOR = 16  # bytes that a thread stores at once


def state_bytes(shape: TileShape) -> int:
    """Bytes of the state of a thread block."""
    return (2 * shape.row_tiles * shape.k_steps + shape.row_tiles) * VECTOR * shape.num_threads


@device_function
def weights_of(before, shift):
    """The shift of two states together, and the weight of each: 1 of the one with the higher pivot, minus its shift."""
    both = shift if shift < before else before
    return both, exp2(float32(both - before)), exp2(float32(both - shift))


@device_function
def fold(before, x, weight_before, weight):
    """The sum of a number and what came before; that of a state without keys is 0, and changes no bit of the other."""
    return multiply_and_add(x, weight, float32(before * weight_before))


def make_stretches_of(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``stretches_of(item, visible, stretch)``, for stretches of so many tokens.

    It returns the first stretch of which a row of the item sees a key, and how many there are from it to the last one.
    """
    prologue = make_prologue(config, shape)

    @device_function
    def stretches_of(item, visible, stretch):
        low, span = prologue.span_of(item, visible)
        first = uint32(low // uint32(stretch))
        return first, uint32(uint32(uint32(span.last // uint32(stretch)) - first) + 1)

    return stretches_of


def make_states(shape: TileShape) -> Steps:
    """The device functions ``store(registers, where, thread)`` and ``add(registers, where, thread)``.

    `where` is the address of a state, which `store` overwrites, and to which `add` adds the one in registers.
    """
    ROW_TILES, DIM_TILES, ROWS, OF_ROWS = shape.row_tiles, 2 * shape.k_steps, 2 * shape.row_tiles, 4 * shape.row_tiles
    VECTORS, STRIDE = ROW_TILES * DIM_TILES, VECTOR * shape.num_threads

    @device_function
    def store_vector(v, o, where):
        a, b, c, d = float_bits(o[4 * v]), float_bits(o[4 * v + 1]), float_bits(o[4 * v + 2]), float_bits(o[4 * v + 3])
        store_16(where + STRIDE * v, a, b, c, d)

    @device_function
    def store_rows_of_tile(m, sums, shifts, where):
        first, second = float_bits(sums[2 * m]), float_bits(sums[2 * m + 1])
        shift, later = float_bits(shifts[2 * m]), float_bits(shifts[2 * m + 1])
        store_16(where + STRIDE * (VECTORS + m), first, second, shift, later)

    @device_function
    def store(registers, where, thread):
        mine = where + int64(thread) * VECTOR
        for_each(store_vector, VECTORS, (registers.o, mine))
        for_each(store_rows_of_tile, ROW_TILES, (registers.sums, registers.shifts, mine))

    @device_function
    def load_rows_of_tile(m, loaded, where):
        assign(loaded, 4 * m, load_l2_4(where + STRIDE * (VECTORS + m)))

    @device_function
    def add_row(i, registers, before, weights):
        at = 4 * (i // 2) + i % 2
        shift, weights[2 * i], weights[2 * i + 1] = weights_of(before[at + 2], registers.shifts[i])
        registers.sums[i] = fold(before[at], registers.sums[i], weights[2 * i], weights[2 * i + 1])
        registers.shifts[i] = shift

    @device_function
    def add_vector(v, o, where, weights):
        before = load_l2_4(where + STRIDE * v)
        for e in range(4):
            i = 2 * (v // DIM_TILES) + e // 2
            o[4 * v + e] = fold(before[e], o[4 * v + e], weights[2 * i], weights[2 * i + 1])
        store_vector(v, o, where)

    @device_function
    def add(registers, where, thread):
        mine = where + int64(thread) * VECTOR
        before, weights = local_array(OF_ROWS, float32), local_array(OF_ROWS, float32)
        for_each(load_rows_of_tile, ROW_TILES, (before, mine))
        for_each(add_row, ROWS, (registers, before, weights))
        for_each(add_vector, VECTORS, (registers.o, mine, weights))
        for_each(store_rows_of_tile, ROW_TILES, (registers.sums, registers.shifts, mine))

    return Steps(store, add)
