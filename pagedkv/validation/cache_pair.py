"""Validation of the K and V cache of a layer and of their scales, for attention, write_kv and gather_kv.

`views` are the arrays among the arguments of a call, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ..arrays import Array, identify, to_host
from ..calls import Scale
from ..layouts import (
    FLOAT32,
    FLOAT_DTYPES,
    FORMATS,
    LAYOUTS,
    Geometry,
    KvFormat,
    cache_geometry,
    require_kv_dtype,
    require_layout,
    scales_shape,
)
from ..placement import Placement
from ..typing import KvDtype, Layout
from . import require, values

_OF_FLOATS = {dtype: FORMATS[dtype.name] for dtype in FLOAT_DTYPES}  # to ask a dtype for its name takes 2 us


def scale_arrays(k_scale: Any, v_scale: Any, k_scales: Any, v_scales: Any) -> list[tuple[str, Any]]:
    """The scales that are arrays rather than numbers, with their names."""
    rows = [(name, x) for name, x in zip(require.SCALES_OF_ROWS, (k_scales, v_scales), strict=True) if x is not None]
    if k_scale is v_scale is None:  # most calls
        return rows
    scales = [(name, x) for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None]
    return rows + [(name, x) for name, x in scales if not np.isscalar(x) and not require.is_array_of_one(x)]


def kept_scale(name: str, value: Any, kv_format: KvFormat, num_kv_heads: int) -> float | Array | None:
    """Validate a scale that a PagedKVCache keeps: a number, or a copy of an array with one for each KV head.

    Arrays may belong to any framework and device, and have any float dtype; one of a single element is a number.
    """
    if value is None or np.isscalar(value) or kv_format.scale != "call":
        return None if value is None else scale_of(name, value, None, kv_format)
    argument = identify(name, to_host(value))
    if argument.on_device:
        raise TypeError(f"{name} must be an array of NumPy, torch or CuPy, got {type(value).__name__}")
    view = argument.view()
    if view.dtype not in (*FLOAT_DTYPES, np.float64):
        raise TypeError(f"{name} must have a dtype of floats, got {view.dtype}")
    if view.size == 1 and view.ndim <= 1:
        return require.number(name, float(view.reshape(())), positive=True)
    require.shape(name, view, "(num_kv_heads,)", (num_kv_heads,))
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused
        scales = view.astype(np.float32)
    values.scales(name, scales)
    return scales


def geometry_of(layout: Layout, kv_dtype: KvDtype | None, k_cache: Array, v_cache: Array) -> Geometry:
    """Validate layout and kv_dtype, and read the sizes from the shapes of the caches."""
    require_layout(layout)
    require_kv_dtype(kv_dtype)
    try:
        return cache_geometry(layout, k_cache.shape, v_cache.shape, k_cache.itemsize)
    except ValueError as error:
        raise ValueError(f"{error}{other_layouts(layout, k_cache, v_cache, lambda _: True)}") from None


def other_layouts(layout: Layout, k_cache: Array, v_cache: Array, suits: Callable[[Geometry], bool]) -> str:
    """A hint for messages about shapes: the other layouts that caches of these shapes may have, if any."""
    names = []
    for other in LAYOUTS:
        with suppress(ValueError):
            if other != layout and suits(cache_geometry(other, k_cache.shape, v_cache.shape, k_cache.itemsize)):
                names.append(f'layout="{other}"')
    return f": these shapes fit {' or '.join(names)}" if names else ""


def scale_shapes(views: Mapping[str, Array], layout: Layout, kv_dtype: KvDtype | None, geometry: Geometry) -> None:
    """Raise ValueError for wrong shapes of scales, and unless rows have scales just where the format has them."""
    for name in ("k_scale", "v_scale"):
        if name in views:
            require.shape(name, views[name], "(num_kv_heads,)", (geometry.num_kv_heads,))
    if kv_dtype is not None and FORMATS[kv_dtype].scale == "row":
        symbols, shape = scales_shape(layout, geometry)
        for name in require.SCALES_OF_ROWS:
            if name not in views:
                raise ValueError(missing_scales(name, kv_dtype, symbols))
            require.shape(name, views[name], symbols, shape)
        return
    for name in require.SCALES_OF_ROWS:
        if name in views:
            raise ValueError(f'{name} holds the scales of int8 rows, and needs kv_dtype "int8", got {kv_dtype!r}')


def missing_scales(name: str, kv_dtype: str, symbols: str) -> str:
    """What to say where the scales of rows are not given."""
    needs = f'kv_dtype "{kv_dtype}" needs the float32 scales of its rows, which write_kv stores'
    return f"{name} is missing: {needs}, {symbols}"


def format_of(views: Mapping[str, Array], kv_dtype: KvDtype | None) -> KvFormat:
    """The format of the caches, or raise TypeError."""
    k_cache, v_cache = views["k_cache"], views["v_cache"]
    for name in require.SCALES_OF_ROWS:
        if name in views:
            require.dtype(name, views[name], FLOAT32)
    if kv_dtype is not None:
        kv_format = FORMATS[kv_dtype]
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if cache.dtype != (stored := kv_format.stored):
                hint = f": pass {name}.view(torch.uint8)" if _is_float8(cache) else ""
                raise TypeError(f"{name} must have dtype {stored} for kv_dtype {kv_dtype!r}, got {cache.dtype}{hint}")
        return kv_format
    if (found := _OF_FLOATS.get(k_cache.dtype)) is None:
        hint = "; a cache in 8 bits needs kv_dtype" if k_cache.itemsize == 1 else ""
        hint += ": pass k_cache.view(torch.uint8)" if _is_float8(k_cache) else ""
        raise TypeError(f"k_cache must have dtype float32, float16 or bfloat16, got {k_cache.dtype}{hint}")
    require.dtype("v_cache", v_cache, k_cache.dtype, ", that of k_cache")
    return found


def _is_float8(cache: Array) -> bool:
    """Whether a cache has an fp8 dtype of torch or ml_dtypes, which kernels take as uint8."""
    return cache.dtype.name.startswith("float8")


def scales(
    k_scale: Any, v_scale: Any, views: Mapping[str, Array], kv_format: KvFormat, placement: Placement
) -> tuple[Scale, Scale]:
    """Validate both scales; a missing one is 1.0, and arrays on the host are copied."""
    k_scale = _scale("k_scale", k_scale, views, kv_format, placement)
    return k_scale, _scale("v_scale", v_scale, views, kv_format, placement)


def _scale(name: str, value: Any, views: Mapping[str, Array], kv_format: KvFormat, placement: Placement) -> Scale:
    number = scale_of(name, value, views.get(name), kv_format)
    if number is not None:
        return number
    scales: Array = placement.private_copy(views[name])
    if placement.on_host:
        values.scales(name, scales)
    return scales


def scale_of(name: str, value: Any, view: Array | None, kv_format: KvFormat) -> float | None:
    """Validate a scale that is a number; a missing one is 1.0, and for an array the result is None."""
    if value is None:
        return 1.0
    if kv_format.scale != "call":
        hint = ", whose rows carry their own scales" if kv_format.scale == "row" else ""
        raise ValueError(f"{name} needs an fp8 cache, got a cache of {kv_format.name}{hint}")
    if view is None:
        return require.number(name, value, positive=True)
    require.dtype(name, view, FLOAT32)
    return None
