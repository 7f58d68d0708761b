"""What caches are: the formats of their rows, and the layouts NHD, HND and vllm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .cached_property import cached_property
from .typing import KvDtype, Layout

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
FLOAT32 = np.dtype(np.float32)
FLOAT_DTYPES = (FLOAT32, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
VECTOR_BYTES = 16

INT8_MAX = 127  # the largest code of an int8 row; -128 is none

_NHD = "(num_blocks, block_size, num_kv_heads, head_dim)"
_HND = "(num_blocks, num_kv_heads, block_size, head_dim)"
_EITHER = ", ".join(f'"{name}"' for name in KV_DTYPES[:-1]) + f' or "{KV_DTYPES[-1]}"'


class Geometry(NamedTuple):
    """The sizes of a pair of caches, read from their shapes."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


class Part(NamedTuple):
    """The shape and the dtype of an array of a layer: ``np.zeros(*part)`` makes it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class KvFormat:
    """What a row of a cache is, the D elements of a token and KV head. FORMATS has the only object of each name.

    Attributes
    ----------
    name : str
        "float32", "float16", "bfloat16", or a kv_dtype.
    element : numpy.dtype
        What elements are numbers of; that of fp8 is from ml_dtypes.
    stored : numpy.dtype
        The dtype of K and V: `element`, or uint8 for fp8.
    scale : str
        By what elements are multiplied: "none", k_scale and v_scale of a "call", or a scale of each "row", in the
        arrays k_scales and v_scales.
    wire_word : int
        What wire blocks call it: stores keep them, so this number never changes.
    """

    name: str
    element: np.dtype[Any]
    stored: np.dtype[Any]
    scale: Literal["none", "call", "row"]
    wire_word: int

    @staticmethod
    def of(dtype: Any, kv_dtype: KvDtype | None) -> KvFormat:
        """The format that a caller asks for, checked: that of a dtype, as `float_dtype` takes it, unless in 8 bits."""
        require_kv_dtype(kv_dtype)
        of_floats = float_dtype(dtype).name
        return FORMATS[kv_dtype or of_floats]

    @cached_property
    def coded(self) -> bool:
        """Whether elements are codes, which are widened to float32, rather than floats that users compute with."""
        return self.stored.itemsize == 1

    @cached_property
    def dense(self) -> np.dtype[Any]:
        """The dtype of the rows that `gather_kv` returns."""
        return FLOAT32 if self.coded else self.stored

    @cached_property
    def takes(self) -> tuple[np.dtype[Any], ...]:
        """The dtypes of q, and of k and v, beside such a cache."""
        return FLOAT_DTYPES if self.coded else (FLOAT32, self.stored)

    def parts(
        self, layout: Layout, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[Part, ...]:
        """The arrays of a layer as they are in memory: K and V, and the scales of their rows if rows have them.

        Both are (N, P, Hkv, D) in NHD and (N, Hkv, P, D) in HND; in vllm K is (N, Hkv, D / x, P, x), where x elements
        take 16 bytes, and V is (N, Hkv, D, P). Scales are (N, Hkv, P) in every layout, since a kernel reads those of a
        head together: see `as_given`.

        Raises
        ------
        ValueError
            An unknown layout, or a size that the layout cannot have.
        """
        require_layout(layout)
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be at least 0, got {num_blocks}")
        _require_sizes(layout, block_size, num_kv_heads, head_dim, self.stored.itemsize)
        if layout == "vllm":
            x = VECTOR_BYTES // self.stored.itemsize
            k_shape: tuple[int, ...] = (num_blocks, num_kv_heads, head_dim // x, block_size, x)
            v_shape: tuple[int, ...] = (num_blocks, num_kv_heads, head_dim, block_size)
        else:
            inner = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
            k_shape = v_shape = (num_blocks, *inner, head_dim)
        scales = Part((num_blocks, num_kv_heads, block_size), FLOAT32)
        return (Part(k_shape, self.stored), Part(v_shape, self.stored), *[scales] * (2 * (self.scale == "row")))

    def narrow(self, x: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Round numbers, which are divided by their scale already, to nearest even; codes saturate, and keep NaN."""
        if not self.coded:
            return x.astype(self.stored, copy=False)
        largest = float(ml_dtypes.finfo(self.element).max)
        return np.clip(x, -largest, largest).astype(self.element).view(self.stored)

    def quantise(self, x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        """The codes (..., D) and the scales (...) of rows that have scales of their own: the largest becomes 127.

        Every step rounds to float32, to nearest even. A row of zeros has scale 0, one that is not finite scale NaN, and
        both have codes 0.
        """
        scales = np.abs(x).max(axis=-1) / np.float32(INT8_MAX)
        scales[np.isinf(scales)] = np.nan
        is_usual = scales > 0
        divisors = scales
        if not is_usual.all():
            x, divisors = np.where(is_usual[..., None], x, np.float32(0)), np.where(is_usual, scales, np.float32(1))
        codes = x / divisors[..., None]
        np.rint(codes, out=codes)
        np.clip(codes, -INT8_MAX, INT8_MAX, out=codes)  # the quotient by a denormal scale may be larger
        return codes.astype(np.int8), scales


_UINT8 = np.dtype(np.uint8)
FORMATS: dict[str, KvFormat] = {
    known.name: known
    for known in (
        *(KvFormat(dtype.name, dtype, dtype, "none", word) for word, dtype in enumerate(FLOAT_DTYPES)),
        KvFormat("fp8_e4m3", np.dtype(ml_dtypes.float8_e4m3fn), _UINT8, "call", 3),
        KvFormat("fp8_e5m2", np.dtype(ml_dtypes.float8_e5m2), _UINT8, "call", 4),
        KvFormat("int8", np.dtype(np.int8), np.dtype(np.int8), "row", 5),
    )
}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The layout, format and sizes of a pair of caches.

    Attributes
    ----------
    layout : str
        "NHD", "HND" or "vllm".
    format : KvFormat
        What a row is.
    num_blocks, block_size, num_kv_heads, head_dim : int
        N, P, Hkv and D.
    """

    layout: Layout
    format: KvFormat
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def kind(self) -> str:
        """The name of the format, by which kernels are compiled."""
        return self.format.name


def scales_shape(layout: Layout, geometry: Geometry) -> tuple[str, tuple[int, ...]]:
    """The shape of the scales of rows as callers give them, in symbols and numbers: a layout's token and head axes."""
    num_blocks, block_size, num_kv_heads, _ = geometry
    if layout == "NHD":
        return "(num_blocks, block_size, num_kv_heads)", (num_blocks, block_size, num_kv_heads)
    return "(num_blocks, num_kv_heads, block_size)", (num_blocks, num_kv_heads, block_size)


def as_given(layout: Layout, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """View the arrays of a layer, as they are in memory, as callers give them: scales have the axes of the layout."""
    k_cache, v_cache, *scales = arrays
    return k_cache, v_cache, *(x.swapaxes(1, 2) if layout == "NHD" else x for x in scales)


def as_tokens(layout: Layout, cache: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View a cache, or the scales of its rows, as (num_blocks, block_size, num_kv_heads, ...), with dims last."""
    if layout == "NHD":
        return cache
    if layout == "HND" or cache.ndim == 3:
        return cache.swapaxes(1, 2)
    return cache.transpose(0, 3, 1, 2, *range(4, cache.ndim))


def require_layout(layout: object) -> None:
    """Raise ValueError unless `layout` names a layout."""
    if not (isinstance(layout, str) and layout in LAYOUTS):
        raise ValueError(f'layout must be "NHD", "HND" or "vllm", got {layout!r}')


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of float32, float16 or bfloat16: a NumPy dtype, a name, or a dtype of torch or CuPy.

    Raises
    ------
    TypeError
        `dtype` is none of the three.
    """
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else dtype.__name__
    for known in FLOAT_DTYPES:
        if name == known.name:
            return known
    hint = f": for a cache in 8 bits pass kv_dtype={_EITHER}" if name.startswith(("float8", "int8")) else ""
    raise TypeError(f"dtype must be float32, float16 or bfloat16, got {dtype!r}{hint}")


def require_kv_dtype(kv_dtype: object) -> None:
    """Raise ValueError unless kv_dtype is None or the name of a format in 8 bits."""
    if kv_dtype is not None and not (isinstance(kv_dtype, str) and kv_dtype in KV_DTYPES):
        raise ValueError(f"kv_dtype must be None, {_EITHER}, got {kv_dtype!r}")


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
def cache_spec(layout: Layout, kv_format: KvFormat, geometry: Geometry) -> CacheSpec:
    """The CacheSpec of a valid pair of caches, cached because most calls have the same one."""
    return CacheSpec(layout, kv_format, *geometry)
