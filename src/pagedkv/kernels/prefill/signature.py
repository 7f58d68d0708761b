"""The parameters of the prefill kernels."""

from __future__ import annotations

from typing import Any

from numba import float32, int32, int64, types, uint8

_BYTES, _INTS, _FLOATS = (types.CPointer(dtype) for dtype in (uint8, int32, float32))


def signature(num_strides: int) -> Any:
    """Of a kernel that takes this many strides, in bytes."""
    return types.void(
        *(_BYTES, _FLOATS, _BYTES, _BYTES, _BYTES),  # out, lse, q, k_cache, v_cache
        *(_INTS, _INTS, _INTS),  # block_tables, seq_lens, query_starts
        *(_FLOATS, _FLOATS, _FLOATS, _FLOATS),  # alibi_slopes, sinks, k_scale, v_scale
        *[int64] * 7,  # sizes, window, causal
        *[int64] * num_strides,
        *[int64] * 4,  # the bits of float32: scale, softcap, and k_scale and v_scale where they are numbers
    )
