"""Attention over caches with no readable page before and behind them: a read outside ends the process.

Prints how many calls there were.
"""

import ctypes
import mmap

import numpy as np

import pagedkv

from ...attention.kernels import CPU_DECODE
from ...support.problems import FLOATS


def guarded(array, at_end):
    """A copy whose bytes end, or begin, where a page does that may not be touched."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    room = -(-array.nbytes // page) * page
    memory = np.frombuffer(mmap.mmap(-1, room + 2 * page), np.uint8)
    for address in (memory.ctypes.data, memory.ctypes.data + page + room):
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), 0) == 0, ctypes.get_errno()
    begin = page + (room - array.nbytes if at_end else 0)
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def shapes_of(spec, num_blocks, block_size, item):
    """The shapes of K and of V."""
    heads, dim = spec.num_kv_heads, spec.head_dim
    if spec.layout == "vllm":
        return (num_blocks, heads, dim * item // 16, block_size, 16 // item), (num_blocks, heads, dim, block_size)
    return ((num_blocks, *((block_size, heads) if spec.layout == "NHD" else (heads, block_size)), dim),) * 2


def attend(spec, block_size, length, at_end):
    """Decode, and prefill of some rows, few and many, with all blocks in use; how many calls that were."""
    dtype = FLOATS.get(spec.kv_dtype, np.dtype(np.uint8))
    table, lens = np.arange(length // block_size, dtype=np.int32)[None], np.array([length], np.int32)
    shapes = shapes_of(spec, table.size, block_size, dtype.itemsize)
    k_cache, v_cache = (guarded(np.zeros(shape, dtype), at_end) for shape in shapes)
    options = {"layout": spec.layout, "kv_dtype": None if spec.kv_dtype in FLOATS else spec.kv_dtype}
    counts = [n for n in (1, 5, 70) if n <= length]
    for rows in counts:
        q = guarded(np.ones((rows, spec.num_heads, spec.head_dim), FLOATS[spec.q_dtype]), at_end)
        for window in (None, 9):
            arguments = k_cache, v_cache, table, lens
            pagedkv.decode_attention(q[-1:], *arguments, window=window, **options)
            pagedkv.prefill_attention(q, *arguments, np.array([0, rows], np.int32), window=window, **options)
    return 4 * len(counts)


def main():
    calls = 0
    for spec in (kernel.spec for kernel in CPU_DECODE):
        for block_size, length in ((8, 8), (8, 72), *([] if spec.layout == "vllm" else [(1, 73), (3, 513)])):
            for at_end in (True, False):
                calls += attend(spec, block_size, length, at_end)
    print(calls)


if __name__ == "__main__":
    main()
