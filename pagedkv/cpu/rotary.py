"""The rotary embedding on the CPU, in NumPy."""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..calls import RotaryCall
from ..commit import Write, bits, commit

PIECE_BYTES = 256 * 1024


def apply_rotary(call: RotaryCall, q_out: Array, k_out: Array | None) -> None:
    """Fill q_out (T, Hq, D) and k_out (T, Hkv, D), which may be q and k, with the rotated rows of q and k."""
    writes: list[Write] = []
    for x, out in ((call.q, q_out), (call.k, k_out)):
        if x is not None and out is not None:
            result = rotated(x, call.cos, call.sin, call.positions, interleaved=call.interleaved)
            writes.append((bits(out), ..., bits(result)))
    commit(writes)


def rotated(x: Array, cos: Array, sin: Array, positions: Array, *, interleaved: bool) -> Array:
    """A new array of the rows of x (T, heads, D), rotated by the angles of their positions."""
    half = cos.shape[1]
    halves = slice(0, half, 1), slice(half, 2 * half, 1)
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else halves
    result = np.empty(x.shape, x.dtype)
    result[..., 2 * half :] = x[..., 2 * half :]
    # Few tokens at a time, so that what is computed on the way stays in the processor's caches.
    piece = max(1, PIECE_BYTES // max(1, 4 * x[:1].size))
    for start in range(0, len(x), piece):
        some, rows = slice(start, start + piece), positions[start : start + piece]
        c, s = (table[rows].astype(np.float32, copy=False)[:, None] for table in (cos, sin))
        a, b = (x[some][..., part].astype(np.float32, copy=False) for part in (first, second))
        result[some][..., first] = a * c - b * s
        result[some][..., second] = b * c + a * s
    return result
