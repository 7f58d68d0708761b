"""Writing, gathering and copying blocks on the CPU, in NumPy. Arguments have been checked.

Caches are indexed along their block axis, which every layout has first, and are never copied. Elements move as
unsigned integers: NumPy copies those faster than bfloat16, and every NaN keeps its bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..layouts import FP8_DTYPES, CacheSpec

Array = npt.NDArray[Any]

_BITS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_FLOATS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def write_kv(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slots: npt.NDArray[np.int64],
    spec: CacheSpec,
    k_scale: npt.NDArray[np.float32],
    v_scale: npt.NDArray[np.float32],
) -> None:
    """Write k and v (T, Hkv, D) into the slots (T,); tokens whose slot is negative are skipped."""
    kept = slots >= 0
    if not kept.all():
        k, v, slots = k[kept], v[kept], slots[kept]
    at = np.divmod(slots, spec.block_size)
    keys, values = _encode(k, spec.kind, k_scale), _encode(v, spec.kind, v_scale)
    for x, cache in ((keys, k_cache), (values, v_cache)):
        tokens = _tokens(cache, spec.layout)
        tokens[at] = x.reshape(len(slots), *tokens.shape[2:])


def gather_kv(
    k_cache: Array,
    v_cache: Array,
    block_table: npt.NDArray[np.int32],
    seq_len: int,
    spec: CacheSpec,
    k_scale: npt.NDArray[np.float32],
    v_scale: npt.NDArray[np.float32],
) -> tuple[Array, Array]:
    """The first seq_len keys and values of a sequence as new dense (seq_len, Hkv, D) arrays."""
    pages, offsets = np.divmod(np.arange(seq_len), spec.block_size)
    at = block_table[pages], offsets
    shape = (seq_len, spec.num_kv_heads, spec.head_dim)
    codes = [np.ascontiguousarray(_tokens(cache, spec.layout)[at]).reshape(shape) for cache in (k_cache, v_cache)]
    if spec.kind in _FLOATS:
        return codes[0].view(_FLOATS[spec.kind]), codes[1].view(_FLOATS[spec.kind])
    wide = [x.view(FP8_DTYPES[spec.kind]).astype(np.float32) for x in codes]
    with np.errstate(over="ignore", invalid="ignore"):
        return wide[0] * k_scale[:, None], wide[1] * v_scale[:, None]


def copy_blocks(copies: Iterable[tuple[Array, Array]], pairs: npt.NDArray[np.int64]) -> None:
    """For every (source, destination) cache, copy the blocks pairs[:, 0] onto the blocks pairs[:, 1]."""
    for source, destination in copies:
        bits = _BITS[source.itemsize]
        destination.view(bits)[pairs[:, 1]] = source.view(bits)[pairs[:, 0]]


def _tokens(cache: Array, layout: str) -> Array:
    """The bits of a cache as (num_blocks, block_size, ...): a view with the positions behind the blocks."""
    bits = cache.view(_BITS[cache.itemsize])
    if layout == "NHD":
        return bits
    if layout == "HND":
        return bits.transpose(0, 2, 1, 3)
    return bits.transpose(0, 3, 1, 2, *range(4, cache.ndim))


def _encode(x: Array, kind: str, scale: npt.NDArray[np.float32]) -> Array:
    """The bits of x (T, Hkv, D) as elements of a cache."""
    if kind in _FLOATS:
        dtype = _FLOATS[kind]
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(dtype, copy=False).view(_BITS[dtype.itemsize])
    with np.errstate(over="ignore", invalid="ignore"):
        bits = (x.astype(np.float32, copy=False) / scale[:, None]).view(np.uint32)
    # To 16 bits first, where the last bit says whether anything was lost: rounding these to nearest even
    # gives what rounding the float32 would, and 65,536 cases fit a table.
    low = bits & np.uint32(0xFFFF)
    low += np.uint32(0xFFFF)
    low |= bits
    low >>= np.uint32(16)
    return np.take(_fp8_codes(kind), low)


@lru_cache(maxsize=2)
def _fp8_codes(kind: str) -> npt.NDArray[np.uint8]:
    """The fp8 code of every bfloat16 bit pattern, saturated; NaN stays NaN."""
    dtype = FP8_DTYPES[kind]
    largest = float(ml_dtypes.finfo(dtype).max)
    values = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return np.clip(values, -largest, largest).astype(dtype).view(np.uint8)
