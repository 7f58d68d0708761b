"""Where the warp groups of the split kernel store their sums: shared memory, without bank conflicts.

A warp group is the warps that take the same tokens. Row ``warp_group * num_heads + head`` has the sums of one head, in
pairs of float32: pair u is for dims 2u and 2u + 1.

On tensor cores the 16 lanes that store together have g = 0..3 or 4..7 and all t; lane (g, t) stores pair
``dims / 2 * g + j`` of head 2t, or 2t + 1, where dims is that of a vector of V. Pairs of a row are swizzled so that
these 16 hit 16 different banks. If half of the lanes or more have no head, the others are in both halves of the warp,
which would store one after the other: then lanes store single float32, for all g at once. The merge reads an even pair
and then the next one; every second 32 dims these two are swapped, so that 16 lanes hit 16 banks.
"""

from __future__ import annotations

from typing import Any

from ..device.intrinsics.thread import float_bits, load_shared, unrolled
from ..device.intrinsics.warp import load_shared_2, store_shared_2, store_shared_word
from ..device.language import float32, uint32
from ..device.reductions import sum_of_quad
from ..device.source import Steps, device_function
from .config import SplitConfig
from .shape import TensorShape

BANK_PAIRS = 16  # float32 pairs in one pass over the banks
MOST_STATIC = 40 * 1024  # bytes of sums: 48 KiB, less what else is static


def warp_group_bytes(config: SplitConfig) -> int:
    """Shared memory of the sums of a warp group, whose rows are whole passes over the banks."""
    return -(-config.head_dim // (2 * BANK_PAIRS)) * 8 * BANK_PAIRS * config.num_heads


def sums_bytes(config: SplitConfig) -> int:
    """Shared memory of the sums of all warp groups."""
    return warp_group_bytes(config) * config.num_warp_groups


def are_dynamic(config: SplitConfig) -> bool:
    """Whether sums are in dynamic shared memory, because they replace staged rows or do not fit into static memory."""
    return config.staged or sums_bytes(config) > MOST_STATIC


def make_sums_layout(config: SplitConfig) -> Steps:
    """The device functions ``pair_address`` and ``load_quad``, which know where sums lie."""
    ROW_BYTES, ON_TENSOR_CORES = warp_group_bytes(config) // config.num_heads, config.on_tensor_cores
    load_floats = load_shared(4)
    DIMS = TensorShape(config).v_dims if config.on_tensor_cores else 0

    @device_function
    def pair_address(shared, head, pair, j):
        """The shared address of pair + j for warp group 0.

        `pair` is a multiple of what a lane has of a vector, and j less than that; or `pair` is even, and j is 0.
        """
        t = uint32(uint32(head >> 1) & 3)
        upper, highest = uint32(uint32(pair >> 4) & 1), uint32(uint32(pair >> 5) & 1)
        if DIMS == 4:  # bits 1 to 3 of the pair are g's
            t = uint32((t & 1) | ((t & 2) << 2))
            pair = uint32(pair ^ t ^ upper)
        elif DIMS == 8:  # bits 2 to 4, of which the banks see two
            pair = uint32(pair ^ t ^ (upper * 3))
        elif DIMS == 16:  # bits 3 to 5, of which the banks see one
            pair = uint32(pair ^ t ^ ((upper * 5) | (highest << 1)))
        return uint32(shared + head * ROW_BYTES + ((pair << 3) ^ (8 * j)))

    @device_function
    def load_quad(where):
        """The sums of two pairs, the first of them even and at `where`."""
        if ON_TENSOR_CORES:  # pairs of a row are swizzled
            a, b = load_shared_2(where)
            c, d = load_shared_2(uint32(where ^ 8))
            return a, b, c, d
        return load_floats(where)

    return Steps(pair_address, load_quad)


def make_store_sums(shape: TensorShape, sums: Steps) -> Any:
    """The device function ``store_sums(shared, registers, first_head, g, t, warp_group, dims_part)``."""
    config, pair_address = shape.config, sums.pair_address
    HEAD_TILES, NUM_HEADS, HEAD_DIM = shape.head_tiles, config.num_heads, config.head_dim
    PER_VECTOR, HEADS_OF_WARP = shape.v_dims // 2, config.heads_of_warp
    PAIRS_OF_WARP, WARP_GROUP_BYTES = shape.v_vectors * 8 * PER_VECTOR, warp_group_bytes(config)
    IS_EVEN = config.num_heads == config.warps_for_heads * config.heads_of_warp

    @device_function
    def has_row(head, first_head):
        return head < uint32(HEADS_OF_WARP) and (IS_EVEN or uint32(first_head + head) < uint32(NUM_HEADS))

    @unrolled(shape.num_products)
    def store_pairs(i, h, k, shared, o, head, g, dims_part):
        vector, j = i // PER_VECTOR, i % PER_VECTOR
        first_pair = uint32(dims_part * PAIRS_OF_WARP)
        pair = uint32(PER_VECTOR * 8 * vector + g * PER_VECTOR + first_pair)
        if pair < uint32(HEAD_DIM // 2):
            where, at = pair_address(shared, head, pair, j), 4 * (i * HEAD_TILES + h) + k
            if HEADS_OF_WARP - 8 * h - k > 4:
                store_shared_2(where, o[at], o[at + 2])
            else:
                store_shared_word(where, float_bits(o[at]))
                store_shared_word(uint32(where + 4), float_bits(o[at + 2]))

    @unrolled(2 * shape.head_tiles)
    def store_heads(i, shared, o, first_head, g, t, dims_part):
        h, k = i // 2, i % 2
        head = uint32((t << 1) + 8 * h + k)
        if has_row(head, first_head):
            store_pairs(h, k, shared, o, uint32(first_head + head), g, dims_part)

    @device_function
    def store_sums(shared, registers, first_head, g, t, warp_group, dims_part):
        """Store a warp group's maxima and sums, and a part of the dims of O, of heads from first_head on."""
        for h in range(HEAD_TILES):
            total = sum_of_quad(registers.sums[h])
            head = uint32(g + 8 * h)
            if dims_part == 0 and t == 0 and has_row(head, first_head):
                at = uint32(warp_group * NUM_HEADS + first_head + head)
                shared.maxima[at], shared.sums[at] = float32(-registers.shifts[h]), total
        store_heads(uint32(shared.address + warp_group * WARP_GROUP_BYTES), registers.o, first_head, g, t, dims_part)

    return store_sums
