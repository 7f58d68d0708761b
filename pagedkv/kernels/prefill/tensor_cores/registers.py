"""The registers of a lane on tensor cores: what it has at the beginning, and what it stores at the end."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...device.intrinsics.thread import address, clear, divmod_32, for_each, local_arrays, store_4
from ...device.intrinsics.warp import pack_of
from ...device.language import float32, int64, uint32
from ...device.logits import UNSEEN
from ...device.reductions import sum_of_quad
from ...device.source import device_function
from ..config import TensorConfig
from ..output import finish
from .tile import TileShape

KEYS_AHEAD, VALUES_AHEAD = 1, 2  # fragments in flight ahead of the product that uses them


class TileRegisters(NamedTuple):
    """Arrays of a lane. Element 2m + h of those marked [row] is for row g + 8h of the warp's m-th tile of 16 rows."""

    o: Any  # accumulators of O: 4 for each tile of rows and 8 dims
    s: Any  # accumulators of S, then logits: 4 for each tile of rows and 8 keys
    p: Any  # P, rounded, as operands
    q: Any  # fragments of Q: two steps of 16 dims
    k: Any  # fragments of K in flight
    v: Any  # fragments of V in flight
    sums: Any  # [row], sums of this lane's exponentials
    shifts: Any  # [row], added to logits to make exponents
    maxima: Any  # [row], the largest of this lane's logits with the tile of keys
    factors: Any  # [row], by which sums and O are rescaled when a pivot moves
    positions: Any  # [row], if an option needs them, like the two below
    heads: Any
    slopes: Any
    exponents: Any  # [row], of the largest scale of the values that it sees in a tile, if caches have scales of rows


def make_registers(shape: TileShape) -> Any:
    """The device function ``registers()``, which returns TileRegisters."""
    row_tiles = shape.row_tiles
    of_rows = 2 * row_tiles
    options = of_rows if shape.config.modified else 1
    return local_arrays(
        TileRegisters,
        o=(row_tiles * 8 * shape.k_steps, float32),
        s=(row_tiles * 8 * shape.key_pairs, float32),
        p=(row_tiles * 4 * shape.key_pairs, uint32),
        q=(row_tiles * 8, uint32),
        k=(4 * (KEYS_AHEAD + 1), uint32),
        v=(4 * (VALUES_AHEAD + 1), uint32),
        sums=(of_rows, float32),
        shifts=(of_rows, float32),
        maxima=(of_rows, float32),
        factors=(of_rows, float32),
        positions=(options, uint32),
        heads=(options, uint32),
        slopes=(options, float32),
        exponents=(of_rows if shape.config.by_row else 1, float32),
    )


def make_row_of(shape: TileShape) -> Any:
    """The device function ``row_of(i, warp, g)``: the number of a lane's i-th row in the thread block's tile."""
    ROWS = shape.rows_of_warp

    @device_function
    def row_of(i, warp, g):
        return uint32(uint32(warp * ROWS) + uint32(g + (16 * (i // 2) + 8 * (i % 2))))

    return row_of


def make_start(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``start(registers, item, slopes, kv_head, warp, g)``, for before the first tile of keys."""
    OF_ROWS, SUMS, MODIFIED, GROUP_SIZE = (
        2 * shape.row_tiles,
        shape.row_tiles * 8 * shape.k_steps,
        config.modified,
        config.group_size,
    )
    row_of = make_row_of(shape)

    @device_function
    def start_row(i, registers, item, slopes, kv_head, warp, g):
        registers.shifts[i], registers.sums[i] = UNSEEN, float32(0)
        if MODIFIED:
            row = min(uint32(item.first_row + row_of(i, warp, g)), uint32(item.num_rows - 1))
            token = uint32(row // uint32(GROUP_SIZE))
            head = uint32(uint32(kv_head * GROUP_SIZE) + uint32(row - uint32(token * uint32(GROUP_SIZE))))
            registers.positions[i], registers.heads[i] = uint32(item.context + token), head
            registers.slopes[i] = slopes[int64(head)] if address(slopes) != 0 else float32(0)

    @device_function
    def start(registers, item, slopes, kv_head, warp, g):
        clear(registers.o, SUMS)
        for_each(start_row, OF_ROWS, (registers, item, slopes, kv_head, warp, g))

    return start


def make_pair_of_row(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``pair_of_row(n, i, o, factor)``: a lane's word of chunk n of its i-th row of O, rounded."""
    DIM_TILES, pack = 2 * shape.k_steps, pack_of(config.q_kind)

    @device_function
    def pair_of_row(n, i, o, factor):
        at = 4 * (i // 2 * DIM_TILES + n) + 2 * (i % 2)
        # Without keys, values may still be NaN.
        zero = float32(0)
        first, second = float32(o[at] * factor), float32(o[at + 1] * factor)
        return pack(first if factor != zero else zero, second if factor != zero else zero)

    return pair_of_row


def make_store_words(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``store_words(i, o, shared, target, factor, is_inside, g, t)``: a lane stores 4 bytes."""
    CHUNKS, pair_of_row = shape.chunks, make_pair_of_row(config, shape)

    @device_function
    def store_word(n, i, o, target, factor, is_inside):
        word = pair_of_row(n, i, o, factor)
        if is_inside:
            store_4(target + 16 * n, word)

    @device_function
    def store_words(i, o, shared, target, factor, is_inside, g, t):
        for_each(store_word, CHUNKS, (i, o, target + int64(t) * 4, factor, is_inside))

    return store_words


def make_store_rows(config: TensorConfig, shape: TileShape, store_row_of_o: Any) -> Any:
    """The device function ``store_rows(registers, output, item, warp, g, t, shared)``: O goes to `out`, and the LSE.

    `store_row_of_o` is `store_words` or a function like it, which the whole warp calls for a row of each quad.
    """
    OF_ROWS, GROUP_SIZE, row_of = 2 * shape.row_tiles, config.group_size, make_row_of(shape)

    @device_function
    def add_lanes(i, sums):
        sums[i] = sum_of_quad(sums[i])

    @device_function
    def store_row(i, registers, output, item, warp, g, t, shared):
        row = uint32(item.first_row + row_of(i, warp, g))
        # No branch around all of it: with 3 heads to a KV head, NVVM left jumps to a block that it had removed.
        is_inside = row < item.num_rows
        token, head = divmod_32(min(row, uint32(item.num_rows - 1)), GROUP_SIZE)
        has_sink = address(output.sinks) != 0
        sink = output.sinks[int64(output.head) + int64(head)] if has_sink else float32(0)
        factor, lse = finish(registers.sums[i], registers.shifts[i], has_sink, sink)
        target = output.address + int64(token) * output.token_stride + int64(head) * output.head_stride
        store_row_of_o(i, registers.o, shared, target, float32(factor * output.v_factor), is_inside, g, t)
        if is_inside and t == 0 and address(output.lse) != 0:
            output.lse[output.lse_row + int64(token) * output.num_heads + int64(head)] = lse

    @device_function
    def store_rows(registers, output, item, warp, g, t, shared):
        # Lanes are added before any branch: after one, the compiler does not know that the warp is whole.
        for_each(add_lanes, OF_ROWS, (registers.sums,))
        for_each(store_row, OF_ROWS, (registers, output, item, warp, g, t, shared))

    return store_rows
