"""Prefill attention on warpgroups (wgmma), after FlashAttention-3: 16-bit caches in NHD and HND, on 9.0 alone.

Grid, items, copies and softmax are those of ../kernel.py. A thread block has 128 rows, 64 for each of two warpgroups,
and goes through tiles of 128 keys (64 with 256 dims) in two stages. The products read their operands from shared memory
and run asynchronously: S = Q K^T of a tile and O += P V of the one before start together, and the second one runs while
the threads compute the softmax of the first.

Shared memory is cut into panels of 64 dims, as descriptors require: see shape.py. Before the barrier, a fence makes
what threads have copied visible to the products (the asynchronous proxy).
"""

from __future__ import annotations

from typing import Any

from ....device.cache_rows import Cache
from ....device.intrinsics.thread import divmod_32, local_array
from ....device.intrinsics.warp import end_group, wait_but
from ....device.intrinsics.warpgroup import GROUP, ROW, UNIT, fence_proxy
from ....device.language import cuda, float32, int64, uint32
from ....device.source import KernelSource, device_function
from ...config import TensorConfig
from ..copies import make_copy_query, make_copy_rows, make_find_row, make_negate_query
from ..kernel import kernel_of
from ..softmax import make_exponentials, make_hide_unseen, make_logits
from ..tile import CHUNK
from .products import make_descriptors, make_products, make_waits
from .shape import PANEL_CHUNKS, ROWS, WARPS, WgmmaShape


def make_prefill_wgmma(config: TensorConfig) -> KernelSource:
    """The kernel of all rows of all sequences, which attend to the keys that they see."""
    shape = WgmmaShape(config)
    return kernel_of(config, shape, make_attend_tiles(config, shape), GROUP, is_specific=True)


def make_attend_tiles(config: TensorConfig, shape: WgmmaShape) -> Any:
    """The device function ``attend_tiles(registers, shared, thread, lane, warp, item, ...)``, as in ../loop.py."""
    KEYS, LANES, Q_PANEL, PANEL = shape.keys, shape.lanes, shape.q_panel_bytes, shape.panel_bytes
    K_START, V_START, TILE_BYTES = shape.k_start, shape.v_start, shape.tile_bytes
    TILE_UNITS, VECTOR_BYTES = TILE_BYTES // UNIT, config.vector_bytes
    copy_query, negate_query = make_copy_query(config, shape), make_negate_query(shape)
    find_row, copy_rows = make_find_row(config, shape), make_copy_rows(config, shape)
    (rows_at, values_at), (multiply_keys, multiply_values) = make_descriptors(shape), make_products(config, shape)
    wait_keys, wait_keys_first, wait_values = make_waits(config, shape)
    logits, hide_unseen = make_logits(config, shape), make_hide_unseen(config, shape)
    exponentiate, rescale, round_p = make_exponentials(config, shape)
    wait_all = wait_but(0)

    @device_function
    def begin_query(place, query, row, chunk, item):
        """Copy Q to shared memory."""
        strides = (query.token_stride, query.head_stride)
        first, last = uint32(item.first_row + row), uint32(item.num_rows - 1)
        copy_query(place, query.address + int64(chunk) * CHUNK, strides, first, last, True)
        if query.is_negative:
            end_group()
            wait_all()
            negate_query(place)

    @device_function
    def publish_copies():
        """Make what all threads have copied visible to the products of all."""
        wait_all()
        fence_proxy()
        cuda.syncthreads()

    @device_function
    def softmax(registers, largest_exponent, shared, visible, options, span, unit, first, warp, lane):
        """Turn S into exponentials, and return whether a pivot has moved."""
        mine = uint32(first + uint32(uint32(lane & 3) << 1))
        logits(registers, options, mine, uint32(0))
        if uint32(first - span.unmasked) >= span.num_unmasked:
            hide_unseen(registers, visible, shared, mine, warp, uint32(lane >> 2))
        return exponentiate(registers, largest_exponent, unit)

    @device_function
    def finish_exponentials(sums):
        """Compute the exponentials before what follows: ptxas moves a wait up among them, but past no branch."""
        if float32(sums[0] + sums[1]) < float32(0):  # never
            fence_proxy()

    @device_function
    def attend_tiles(registers, shared, thread, lane, warp, item, query, k, v, pages, visible, options, span, unit):
        row, chunk = divmod_32(thread, LANES)
        panel, column = divmod_32(chunk, PANEL_CHUNKS)
        place = uint32(shared + uint32(uint32(row * ROW) + uint32(uint32(column ^ uint32(row & 7)) << 4)))
        begin_query(uint32(place + uint32(panel * Q_PANEL)), query, row, chunk, item)
        offset = int64(chunk) * VECTOR_BYTES
        keys = Cache(k.address + offset, k.block_stride, k.token_stride)
        values = Cache(v.address + offset, v.block_stride, v.token_stride)
        k_place = uint32(uint32(place + uint32(panel * PANEL)) + K_START)
        v_place = uint32(k_place + (V_START - K_START))

        first = span.first
        block, position = find_row(pages, first, lane, warp)
        copy_rows(k_place, keys, block, position, True)
        end_group()
        v_block, v_position = block, position
        block, position = find_row(pages, uint32(first + KEYS), lane, warp)
        q = rows_at(uint32(shared + uint32(uint32(warp // uint32(WARPS)) * (ROWS * ROW))))
        k_tile, v_tile = rows_at(uint32(shared + K_START)), values_at(uint32(shared + V_START))
        largest_exponent = local_array(1, float32)

        # The first tile has no earlier product to overlap with.
        publish_copies()
        copy_rows(v_place, values, v_block, v_position, True)
        if uint32(first + KEYS) <= span.last:
            copy_rows(uint32(k_place + TILE_BYTES), keys, block, position, True)
        end_group()
        v_block, v_position = block, position
        block, position = find_row(pages, uint32(first + 2 * KEYS), lane, warp)
        multiply_keys(registers.s, q, k_tile)
        wait_keys(registers.s)
        softmax(registers, largest_exponent, shared, visible, options, span, unit, first, warp, lane)
        round_p(registers)
        first, stage = uint32(first + KEYS), uint32(TILE_BYTES)
        while first <= span.last:
            publish_copies()
            units = int64(stage >> 4)
            multiply_keys(registers.s, q, k_tile + units)
            multiply_values(registers.o, registers.p, v_tile + (TILE_UNITS - units))
            # The products run while the threads start the copies.
            copy_rows(uint32(v_place + stage), values, v_block, v_position, True)
            if uint32(first + KEYS) <= span.last:
                copy_rows(uint32(uint32(k_place + TILE_BYTES) - stage), keys, block, position, True)
            end_group()
            v_block, v_position = block, position
            block, position = find_row(pages, uint32(first + 2 * KEYS), lane, warp)
            wait_keys_first(registers.s)
            has_moved = softmax(registers, largest_exponent, shared, visible, options, span, unit, first, warp, lane)
            finish_exponentials(registers.sums)
            wait_values(registers.o)
            if has_moved:
                rescale(registers)
            # Until here the product reads P.
            round_p(registers)
            first = uint32(first + KEYS)
            stage = uint32(TILE_BYTES - stage)
        publish_copies()
        multiply_values(registers.o, registers.p, v_tile + (TILE_UNITS - int64(stage >> 4)))
        wait_values(registers.o)

    return attend_tiles
