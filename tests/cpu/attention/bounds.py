"""Attention over caches with no readable page before and behind them: a read outside ends the process.

Prints how many calls there were.
"""

import ctypes
import mmap

import numpy as np

import pagedkv
from pagedkv.layouts import as_given

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


def attend(spec, block_size, length, at_end):
    """Decode, and prefill of some rows, few and many, with all blocks in use; how many calls that were."""
    table, lens = np.arange(length // block_size, dtype=np.int32)[None], np.array([length], np.int32)
    parts = spec.kv_format.parts(spec.layout, table.size, block_size, spec.num_kv_heads, spec.head_dim)
    k_cache, v_cache, *scales = as_given(spec.layout, [guarded(np.zeros(*part), at_end) for part in parts])
    options = {"layout": spec.layout, "kv_dtype": spec.kv_dtype if spec.kv_format.coded else None}
    options |= dict(zip(("k_scales", "v_scales"), scales, strict=False))
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
