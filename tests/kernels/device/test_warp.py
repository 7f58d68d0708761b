"""Each intrinsic of a warp, of memory that threads share and of copies into it, against NumPy."""

import numpy as np
from numba import cuda, float32, int64, uint32

from pagedkv.kernels.device import reductions
from pagedkv.kernels.device.intrinsics import thread as device
from pagedkv.kernels.device.intrinsics import warp

N = 128  # threads of a block
LANE = np.arange(N) % 32
WARP = np.arange(N) - LANE


def words(count=N):
    return np.random.default_rng(3).integers(0, 2**32, count, np.uint32)


def test_loads_past_the_first_cache(run):
    def load_all(source, result, i):
        if i % 4 == 0:
            where, to = source + i * 4, result + i * 16
            a, b, c, d = warp.stream_16(where)
            device.store_16(to, a, b, c, d)
            a, b = warp.stream_8(where)
            c, d = warp.stream_4(where + 8)[0], warp.stream_4(where + 12)[0]
            device.store_16(to + 16, a, b, c, d)
            w, x, y, z = warp.load_l2_4(where)
            device.store_16(
                to + 32, device.float_bits(w), device.float_bits(x), device.float_bits(y), device.float_bits(z)
            )
            w, x = warp.load_l2_2(where)
            y, z = warp.load_l2_2(where + 8)
            device.store_16(
                to + 48, device.float_bits(w), device.float_bits(x), device.float_bits(y), device.float_bits(z)
            )

    source = np.arange(1, N + 1, dtype=np.float32)
    result = run(load_all, source, np.zeros((N // 4, 4, 4), np.float32))
    np.testing.assert_array_equal(result, np.repeat(source.reshape(-1, 1, 4), 4, axis=1))


def test_shared_words_are_those_that_another_lane_stored(run):
    def turn(source, result, i):
        tile = device.shared_address(cuda.shared.array(512, uint32, alignment=16))
        mine, other = uint32(tile + uint32(16 * i)), uint32(tile + uint32(16 * (i ^ 1)))
        a = device.load_4(source + i * 4)
        b, c, d = uint32(a + 1), uint32(a + 2), uint32(a + 3)
        warp.store_shared_words(mine, a, b, c, d)
        warp.sync_warp()
        p, q, r, s = warp.load_shared_words(other)
        device.store_16(result + i * 64, p, q, r, s)
        r, s = warp.load_shared_pair(uint32(other + 8))
        device.store_16(result + i * 64 + 16, warp.load_shared_word(other), warp.load_shared_word(mine), r, s)
        warp.barrier_of_warp(uint32(1 + (i >> 5)))
        x, y, z, w = device.bits_float(a), device.bits_float(b), device.bits_float(c), device.bits_float(d)
        warp.store_shared_4(mine, w, z, y, x)
        warp.sync_warp()
        x, y = warp.load_shared_2(other)
        z, w = warp.load_shared_2(uint32(other + 8))
        device.store_16(
            result + i * 64 + 32, device.float_bits(x), device.float_bits(y), device.float_bits(z), device.float_bits(w)
        )
        warp.sync_warp()
        warp.store_shared_2(mine, device.bits_float(d), device.bits_float(b))
        warp.store_shared_word(uint32(mine + 8), c)
        warp.sync_warp()
        p, q, r, s = warp.load_shared_words(other)
        device.store_16(result + i * 64 + 48, p, q, r, s)

    mine = np.arange(N, dtype=np.uint32) * 16 + 0x3F800000  # floats above 1
    (a, b, c, d), own = mine[np.arange(N) ^ 1] + np.arange(4, dtype=np.uint32)[:, None], mine
    result = run(turn, mine, np.zeros((N, 16), np.uint32))
    expected = [a, b, c, d, a, own, c, d, d, c, b, a, d, b, c, a]
    np.testing.assert_array_equal(result, np.stack(expected, 1))


def test_copies_are_there_when_their_group_has_been_waited_for(run):
    wait_but_1, wait_all = warp.wait_but(1), warp.wait_but(0)

    def copy(source, result, i):
        tile = device.shared_address(cuda.shared.array(2048, uint32, alignment=16))
        first = uint32(tile + uint32(64 * i))
        for j in range(4):
            warp.store_shared_words(uint32(first + uint32(16 * j)), uint32(1), uint32(1), uint32(1), uint32(1))
        warp.sync_warp()
        where = source + (i & ~int64(3)) * 4  # a multiple of 16
        warp.copy_vector(first, where)
        warp.end_group()
        warp.copy_16(uint32(first + 16), where, uint32(i % 17), i % 3 > 0)
        warp.copy_8(uint32(first + 32), where, uint32(i % 9), i % 5 > 0)
        warp.copy_8(uint32(first + 40), where + 8, uint32(8), True)
        warp.end_group()
        wait_but_1()
        p, q, r, s = warp.load_shared_words(first)
        device.store_16(result + i * 64, p, q, r, s)
        wait_all()
        for j in range(1, 4):
            p, q, r, s = warp.load_shared_words(uint32(first + uint32(16 * j)))
            device.store_16(result + i * 64 + 16 * j, p, q, r, s)

    source = words()
    result = run(copy, source, np.zeros((N, 4, 4), np.uint32)).view(np.uint8).reshape(N, 64)
    vectors = source.view(np.uint8).reshape(-1, 16)
    for i, got in enumerate(result):
        vector, ones = vectors[i // 4], np.ones(4, np.uint32).view(np.uint8)
        part = np.where(np.arange(16) < i % 17, vector, 0) if i % 3 else ones
        half = np.where(np.arange(8) < i % 9, vector[:8], 0) if i % 5 else ones[:8]
        np.testing.assert_array_equal(got, np.concatenate([vector, part, half, vector[8:], ones]))


def test_shuffles_and_votes(run):
    among_4 = warp.shuffle_among(4)

    def meet(source, result, i):
        x, lane = device.load_4(source + i * 4), uint32(i & 31)
        small = float32(x & 0xFFFF)
        device.store_16(
            result + i * 48,
            warp.shuffle(x, uint32(lane * 5 & 31)),
            among_4(x, 2),
            device.float_bits(warp.shuffle_float(small, uint32(31 - lane))),
            device.float_bits(warp.exchange(small, 6)),
        )
        is_odd = x & 1 == 1
        device.store_16(
            result + i * 48 + 16,
            warp.ballot(is_odd),
            uint32(warp.any_lane(x == 7)),
            warp.or_of_warp(uint32(x & 0x11)),
            uint32(warp.thread_number() * 3),
        )
        device.store_16(
            result + i * 48 + 32,
            device.float_bits(reductions.largest_of_warp(small)),
            device.float_bits(reductions.sum_of_warp(small)),
            device.float_bits(reductions.largest_of_quad(small)),
            device.float_bits(reductions.sum_of_quad(small)),
        )

    x = words()
    x[40] = 7
    result = run(meet, x, np.zeros((N, 12), np.uint32))
    small = (x & 0xFFFF).astype(np.float32)
    by_warp, quads = small.reshape(-1, 32), small.reshape(-1, 4)
    odd = (x.reshape(-1, 32) & 1).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    expected = [
        x[WARP + LANE * 5 % 32],
        x[np.arange(N) // 4 * 4 + 2],
        small[WARP + 31 - LANE].view(np.uint32),
        small[np.arange(N) ^ 6].view(np.uint32),
        np.repeat(odd.sum(1), 32),
        np.arange(N) // 32 == 1,
        np.repeat(np.bitwise_or.reduce(x.reshape(-1, 32) & 0x11, axis=1), 32),
        np.arange(N) * 3,
        np.repeat(by_warp.max(1), 32).view(np.uint32),
        np.repeat(by_warp.sum(1), 32).view(np.uint32),  # exact in any order
        np.repeat(quads.max(1), 4).view(np.uint32),
        np.repeat(quads.sum(1), 4).view(np.uint32),
    ]
    np.testing.assert_array_equal(result, np.stack(expected, 1))


def test_or_of_warp_is_of_all_lanes_of_the_own_warp(run):
    def either(source, result, i):
        device.store_4(result + i * 4, warp.or_of_warp(device.load_4(source + i * 4)))

    of_warps = np.repeat(np.array([0x0F0F0F0F, 0xFFFFFFFF, 1, 0], np.uint32), 32)
    one_bit = of_warps & (np.uint32(1) << np.random.default_rng(4).integers(0, 32, 128, np.uint32))
    result = run(either, one_bit, np.zeros_like(one_bit), (8, 0))
    np.testing.assert_array_equal(result, np.repeat(np.bitwise_or.reduce(one_bit.reshape(-1, 32), axis=1), 32))


def test_a_counter_begins_again_after_the_last_one(run):
    def count(source, result, i):
        if i == 0:
            for j in range(4):
                device.store_4(result + 4 * j, warp.count_up(result + 16, uint32(2)))

    counted = run(count, np.zeros(1, np.uint32), np.zeros(5, np.uint32))
    np.testing.assert_array_equal(counted, [0, 1, 2, 0, 1])


def test_the_block_that_counts_last_sees_what_the_others_stored(run):
    blocks = 20

    def tell(source, result, i):
        if cuda.threadIdx.x == 0:
            block = i // N
            device.store_8(result + 8 * (block + 1), device.load_4(source + i * 4), uint32(block))
            warp.fence()
            if warp.count_up_and_acquire(result, uint32(blocks - 1)) == blocks - 1:
                total = float32(0)
                for other in range(1, blocks + 1):
                    x, _ = warp.load_l2_2(result + 8 * other)
                    total = float32(total + x)
                device.store_4(result + 4, device.float_bits(total))

    source = np.arange(blocks * N, dtype=np.float32)
    result = run(tell, source, np.zeros((blocks + 1, 2), np.uint32))
    assert result[0, 0] == 0  # it counts from the last one to 0
    assert result[0, 1:].view(np.float32) == source[::N].sum()
    np.testing.assert_array_equal(result[1:, 1], np.arange(blocks))
