"""The states that the kernel which splits keys stores for the one that merges them, and where they lie.

A state is a row's pivot, its sum of exponentials and its sums of values, over the keys of one part. The states of a row
lie side by side in the order of their parts, beginning with the first part that some row of its tile sees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....device.intrinsics.thread import address, float_bits, for_each, store_8
from ....device.language import cuda, float32, int64, uint32
from ....device.reductions import sum_of_quad
from ....device.source import Steps, device_function
from ...arguments import Item
from ...config import FEW_ROWS, LONGEST_OF_PARTS, PART, TensorConfig
from ...items import item_of
from .shape import PartShape


class Parts(NamedTuple):
    """The numbers of the parts of a sequence that rows see."""

    bits: Any  # the binary logarithm of the tokens of a part
    first: Any
    last: Any


class States(NamedTuple):
    """The states of an item's rows: that of its row r over part s is number ``first + r * row_stride + s``."""

    sums: Any  # the address of all sums of values, head_dim float32 each
    pivots: Any  # the address of all pivots, each with its sum of exponentials
    first: Any
    row_stride: Any


def make_states(config: TensorConfig, shape: PartShape) -> Steps:
    """The device functions ``split_item``, ``parts_of``, ``states_of`` and ``store``."""
    GROUP_SIZE, PART_BITS, LONGEST_BITS = config.group_size, PART.bit_length() - 1, LONGEST_OF_PARTS.bit_length() - 1
    OF_ROWS, DIM_TILES, TILES, ROW_BYTES = 2 * shape.row_tiles, 2 * shape.k_steps, shape.chunks, 4 * config.head_dim

    @device_function
    def split_item(first_row, seq, lengths, num_tokens, max_seq_len, least_keys):
        """The item of a sequence's rows from first_row on, with 0 rows if its keys are not split."""
        item = item_of(seq, first_row, uint32(GROUP_SIZE), lengths, num_tokens, max_seq_len)
        is_here = first_row < item.num_rows and item.num_rows <= uint32(FEW_ROWS)
        if not is_here or item.seq_len < uint32(least_keys):
            return Item(seq, first_row, uint32(0), item.start, item.context, item.seq_len)
        return item

    @device_function
    def parts_of(seq_len, low, last):
        """The parts from token `low` to token `last`."""
        bits = uint32(32 + PART_BITS - uint32(cuda.clz(uint32(uint32(seq_len - 1) >> LONGEST_BITS))))
        return Parts(bits, uint32(low >> bits), uint32(last >> bits))

    @device_function
    def states_of(partial_sums, partial_states, item, kv_head, num_kv_heads, most_parts, by_tokens):
        """The states of an item's rows and a KV head."""
        first = int64(item.start) * GROUP_SIZE if by_tokens != 0 else int64(item.seq) * FEW_ROWS
        first = ((first + int64(item.first_row)) * num_kv_heads + int64(kv_head)) * most_parts
        return States(address(partial_sums), address(partial_states), first, num_kv_heads * most_parts)

    @device_function
    def store_pair(n, i, o, target, is_there, is_empty):
        at, zero = 4 * (i // 2 * DIM_TILES + n) + 2 * (i % 2), float32(0)
        first, second = zero if is_empty else o[at], zero if is_empty else o[at + 1]
        if is_there:
            store_8(target + 32 * n, float_bits(first), float_bits(second))

    @device_function
    def store_row(i, registers, states, part, num_rows, g, t):
        total = sum_of_quad(registers.sums[i])
        row = uint32(g + (16 * (i // 2) + 8 * (i % 2)))
        is_there = row < num_rows
        at = states.first + int64(row) * states.row_stride + int64(part)
        # Without keys, values may still be NaN.
        args = (i, registers.o, states.sums + at * ROW_BYTES + int64(t) * 8, is_there, total == float32(0))
        for_each(store_pair, TILES, args)
        if is_there and t == 0:
            store_8(states.pivots + at * 8, float_bits(float32(-registers.shifts[i])), float_bits(total))

    @device_function
    def store(registers, states, part, num_rows, g, t):
        """Store the states of a warp's first num_rows rows, over the part-th of the parts that its tile sees."""
        for_each(store_row, OF_ROWS, (registers, states, part, num_rows, g, t))

    return Steps(split_item, parts_of, states_of, store)
