"""The end of a thread block on tensor cores: rows of O to `out`, and the LSE."""

from __future__ import annotations

from typing import Any

from ...device.intrinsics.thread import address, divmod_32, for_each, store_4
from ...device.intrinsics.warp import pack_of
from ...device.language import float32, int64, uint32
from ...device.reductions import sum_of_quad
from ...device.source import device_function
from ..config import TensorConfig
from ..output import finish
from .softmax import make_row_of
from .tile import TileShape


def make_store_rows(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``store_rows(registers, output, item, warp, g, t)``."""
    OF_ROWS, DIM_TILES, TILES, GROUP_SIZE = 2 * shape.row_tiles, 2 * shape.k_steps, shape.chunks, config.group_size
    pack, row_of = pack_of(config.q_kind), make_row_of(shape)

    @device_function
    def store_pair(n, i, o, target, factor, is_inside):
        at = 4 * (i // 2 * DIM_TILES + n) + 2 * (i % 2)
        # Without keys, values may still be NaN.
        zero = float32(0)
        first, second = float32(o[at] * factor), float32(o[at + 1] * factor)
        word = pack(first if factor != zero else zero, second if factor != zero else zero)
        if is_inside:
            store_4(target + 16 * n, word)

    @device_function
    def add_lanes(i, sums):
        sums[i] = sum_of_quad(sums[i])

    @device_function
    def store_row(i, registers, output, item, warp, g, t):
        row = uint32(item.first_row + row_of(i, warp, g))
        # No branch around all of it: with 3 heads to a KV head, NVVM left jumps to a block that it had removed.
        is_inside = row < item.num_rows
        token, head = divmod_32(min(row, uint32(item.num_rows - 1)), GROUP_SIZE)
        has_sink = address(output.sinks) != 0
        sink = output.sinks[int64(output.head) + int64(head)] if has_sink else float32(0)
        factor, lse = finish(registers.sums[i], registers.shifts[i], has_sink, sink)
        target = output.address + int64(token) * output.token_stride + int64(head) * output.head_stride
        args = (i, registers.o, target + int64(t) * 4, float32(factor * output.v_factor), is_inside)
        for_each(store_pair, TILES, args)
        if is_inside and t == 0 and address(output.lse) != 0:
            output.lse[output.lse_row + int64(token) * output.num_heads + int64(head)] = lse

    @device_function
    def store_rows(registers, output, item, warp, g, t):
        # Before any branch: after one, the compiler does not know that the warp is whole.
        for_each(add_lanes, OF_ROWS, (registers.sums,))
        for_each(store_row, OF_ROWS, (registers, output, item, warp, g, t))

    return store_rows
