"""The inner loop of two warpgroups in step, for tiles of which only two stages have room: one barrier a tile."""

from __future__ import annotations

from ....device.intrinsics.thread import local_array
from ....device.intrinsics.warp import any_lane, end_group, wait_but
from ....device.intrinsics.warpgroup import ROW, UNIT, fence_proxy
from ....device.language import cuda, float32, int64, uint32
from ....device.source import Steps, device_function
from ...config import TensorConfig
from .copies import make_copies
from .products import make_descriptors, make_products, make_waits
from .shape import ROWS, WARPS, WgmmaShape
from .softmax import make_softmax


def make_attend_in_step(config: TensorConfig, shape: WgmmaShape) -> Steps:
    """The device functions ``begin(shared, lane, warp, item, tiles)``, ``attend`` and ``finish(registers)``.

    `begin` starts to copy Q and the first tile of K of an item. ``attend(registers, shared, where, lane, warp, tiles)``
    goes through its tiles, and leaves the last product running, for which `finish` waits. `where` is the item's slot.
    """
    KEYS, K_START, V_START, TILE_BYTES = shape.keys, shape.k_start, shape.v_start, shape.tile_bytes
    copies, softmax = make_copies(config, shape), make_softmax(config, shape)
    (rows_at, values_at), (multiply_keys, multiply_values) = make_descriptors(shape), make_products(config, shape)
    wait_keys, wait_keys_first, wait_values = make_waits(config, shape)
    wait_all = wait_but(0)

    @device_function
    def publish_copies():
        """Make what all threads have copied visible to the products of all."""
        wait_all()
        fence_proxy()
        cuda.syncthreads()

    @device_function
    def copy_ahead(copied, first, last, stage, rows, later_rows):
        """Start to copy V of the tile at `first`, and K of the next one."""
        copies.copy_values(copied, stage, rows)
        if uint32(first + KEYS) <= last:
            copies.copy_keys(copied, uint32(TILE_BYTES - stage), later_rows)
        end_group()

    @device_function
    def attend(registers, shared, where, lane, warp, tiles):
        largest_exponent = local_array(1, float32)
        q = rows_at(uint32(shared + uint32(uint32(warp // uint32(WARPS)) * (ROWS * ROW))))
        k_tile, v_tile = rows_at(uint32(shared + K_START)), values_at(uint32(shared + V_START))
        first, last, stage = tiles.span.first, tiles.span.last, uint32(0)  # the stage as its offset in bytes
        pages, copied = tiles.pages, copies.copied_of(shared, lane, warp, tiles.k, tiles.v)
        rows = copies.find_rows(pages, first, lane, warp)
        later_rows = copies.find_rows(pages, uint32(first + KEYS), lane, warp)

        # The first tile has no earlier product to overlap with.
        publish_copies()
        multiply_keys(registers.s, q, k_tile)
        copy_ahead(copied, first, last, stage, rows, later_rows)
        rows, later_rows = later_rows, copies.find_rows(pages, uint32(first + 2 * KEYS), lane, warp)
        wait_keys(registers.s)
        softmax.exponentiate(registers, largest_exponent, where, tiles, first, warp, lane)
        softmax.round_p(registers)
        while any_lane(uint32(first + KEYS) <= last):
            first, stage = uint32(first + KEYS), uint32(TILE_BYTES - stage)
            publish_copies()
            multiply_keys(registers.s, q, k_tile + int64(stage // uint32(UNIT)))
            multiply_values(registers.o, registers.p, v_tile + int64(uint32(TILE_BYTES - stage) // uint32(UNIT)))
            # The products run while the threads start the copies.
            copy_ahead(copied, first, last, stage, rows, later_rows)
            rows, later_rows = later_rows, copies.find_rows(pages, uint32(first + 2 * KEYS), lane, warp)
            wait_keys_first(registers.s)
            has_moved = softmax.exponentiate(registers, largest_exponent, where, tiles, first, warp, lane)
            softmax.finish_exponentials(registers)
            wait_values(registers.o)
            if has_moved:
                softmax.rescale(registers)
            # Until here the product reads P.
            softmax.round_p(registers)
        publish_copies()
        multiply_values(registers.o, registers.p, v_tile + int64(stage // uint32(UNIT)))

    @device_function
    def finish(registers):
        wait_values(registers.o)

    return Steps(copies.begin, attend, finish)
