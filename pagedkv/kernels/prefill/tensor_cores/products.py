"""Both matrix products of the kernel on tensor cores, from rows in shared memory.

    S = Q K^T    A is Q, B is K: a lane (g, t) has S of rows g and g + 8, keys 2t and 2t + 1 of each 8
    O += P V     A is P, in the registers of S; B is V, which ldmatrix transposes

ldmatrix takes the addresses of 8 rows from 8 lanes, four times. With r = lane % 8, and b and c the bits of 8 and 16 of
the lane's number, that lane names row r + 8b, chunk c of Q and V, and row r + 8c, chunk b of K. The chunk is
swizzled by r alone, so the steps of 16 dims that follow are an exclusive or by a constant, or a constant further on.

Fragments are loaded KEYS_AHEAD and VALUES_AHEAD before the products that use them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...device.intrinsics.thread import assign, clear, for_each
from ...device.intrinsics.warp import load_matrices, load_transposed, mma_of
from ...device.language import uint32
from ...device.source import device_function
from ..config import TensorConfig
from .registers import KEYS_AHEAD, VALUES_AHEAD
from .tile import TileShape


class FragmentOffsets(NamedTuple):
    """Bytes from the beginning of a tile to a lane's rows of fragments."""

    q_and_v: Any  # in a tile of Q or of V
    k: Any  # in a tile of K


def make_fragment_offsets(shape: TileShape) -> Any:
    """The device function ``fragment_offsets(lane)``."""
    ROW_BYTES = shape.row_bytes

    @device_function
    def fragment_offsets(lane):
        row, b, c = uint32(lane & 7), uint32(uint32(lane >> 3) & 1), uint32(lane >> 4)
        q_and_v = uint32(uint32(uint32(row + uint32(b << 3)) * ROW_BYTES) + uint32(uint32(c ^ row) << 4))
        k = uint32(uint32(uint32(row + uint32(c << 3)) * ROW_BYTES) + uint32(uint32(b ^ row) << 4))
        return FragmentOffsets(q_and_v, k)

    return fragment_offsets


@device_function
def at_step(offset, step, tile):
    """The address of a step of 16 dims of a lane's row; `tile` stays out of the exclusive or."""
    return uint32(uint32(offset ^ uint32((step & 3) << 5)) + uint32(tile + uint32((step >> 2) << 7)))


def make_multiply_keys(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``multiply_keys(registers, offsets, q_tile, k_tile)``: S of the warp's rows with a tile."""
    STEPS, PAIRS, ROW_TILES, ROW_BYTES = shape.k_steps, shape.key_pairs, shape.row_tiles, shape.row_bytes
    FRAGMENTS, PRODUCTS, SCORES = STEPS * PAIRS, 2 * ROW_TILES, ROW_TILES * 8 * PAIRS
    FIRST = max(0, PAIRS - 2)  # the pair at which the next step's Q is loaded
    AHEAD, BUFFERS, SCORES_OF_TILE = KEYS_AHEAD, KEYS_AHEAD + 1, 8 * PAIRS
    mma = mma_of(config.q_kind)

    @device_function
    def load_query(m, step, q, offsets, q_tile):
        where = at_step(offsets.q_and_v, step, q_tile)
        assign(q, 4 * (step % 2 * ROW_TILES + m), load_matrices(uint32(where + 16 * ROW_BYTES * m)))

    @device_function
    def load_keys(i, k, offsets, k_tile):
        where = at_step(offsets.k, i // PAIRS, k_tile)
        assign(k, 4 * (i % BUFFERS), load_matrices(uint32(where + 16 * ROW_BYTES * (i % PAIRS))))

    @device_function
    def multiply(x, i, s, q, k):
        n, m = x // ROW_TILES, x % ROW_TILES
        at, b = 4 * (i // PAIRS % 2 * ROW_TILES + m), 4 * (i % BUFFERS) + 2 * n
        mma(s, m * SCORES_OF_TILE + 4 * (2 * (i % PAIRS) + n), (q[at], q[at + 1], q[at + 2], q[at + 3]), k[b], k[b + 1])

    @device_function
    def multiply_fragment(i, s, q, k, offsets, q_tile, k_tile):
        step, pair = i // PAIRS, i % PAIRS
        if i + AHEAD < FRAGMENTS:
            load_keys(i + AHEAD, k, offsets, k_tile)
        if step + 1 < STEPS:
            if pair == FIRST:
                load_query(0, step + 1, q, offsets, q_tile)
            if ROW_TILES == 2 and pair == PAIRS - 1:
                load_query(1, step + 1, q, offsets, q_tile)
        for_each(multiply, PRODUCTS, (i, s, q, k))

    @device_function
    def multiply_keys(registers, offsets, q_tile, k_tile):
        s, q, k = registers.s, registers.q, registers.k
        clear(s, SCORES)
        for_each(load_query, ROW_TILES, (0, q, offsets, q_tile))
        for_each(load_keys, AHEAD, (k, offsets, k_tile))
        for_each(multiply_fragment, FRAGMENTS, (s, q, k, offsets, q_tile, k_tile))

    return multiply_keys


def make_load_values(shape: TileShape) -> Any:
    """The device function ``load_values(i, v, offsets, v_tile)``: fragment i of V, 16 keys and 16 dims."""
    STEPS, ROW_BYTES, BUFFERS = shape.k_steps, shape.row_bytes, VALUES_AHEAD + 1

    @device_function
    def load_values(i, v, offsets, v_tile):
        where = at_step(offsets.q_and_v, i % STEPS, v_tile)
        assign(v, 4 * (i % BUFFERS), load_transposed(uint32(where + 16 * ROW_BYTES * (i // STEPS))))

    return load_values


def make_multiply_values(config: TensorConfig, shape: TileShape) -> Any:
    """The device functions ``begin_values(registers, offsets, v_tile)`` and ``multiply_values``: O += P V of a tile.

    `begin_values` loads the first fragments before the softmax, which hides their latency.
    """
    STEPS, PAIRS, ROW_TILES = shape.k_steps, shape.key_pairs, shape.row_tiles
    FRAGMENTS, PRODUCTS, SUMS_OF_TILE, P_OF_TILE = STEPS * PAIRS, 2 * ROW_TILES, 8 * STEPS, 4 * PAIRS
    AHEAD, BUFFERS = VALUES_AHEAD, VALUES_AHEAD + 1
    mma, load_values = mma_of(config.q_kind), make_load_values(shape)

    @device_function
    def load_first(i, v, offsets, v_tile):
        if i < FRAGMENTS:
            load_values(i, v, offsets, v_tile)

    @device_function
    def multiply(x, i, o, p, v):
        n, m = x // ROW_TILES, x % ROW_TILES
        at, b = m * P_OF_TILE + 4 * (i // STEPS), 4 * (i % BUFFERS) + 2 * n
        mma(o, m * SUMS_OF_TILE + 4 * (2 * (i % STEPS) + n), (p[at], p[at + 1], p[at + 2], p[at + 3]), v[b], v[b + 1])

    @device_function
    def multiply_fragment(i, o, p, v, offsets, v_tile):
        if i + AHEAD < FRAGMENTS:
            load_values(i + AHEAD, v, offsets, v_tile)
        for_each(multiply, PRODUCTS, (i, o, p, v))

    @device_function
    def begin_values(registers, offsets, v_tile):
        for_each(load_first, AHEAD, (registers.v, offsets, v_tile))

    @device_function
    def multiply_values(registers, offsets, v_tile):
        for_each(multiply_fragment, FRAGMENTS, (registers.o, registers.p, registers.v, offsets, v_tile))

    return begin_values, multiply_values
