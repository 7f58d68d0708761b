"""Shapes and dtypes of caches: the layouts NHD, HND and vllm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import ml_dtypes
import numpy as np

from .typing import KvDtype, Layout

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
FP8_KINDS: tuple[KvDtype, ...] = get_args(KvDtype)
FLOAT32 = np.dtype(np.float32)
FLOAT_DTYPES = (FLOAT32, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
FP8_DTYPES = {"fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2)}
VECTOR_BYTES = 16

_NHD = "(num_blocks, block_size, num_kv_heads, head_dim)"
_HND = "(num_blocks, num_kv_heads, block_size, head_dim)"


class Geometry(NamedTuple):
    """The sizes of a pair of caches, read from their shapes."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The layout, element type and sizes of a pair of caches.

    Attributes
    ----------
    layout : str
        "NHD", "HND" or "vllm".
    kind : str
        The type of an element: "float32", "float16", "bfloat16", "fp8_e4m3" or "fp8_e5m2".
    num_blocks, block_size, num_kv_heads, head_dim : int
        N, P, Hkv and D.
    """

    layout: Layout
    kind: str
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


def cache_shapes(
    layout: Layout, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V cache of one layer.

    Parameters
    ----------
    layout : str
        "NHD", "HND" or "vllm".
    num_blocks, block_size, num_kv_heads, head_dim : int
        N, P, Hkv and D.
    itemsize : int
        Bytes of an element: 4, 2 or 1.

    Returns
    -------
    k_shape, v_shape : tuple of int
        Both (N, P, Hkv, D) in NHD and (N, Hkv, P, D) in HND; in vllm K is
        (N, Hkv, D / x, P, x) with x = 16 / itemsize and V is (N, Hkv, D, P).

    Raises
    ------
    ValueError
        An unknown layout, or a size that the layout cannot have.
    """
    require_layout(layout)
    if num_blocks < 0:
        raise ValueError(f"num_blocks must be at least 0, got {num_blocks}")
    _require_sizes(layout, block_size, num_kv_heads, head_dim, itemsize)
    if layout == "vllm":
        x = VECTOR_BYTES // itemsize
        return (num_blocks, num_kv_heads, head_dim // x, block_size, x), (
            num_blocks,
            num_kv_heads,
            head_dim,
            block_size,
        )
    inner = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
    shape = (num_blocks, *inner, head_dim)
    return shape, shape


def require_layout(layout: object) -> None:
    """Raise ValueError unless `layout` names a layout."""
    if not (isinstance(layout, str) and layout in LAYOUTS):
        raise ValueError(f'layout must be "NHD", "HND" or "vllm", got {layout!r}')


def storage_dtype(dtype: Any, kv_dtype: KvDtype | None) -> np.dtype[Any]:
    """The NumPy dtype that a cache is stored in.

    Parameters
    ----------
    dtype : dtype-like
        float32, float16 or bfloat16: a NumPy dtype, a name, or a dtype of torch or CuPy.
    kv_dtype : str or None
        "fp8_e4m3" or "fp8_e5m2" for fp8 caches, which are stored as uint8.

    Returns
    -------
    numpy.dtype
        uint8 for fp8 caches, otherwise `dtype`; bfloat16 is ``ml_dtypes.bfloat16``.

    Raises
    ------
    TypeError
        `dtype` is none of the three.
    ValueError
        `kv_dtype` is not the name of an fp8 format.
    """
    require_kv_dtype(kv_dtype)
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else dtype.__name__
    for known in FLOAT_DTYPES:
        if name == known.name:
            return known if kv_dtype is None else np.dtype(np.uint8)
    hint = ': for a cache in 8 bits pass kv_dtype="fp8_e4m3" or "fp8_e5m2"' if name.startswith("float8") else ""
    raise TypeError(f"dtype must be float32, float16 or bfloat16, got {dtype!r}{hint}")


def require_kv_dtype(kv_dtype: object) -> None:
    """Raise ValueError unless kv_dtype is None or the name of an fp8 format."""
    if kv_dtype is not None and not (isinstance(kv_dtype, str) and kv_dtype in FP8_KINDS):
        raise ValueError(f'kv_dtype must be None, "fp8_e4m3" or "fp8_e5m2", got {kv_dtype!r}')


def require_head_dim(head_dim: int) -> None:
    """Raise ValueError unless kernels support this head_dim."""
    if head_dim % 8 or not 8 <= head_dim <= 512:
        raise ValueError(f"head_dim must be a multiple of 8 from 8 to 512, got {head_dim}")


@lru_cache(maxsize=256)
def cache_geometry(layout: Layout, k_shape: tuple[int, ...], v_shape: tuple[int, ...], itemsize: int) -> Geometry:
    """Read the sizes from the shapes of a pair of caches, or raise ValueError."""
    if layout == "vllm":
        return _vllm_geometry(k_shape, v_shape, itemsize)
    symbols = _NHD if layout == "NHD" else _HND
    if len(k_shape) != 4:
        raise ValueError(f"k_cache must have shape {symbols} in layout {layout}, got {k_shape}")
    if v_shape != k_shape:
        raise ValueError(f"v_cache must have shape {symbols} = {k_shape}, that of k_cache, got {v_shape}")
    num_blocks, block_size, num_kv_heads, head_dim = k_shape
    if layout == "HND":
        block_size, num_kv_heads = num_kv_heads, block_size
    _require_sizes(layout, block_size, num_kv_heads, head_dim, itemsize)
    return Geometry(num_blocks, block_size, num_kv_heads, head_dim)


def _vllm_geometry(k_shape: tuple[int, ...], v_shape: tuple[int, ...], itemsize: int) -> Geometry:
    x = max(1, VECTOR_BYTES // max(1, itemsize))  # an itemsize of no cache dtype is reported later, as a TypeError
    if len(k_shape) != 5 or k_shape[4] != x:
        symbols = f"(num_blocks, num_kv_heads, head_dim / {x}, block_size, {x})"
        raise ValueError(f"k_cache must have shape {symbols} in layout vllm, got {k_shape}")
    num_blocks, num_kv_heads, vectors, block_size, _ = k_shape
    expected = (num_blocks, num_kv_heads, vectors * x, block_size)
    if v_shape != expected:
        symbols = "(num_blocks, num_kv_heads, head_dim, block_size)"
        raise ValueError(f"v_cache must have shape {symbols} = {expected} to go with k_cache, got {v_shape}")
    _require_sizes("vllm", block_size, num_kv_heads, vectors * x, VECTOR_BYTES // x)
    return Geometry(num_blocks, block_size, num_kv_heads, vectors * x)


def _require_sizes(layout: Layout, block_size: int, num_kv_heads: int, head_dim: int, itemsize: int) -> None:
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if num_kv_heads < 1:
        raise ValueError(f"num_kv_heads must be at least 1, got {num_kv_heads}")
    require_head_dim(head_dim)
    if layout != "vllm":
        return
    if block_size & (block_size - 1) or not 8 <= block_size <= 256:
        raise ValueError(f"block_size must be a power of two from 8 to 256 in layout vllm, got {block_size}")
    x = VECTOR_BYTES // itemsize
    if head_dim % x:
        raise ValueError(
            f"head_dim must be a multiple of {x} in layout vllm with {itemsize}-byte elements, got {head_dim}"
        )


@lru_cache(maxsize=256)
def cache_spec(layout: Layout, kind: str, geometry: Geometry) -> CacheSpec:
    """The CacheSpec of a valid pair of caches, cached because most calls have the same one."""
    return CacheSpec(layout, kind, *geometry)
