"""What attention, write_kv and gather_kv require alike: of the K and V cache of a layer, and of their scales.

`views` are the arrays among the arguments of a call, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array
from ..calls import Scale
from ..layouts import FLOAT32, FLOAT_DTYPES, Geometry, cache_geometry, require_kv_dtype, require_layout
from ..placement import Placement
from ..typing import KvDtype, Layout
from . import require, values

_UINT8 = np.dtype(np.uint8)


def scale_arrays(k_scale: Any, v_scale: Any) -> list[tuple[str, Any]]:
    """Those of the two scales that are not numbers, with their names."""
    if k_scale is v_scale is None:  # most calls
        return []
    scales = [(name, x) for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None]
    return [(name, x) for name, x in scales if not np.isscalar(x) and not require.is_array_of_one(x)]


def require_scales(k_scale: Any, v_scale: Any, kind: str) -> None:
    """Raise for scales of a cache that is not fp8, and for numbers that are none; arrays are for the operations."""
    arrays = [name for name, _ in scale_arrays(k_scale, v_scale)] if kind.startswith("fp8") else []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if name not in arrays:
            scale_of(name, scale, None, kind)


def geometry_of(layout: Layout, kv_dtype: KvDtype | None, k_cache: Array, v_cache: Array) -> Geometry:
    """The sizes that the shapes of the caches say, once layout and kv_dtype are ones that there are."""
    require_layout(layout)
    require_kv_dtype(kv_dtype)
    return cache_geometry(layout, k_cache.shape, v_cache.shape, k_cache.itemsize)


def scale_shapes(views: Mapping[str, Array], num_kv_heads: int) -> None:
    """Raise ValueError for an array of scales that has not one element per KV head."""
    for name in ("k_scale", "v_scale"):
        if name in views:
            require.shape(name, views[name], "(num_kv_heads,)", (num_kv_heads,))


def kind_of(k_cache: Array, v_cache: Array, kv_dtype: KvDtype | None) -> str:
    """What the elements of the caches are, or raise TypeError."""
    if kv_dtype is not None:
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            require.dtype(name, cache, _UINT8, f" for kv_dtype {kv_dtype!r}")
        return kv_dtype
    if k_cache.dtype not in FLOAT_DTYPES:
        hint = "; an fp8 cache is uint8 and needs kv_dtype" if k_cache.itemsize == 1 else ""
        raise TypeError(f"k_cache must have dtype float32, float16 or bfloat16, got {k_cache.dtype}{hint}")
    require.dtype("v_cache", v_cache, k_cache.dtype, ", that of k_cache")
    return k_cache.dtype.name


def scales(
    k_scale: Any, v_scale: Any, views: Mapping[str, Array], kind: str, placement: Placement
) -> tuple[Scale, Scale]:
    """Both scales, 1.0 where there is none; arrays on the host are the call's own."""
    return _scale("k_scale", k_scale, views, kind, placement), _scale("v_scale", v_scale, views, kind, placement)


def _scale(name: str, value: Any, views: Mapping[str, Array], kind: str, placement: Placement) -> Scale:
    number = scale_of(name, value, views.get(name), kind)
    if number is not None:
        return number
    scales: Array = placement.own(views[name])
    if placement.on_host:
        values.scales(name, scales)
    return scales


def scale_of(name: str, value: Any, view: Array | None, kind: str) -> float | None:
    """A scale that is a number, 1.0 where there is none; None for one that is an array."""
    if value is None:
        return 1.0
    if not kind.startswith("fp8"):
        raise ValueError(f"{name} needs an fp8 cache, got a cache of {kind}")
    if view is None:
        return require.number(name, value, positive=True)
    require.dtype(name, view, FLOAT32)
    return None
