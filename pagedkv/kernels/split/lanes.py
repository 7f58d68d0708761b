"""How the lanes of the split kernel find the rows of tokens, and exchange words inside loops.

Each lane looks up one token of a step, two steps ahead, whatever the block size, and offers the offset of its row
(device/cache_rows.py, in vectors of 16 bytes, or 8 where rows are not multiples of 16) to the lanes that load it.

Words go by shuffles and votes, or, where these cost too many registers (`SplitConfig.through_shared`), through shared
memory, in which every warp has a slot for each kind of word.
"""

from __future__ import annotations

from typing import Any

from ..device.cache_rows import make_address_at, make_row_offset, scale_of_row
from ..device.intrinsics import warp as warps
from ..device.intrinsics.thread import bits_float, float_bits, larger, load_4, shared_address
from ..device.intrinsics.warp import load_shared_word, load_shared_words, shuffle, shuffle_float, store_shared_word
from ..device.language import cuda, float32, int64, uint32
from ..device.reductions import largest_of_quad
from ..device.sizes import WARP_SIZE
from ..device.source import Steps, device_function
from .config import NUM_WARPS, SplitConfig

SLOT_BYTES = 2 * 4 * WARP_SIZE  # two words for each lane
VALUES, OTHERS, NUM_SLOTS = 2, 1, 4  # keys use slot 0; values alternate between 2 and 3
WARP_BYTES = NUM_SLOTS * SLOT_BYTES


def slots_bytes(config: SplitConfig) -> int:
    """Shared memory of the slots of all warps."""
    return NUM_WARPS * WARP_BYTES if config.through_shared else 0


@device_function
def share_word(slot, x):
    """Store a uint32 of each lane in a slot of the warp."""
    where = uint32(slot + (uint32(cuda.threadIdx.x) & 31) * 4)
    warps.sync_warp()  # every lane has read what was there
    store_shared_word(where, x)
    warps.sync_warp()


def make_lanes(config: SplitConfig) -> Steps:
    """The device functions by which lanes exchange words; a whole warp calls each of them."""
    THROUGH_SHARED, WIDE, NUM_WORDS = config.through_shared, config.wide, slots_bytes(config) // 4

    @device_function
    def slots(warp):
        """The shared addresses of a warp's slots for keys, values (two) and other words; zeros without slots."""
        keys = values = others = uint32(0)
        if THROUGH_SHARED:
            first = shared_address(cuda.shared.array(NUM_WORDS, uint32, alignment=16))
            keys = uint32(first + warp * WARP_BYTES)
            values, others = uint32(keys + VALUES * SLOT_BYTES), uint32(keys + OTHERS * SLOT_BYTES)
        return keys, values, others

    @device_function
    def share(slot, x):
        """Offer a uint32 (int64 if wide) of this lane to the other lanes, and return what they `fetch` it with."""
        if THROUGH_SHARED:
            if WIDE:
                share_word(uint32(slot + 4 * WARP_SIZE), uint32(x >> 32))
            share_word(slot, uint32(x))
            return slot
        return x

    @device_function
    def fetch(shared, lane, half):
        """A half of what a lane has offered by `share`."""
        if THROUGH_SHARED:
            return load_shared_word(uint32(shared + lane * 4 + 4 * WARP_SIZE * half))
        return shuffle(uint32(shared >> (32 * half)), lane)

    @device_function
    def offer(slot, x):
        """Let the other lanes take a float32 of this lane by `four_from`."""
        if THROUGH_SHARED:
            share_word(slot, float_bits(x))

    @device_function
    def four_from(slot, x, lane):
        """The float32 of a lane, a multiple of 4, and of the next three; x is what this lane has offered."""
        if THROUGH_SHARED:
            y = load_shared_words(uint32(slot + lane * 4))
            return bits_float(y[0]), bits_float(y[1]), bits_float(y[2]), bits_float(y[3])
        return (
            shuffle_float(x, lane),
            shuffle_float(x, uint32(lane + 1)),
            shuffle_float(x, uint32(lane + 2)),
            shuffle_float(x, uint32(lane + 3)),
        )

    @device_function
    def largest_of_head(slot, x, g):
        """The largest float32 of lanes (g, 0) .. (g, 3)."""
        if THROUGH_SHARED:
            share_word(slot, float_bits(x))
            y = load_shared_words(uint32(slot + g * 16))
            return larger(larger(bits_float(y[0]), bits_float(y[1])), larger(bits_float(y[2]), bits_float(y[3])))
        return largest_of_quad(x)

    @device_function
    def of_heads(slot, x, t):
        """The float32 of lanes with g = 2t and g = 2t + 1."""
        even, odd = uint32(t << 3), uint32((t << 3) + 4)
        if THROUGH_SHARED:
            share_word(slot, float_bits(x))
            even, odd = uint32(slot + even * 4), uint32(slot + odd * 4)
            return bits_float(load_shared_word(even)), bits_float(load_shared_word(odd))
        return shuffle_float(x, even), shuffle_float(x, odd)

    @device_function
    def any_of_warp(condition):
        """Whether the condition may hold in a lane of the warp; through shared memory a vote would cost too much."""
        return True if THROUGH_SHARED else warps.any_lane(condition)

    return Steps(slots, share, fetch, offer, four_from, largest_of_head, of_heads, any_of_warp)


def make_row_lookup(config: SplitConfig, fetch: Any) -> Steps:
    """The device functions that find rows; `fetch` is that of `make_lanes`."""
    BLOCK_SIZE, WIDE, sizes = config.block_size, config.wide, (config.wide, config.vector_bytes)
    BY_ROW = config.by_row
    row_offset, address_at = make_row_offset(*sizes), make_address_at(*sizes)

    @device_function
    def find_token(pages, token):
        """The block of a token and its position there; for tokens past the last one those of the last, safe to load."""
        token = min(token, pages.last)
        column = uint32(token // uint32(BLOCK_SIZE))
        return load_4(pages.table + int64(column) * 4), uint32(token - uint32(column * uint32(BLOCK_SIZE)))

    @device_function
    def scales_of(pages, block, position):
        """The scales of a token's key and value, 1 where rows have none."""
        if BY_ROW:
            return scale_of_row(pages.k_scales, block, position), scale_of_row(pages.v_scales, block, position)
        return float32(1), float32(1)

    @device_function
    def row_address(base, offset, lane):
        """The address of the row whose offset a lane has offered."""
        if WIDE:
            return address_at(base, int64(fetch(offset, lane, 1)) << 32 | int64(fetch(offset, lane, 0)))
        return address_at(base, fetch(offset, lane, 0))

    return Steps(find_token, row_offset, address_at, scales_of, row_address)
