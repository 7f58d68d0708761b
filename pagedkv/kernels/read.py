"""Reading as fast as memory allows, for benches to compare other kernels with.

Grid. x is the chunk, of `turns` times TURN_BYTES.

Who owns what. A thread block owns a chunk and adds up its 32-bit words. In a turn each thread has LOADS vectors of 16
bytes in flight, a thread block apart from each other, so that a warp's load is 512 contiguous bytes. With one turn even
few bytes have enough thread blocks for the whole GPU. With none a thread block reads nothing: an empty launch.

Shared memory. Static: the sums of the warps, 16 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from .device.intrinsics.thread import address, clear, for_each, local_array
from .device.intrinsics.warp import shuffle, stream_16
from .device.language import cuda, int64, types, uint32
from .device.sizes import WARP_SIZE
from .device.source import KernelSource, device_function

NUM_THREADS, LOADS = 128, 8
TURN_BYTES = NUM_THREADS * LOADS * 16
MIN_BLOCKS = 8  # thread blocks on a multiprocessor, with 128 KiB in flight

WORDS = types.CPointer(uint32)
SIGNATURE = types.void(WORDS, WORDS, int64)  # source, sums, turns


class ReadConfig(NamedTuple):
    """The kernel has no compile-time constants."""


def make_read(config: ReadConfig) -> KernelSource:
    """The kernel that sums the 32-bit words of each chunk, modulo 2**32."""
    NUM_WARPS, NUM_WORDS, ROW_BYTES = NUM_THREADS // WARP_SIZE, 4 * LOADS, NUM_THREADS * 16
    LOG_WARP_SIZE = WARP_SIZE.bit_length() - 1

    @device_function
    def load(i, words, where):
        words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = stream_16(where + i * ROW_BYTES)

    @device_function
    def add(i, words, total):
        total[0] = uint32(total[0] + words[i])

    @device_function
    def add_lanes(i, total, lane):
        total[0] = uint32(total[0] + shuffle(total[0], uint32(lane ^ uint32(1 << i))))

    def read(source, sums, turns):
        of_warps = cuda.shared.array(NUM_WARPS, uint32)
        thread = uint32(cuda.threadIdx.x)
        where = address(source) + int64(cuda.blockIdx.x) * turns * TURN_BYTES + int64(thread) * 16
        words, total = local_array(NUM_WORDS, uint32), local_array(1, uint32)
        clear(total, 1)
        for turn in range(turns):
            for_each(load, LOADS, (words, where + turn * TURN_BYTES))
            for_each(add, NUM_WORDS, (words, total))
        for_each(add_lanes, LOG_WARP_SIZE, (total, uint32(thread & (WARP_SIZE - 1))))
        if thread & (WARP_SIZE - 1) == 0:
            of_warps[thread >> LOG_WARP_SIZE] = total[0]
        cuda.syncthreads()
        if thread == 0:
            clear(total, 1)
            for warp in range(NUM_WARPS):
                total[0] = uint32(total[0] + of_warps[warp])
            sums[cuda.blockIdx.x] = total[0]

    return KernelSource(read, SIGNATURE, NUM_THREADS, MIN_BLOCKS)
