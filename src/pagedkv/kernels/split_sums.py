"""Where the teams of warps of the split kernel leave their sums: in shared memory, without bank conflicts.

Where all of them would take too much, the second half of the teams leaves them first, in the places of the first half,
which adds its own: each lane to what it will store there itself.

Row ``team * num_heads + head`` has the sums of one head, in pairs of float32: pair u is for dims 2u and 2u + 1. On
tensor cores the 16 lanes that store together have g = 0..3 or 4..7 and all t; lane (g, t) stores pair
``dims / 2 * g + j`` of head 2t, or 2t + 1, where dims is what a vector of V has. Pairs of a row change places so that
these 16 lie in 16 different banks.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, uint32

from .intrinsics import exp2, for_each, larger
from .softmax import NONE
from .source import device_function
from .split_config import SplitConfig
from .split_fragments import TensorShape
from .split_softmax import bias
from .tensor_intrinsics import exchange, load_shared_2, shuffle_float, store_shared_2, sync_warp

BANK_PAIRS = 16  # float32 pairs in one pass over the banks
MOST_BYTES = 40 * 1024  # of 48 KiB of static shared memory


def row_pairs(config: SplitConfig) -> int:
    """Pairs of a row in shared memory: whole passes over the banks."""
    return -(-config.head_dim // (2 * BANK_PAIRS)) * BANK_PAIRS


def teams_left(config: SplitConfig) -> int:
    """Teams whose sums are in shared memory at the end."""
    bytes_of_all = 8 * row_pairs(config) * config.num_heads * config.num_teams
    return config.num_teams if bytes_of_all <= MOST_BYTES else config.num_teams // 2


def sums_bytes(config: SplitConfig) -> int:
    """Shared memory of the sums."""
    return 8 * row_pairs(config) * config.num_heads * teams_left(config)


def make_pair_address(config: SplitConfig) -> Any:
    """The device function ``pair_address(shared, team, head, pair)`` -> shared address."""
    ROW_BYTES, NUM_HEADS = 8 * row_pairs(config), config.num_heads
    DIMS = TensorShape(config).v_dims if config.on_tensor_cores else 0

    @device_function
    def pair_address(shared, team, head, pair):
        t = uint32(uint32(head >> 1) & uint32(3))
        if DIMS == 4:  # bits 1 and 2 of the pair are g's
            pair = uint32(pair ^ uint32(uint32(t & uint32(1)) | uint32(uint32(t & uint32(2)) << uint32(2))))
        elif DIMS == 8:  # bits 2 and 3
            pair = uint32(pair ^ t)
        elif DIMS == 16:  # bits 3 and 4, of which the banks see one
            pair = uint32(uint32(pair ^ t) ^ uint32(uint32(uint32(pair >> 4) & uint32(1)) << uint32(2)))
        row = uint32(uint32(team * uint32(NUM_HEADS)) + head)
        return uint32(uint32(shared + uint32(row * uint32(ROW_BYTES))) + uint32(pair << 3))

    return pair_address


def make_put_sums(config: SplitConfig, shape: TensorShape) -> Any:
    """The device function ``put_sums(...)`` of the tensor cores.

    Into shared memory go this team's maxima and sums of exponentials, and the dims of O of this member of it.
    """
    HEAD_TILES, NUM_HEADS, HEAD_DIM, BIAS = shape.head_tiles, config.num_heads, config.head_dim, float32(bias(shape))
    PRODUCTS, PER_VECTOR, TEAMS = shape.num_products, shape.v_dims // 2, teams_left(config)
    PER_MEMBER, HANDS_OVER = shape.v_vectors * 8 * PER_VECTOR, teams_left(config) < config.num_teams
    pair_address = make_pair_address(config)

    @device_function
    def pair_of(i, g, member):
        """Of product i, where this lane has it."""
        vector, j = i // PER_VECTOR, i % PER_VECTOR
        first = uint32(member * uint32(PER_MEMBER))
        return uint32(uint32(uint32(PER_VECTOR * 8 * vector + j) + uint32(g * uint32(PER_VECTOR))) + first)

    @device_function
    def put_pairs(i, shared, o, num_heads, g, t, team, member):
        pair = pair_of(i, g, member)
        for h in range(HEAD_TILES):
            for k in range(2):
                head, at = uint32(uint32(t << 1) + uint32(8 * h + k)), 4 * (i * HEAD_TILES + h) + k
                if head < num_heads and pair < uint32(HEAD_DIM // 2):
                    store_shared_2(pair_address(shared, team, head, pair), o[at], o[at + 2])

    @device_function
    def put(shared, maxima_shared, sums_shared, maxima, sums, o, num_heads, g, t, team, member):
        for h in range(HEAD_TILES):
            head = uint32(g + uint32(8 * h))
            if member == 0 and t == 0 and head < num_heads:
                at = uint32(uint32(team * uint32(NUM_HEADS)) + head)
                maxima_shared[at], sums_shared[at] = maxima[h], sums[h]
        for_each(put_pairs, PRODUCTS, (shared, o, num_heads, g, t, team, member))

    @device_function
    def add_pairs(i, shared, o, own, other, h, num_heads, g, t, team, member):
        pair = pair_of(i, g, member)
        if i % 4 == 0:
            sync_warp()  # ptxas would load all pairs first, into more registers than there are
        for k in range(2):
            head, at = uint32(uint32(t << 1) + uint32(8 * h + k)), 4 * (i * HEAD_TILES + h) + k
            if head < num_heads and pair < uint32(HEAD_DIM // 2):
                x, y = load_shared_2(pair_address(shared, team, head, pair))
                o[at], o[at + 2] = float32(o[at] * own[k] + x * other[k]), float32(o[at + 2] * own[k] + y * other[k])

    @device_function
    def add(h, shared, maxima_shared, sums_shared, maxima, sums, o, num_heads, g, t, team, member):
        """To the sums of 8 heads those that another team has put in the place of this one."""
        # The state of a head that the tile lacks is that of its last one: nobody stores what comes of it.
        head = min(uint32(g + uint32(8 * h)), uint32(num_heads - uint32(1)))
        at = uint32(uint32(team * uint32(NUM_HEADS)) + head)
        maximum = larger(maxima[h], maxima_shared[at])
        pivot = float32(0) if maximum == NONE else maximum
        own, other = exp2(float32(maxima[h] - pivot)), exp2(float32(maxima_shared[at] - pivot))
        maxima[h], sums[h] = maximum, float32(sums[h] * own + sums_shared[at] * other)
        even, odd = uint32(t << 3), uint32(uint32(t << 3) + uint32(4))
        own_pair = (shuffle_float(own, even), shuffle_float(own, odd))
        other_pair = (shuffle_float(other, even), shuffle_float(other, odd))
        for_each(add_pairs, PRODUCTS, (shared, o, own_pair, other_pair, h, num_heads, g, t, team, member))

    @device_function
    def put_sums(shared, maxima_shared, sums_shared, maxima, sums, o, num_heads, g, t, team, member):
        for h in range(HEAD_TILES):
            maxima[h] = float32(maxima[h] - BIAS)
            sums[h] = float32(sums[h] + exchange(sums[h], 1))
            sums[h] = float32(sums[h] + exchange(sums[h], 2))
        if HANDS_OVER:
            place = uint32(team % uint32(TEAMS))
            if team >= TEAMS:
                put(shared, maxima_shared, sums_shared, maxima, sums, o, num_heads, g, t, place, member)
            cuda.syncthreads()
            if team >= TEAMS:
                return
            args = (shared, maxima_shared, sums_shared, maxima, sums, o, num_heads, g, t, team, member)
            for_each(add, HEAD_TILES, args)
        put(shared, maxima_shared, sums_shared, maxima, sums, o, num_heads, g, t, team, member)

    return put_sums
