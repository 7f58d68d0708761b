"""The inner loop of two warpgroups that take turns: one computes exponentials while products of the other one run."""

from __future__ import annotations

from ....device.intrinsics.thread import local_array
from ....device.intrinsics.warp import any_lane, end_group, shuffle, wait_but
from ....device.intrinsics.warpgroup import ROW, UNIT, fence_proxy
from ....device.language import cuda, float32, int64, uint32
from ....device.source import Steps, device_function
from ...config import TensorConfig
from .copies import make_copies
from .handovers import FREE, FULL, TURN, make_handover
from .products import make_descriptors, make_products, make_waits
from .shape import ROWS, WARPS, WgmmaShape
from .softmax import make_softmax


def make_attend_in_turns(config: TensorConfig, shape: WgmmaShape) -> Steps:
    """The device functions ``begin(shared, lane, warp, item, tiles)``, ``attend`` and ``finish(registers)``.

    `begin` starts to copy Q and the first tile of K of an item. ``attend(registers, shared, where, lane, warp, tiles)``
    goes through its tiles, and leaves the last product running, for which `finish` waits. `where` is the item's slot.
    """
    KEYS, K_START, V_START = shape.keys, shape.k_start, shape.v_start
    TILE_BYTES, TILE_UNITS = shape.tile_bytes, shape.tile_bytes // UNIT
    copies, softmax = make_copies(config, shape), make_softmax(config, shape)
    (rows_at, values_at), (multiply_keys, multiply_values) = make_descriptors(shape), make_products(config, shape)
    wait_keys, wait_keys_first, wait_values = make_waits(config, shape)
    full, free, turn = (make_handover(shape, number) for number in (FULL, FREE, TURN))
    wait_all = wait_but(0)

    @device_function
    def kept(address):
        """The address, by a shuffle: ptxas would compute it again in each turn of the loop."""
        return shuffle(address, uint32(0))

    @device_function
    def publish(mine):
        """Tell the other warpgroup that this one has copied its half of a tile."""
        wait_all()
        fence_proxy()
        full.tell(mine)

    @device_function
    def copy_ahead(copied, first, last, rows, later_rows, after, next_but_one):
        """While the tile at `first` is used, start to copy V of the next one and K of the one after it."""
        if uint32(first + KEYS) <= last:
            copies.copy_values(copied, uint32(after * TILE_BYTES), rows)
            if uint32(first + 2 * KEYS) <= last:
                copies.copy_keys(copied, uint32(next_but_one * TILE_BYTES), later_rows)
        end_group()

    @device_function
    def attend(registers, shared, where, lane, warp, tiles):
        group, largest_exponent = uint32(warp // uint32(WARPS)), local_array(1, float32)
        q = rows_at(kept(uint32(shared + uint32(group * (ROWS * ROW)))))
        k_tile, v_tile = rows_at(kept(uint32(shared + K_START))), values_at(kept(uint32(shared + V_START)))
        # The stages of a tile and of its neighbours: three in a ring, so the one before has that of the next but one.
        before, stage, after = uint32(2), uint32(0), uint32(1)
        first, last, mine = tiles.span.first, tiles.span.last, group
        pages, copied = tiles.pages, copies.copied_of(shared, lane, warp, tiles.k, tiles.v)
        # The first tile has no earlier product to overlap with. At this barrier no product reads the item before.
        wait_all()
        fence_proxy()
        cuda.syncthreads()
        multiply_keys(registers.s, q, k_tile)
        if group == 1:
            turn.tell(group)  # the other one begins
        rows = copies.find_rows(pages, uint32(first + KEYS), lane, warp)
        copies.copy_values(copied, uint32(0), copies.find_rows(pages, first, lane, warp))
        if uint32(first + KEYS) <= last:
            copies.copy_keys(copied, uint32(after * TILE_BYTES), rows)
        end_group()
        later_rows = copies.find_rows(pages, uint32(first + 2 * KEYS), lane, warp)
        wait_keys(registers.s)
        softmax.exponentiate(registers, largest_exponent, where, tiles, first, warp, lane)
        publish(mine)
        copy_ahead(copied, first, last, rows, later_rows, after, before)
        free.tell(mine)
        softmax.round_p(registers)
        while any_lane(uint32(first + KEYS) <= last):
            first, rows = uint32(first + KEYS), later_rows
            before, stage, after = stage, after, before
            full.wait(mine)
            turn.wait(group)
            multiply_keys(registers.s, q, k_tile + int64(stage) * TILE_UNITS)
            multiply_values(registers.o, registers.p, v_tile + int64(before) * TILE_UNITS)
            turn.tell(group)
            later_rows = copies.find_rows(pages, uint32(first + 2 * KEYS), lane, warp)
            wait_keys_first(registers.s)
            publish(uint32(mine ^ 2))
            has_moved = softmax.exponentiate(registers, largest_exponent, where, tiles, first, warp, lane)
            free.wait(mine)
            copy_ahead(copied, first, last, rows, later_rows, after, before)
            wait_values(registers.o)
            mine = uint32(mine ^ 2)
            free.tell(mine)
            if has_moved:
                softmax.rescale(registers)
            # Until here the product reads P.
            softmax.round_p(registers)
        full.wait(mine)
        turn.wait(group)
        multiply_values(registers.o, registers.p, v_tile + int64(stage) * TILE_UNITS)
        if group == 0:
            turn.tell(group)
        free.wait(mine)

    @device_function
    def finish(registers):
        wait_values(registers.o)

    return Steps(copies.begin, attend, finish)
