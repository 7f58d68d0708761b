"""The inner loop of two warpgroups that take turns: one computes exponentials while products of the other one run."""

from __future__ import annotations

from typing import Any

from ....device.intrinsics.thread import local_array
from ....device.intrinsics.warp import end_group, wait_but
from ....device.intrinsics.warpgroup import ROW, UNIT, fence_proxy
from ....device.language import cuda, float32, int64, uint32
from ....device.source import device_function
from ...config import TensorConfig
from .copies import make_copies
from .handovers import ALWAYS, FREE, FULL, TURN, make_handover
from .products import make_descriptors, make_products, make_waits
from .shape import ROWS, WARPS, WgmmaShape
from .softmax import make_softmax


def make_attend_in_turns(config: TensorConfig, shape: WgmmaShape) -> Any:
    """The device function ``attend_tiles(registers, shared, thread, lane, warp, item, ...)``, as in ../loop.py."""
    KEYS, K_START, V_START, TILE_UNITS = shape.keys, shape.k_start, shape.v_start, shape.tile_bytes // UNIT
    copies, softmax = make_copies(config, shape), make_softmax(config, shape)
    (rows_at, values_at), (multiply_keys, multiply_values) = make_descriptors(shape), make_products(config, shape)
    wait_keys, wait_keys_first, wait_values = make_waits(config, shape)
    full, free, turn = (make_handover(shape, number) for number in (FULL, FREE, TURN))
    wait_all, wait_but_1 = wait_but(0), wait_but(1)

    @device_function
    def publish(group, odd):
        """Tell the other warpgroup that this one has copied its half of a tile."""
        wait_all()
        fence_proxy()
        full.tell(group, odd)

    @device_function
    def copy_ahead(copied, first, last, rows, later_rows, after, next_but_one):
        """While the tile at `first` is used, start to copy V of the next one and K of the one after it."""
        if uint32(first + KEYS) <= last:
            copies.copy_values(copied, after, rows)
            if uint32(first + 2 * KEYS) <= last:
                copies.copy_keys(copied, next_but_one, later_rows)
        end_group()

    @device_function
    def attend_tiles(registers, shared, thread, lane, warp, item, query, k, v, pages, visible, options, span, unit):
        group, largest_exponent = uint32(warp // uint32(WARPS)), local_array(1, float32)
        q = rows_at(uint32(shared + uint32(group * (ROWS * ROW))))
        k_tile, v_tile = rows_at(uint32(shared + K_START)), values_at(uint32(shared + V_START))
        # The stages of a tile and of its neighbours: three in a ring, so the one before has that of the next but one.
        before, stage, after = uint32(2), uint32(0), uint32(1)
        first, last, odd = span.first, span.last, uint32(0)
        copied = copies.begin(shared, lane, warp, query, k, v, item)
        first_rows = copies.find_rows(pages, first, lane, warp)
        copies.copy_keys(copied, stage, first_rows)
        end_group()
        rows = copies.find_rows(pages, uint32(first + KEYS), lane, warp)
        copies.copy_values(copied, stage, first_rows)
        if uint32(first + KEYS) <= last:
            copies.copy_keys(copied, after, rows)
        end_group()

        # The first tile has no earlier product to overlap with.
        wait_but_1()
        fence_proxy()
        cuda.syncthreads()
        multiply_keys(registers.s, q, k_tile)
        if group == 1:
            turn.tell(group, ALWAYS)  # the other one begins
        later_rows = copies.find_rows(pages, uint32(first + 2 * KEYS), lane, warp)
        wait_keys(registers.s)
        publish(group, odd)
        softmax.exponentiate(registers, largest_exponent, shared, visible, options, span, unit, first, warp, lane)
        copy_ahead(copied, first, last, rows, later_rows, after, before)
        free.tell(group, odd)
        softmax.round_p(registers)
        while uint32(first + KEYS) <= last:
            first, rows = uint32(first + KEYS), later_rows
            before, stage, after = stage, after, before
            full.wait(group, odd)
            turn.wait(group, ALWAYS)
            multiply_keys(registers.s, q, k_tile + int64(stage) * TILE_UNITS)
            multiply_values(registers.o, registers.p, v_tile + int64(before) * TILE_UNITS)
            turn.tell(group, ALWAYS)
            later_rows = copies.find_rows(pages, uint32(first + 2 * KEYS), lane, warp)
            wait_keys_first(registers.s)
            publish(group, uint32(odd ^ 2))
            has_moved = softmax.exponentiate(
                registers, largest_exponent, shared, visible, options, span, unit, first, warp, lane
            )
            free.wait(group, odd)
            copy_ahead(copied, first, last, rows, later_rows, after, before)
            wait_values(registers.o)
            odd = uint32(odd ^ 2)
            free.tell(group, odd)
            if has_moved:
                softmax.rescale(registers)
            # Until here the product reads P.
            softmax.round_p(registers)
        full.wait(group, odd)
        turn.wait(group, ALWAYS)
        multiply_values(registers.o, registers.p, v_tile + int64(stage) * TILE_UNITS)
        if group == 0:
            turn.tell(group, ALWAYS)
        wait_values(registers.o)
        free.wait(group, odd)

    return attend_tiles
