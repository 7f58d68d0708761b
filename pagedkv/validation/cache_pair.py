"""What attention, write_kv and gather_kv require alike: of the K and V cache of a layer, and of their scales.

`given` are arguments as the caller gave them and `views` the arrays among them, both by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array
from ..calls import Scale
from ..layouts import FLOAT32, FLOAT_DTYPES, Geometry, cache_geometry, require_kv_dtype, require_layout
from ..placement import Placement
from ..typing import KvDtype
from . import require, values

_UINT8 = np.dtype(np.uint8)


def scale_arrays(given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Those of the two scales that are not numbers, with their names."""
    if given["k_scale"] is given["v_scale"] is None:  # most calls
        return []
    given_ones = [(name, x) for name in ("k_scale", "v_scale") if (x := given[name]) is not None]
    return [(name, x) for name, x in given_ones if not np.isscalar(x) and not require.is_array_of_one(x)]


def require_scales(given: Mapping[str, Any], kind: str) -> None:
    """Raise for scales of a cache that is not fp8, and for numbers that are none; arrays are for the operations."""
    arrays = [name for name, _ in scale_arrays(given)] if kind.startswith("fp8") else []
    for name, scale in given.items():
        if name not in arrays:
            scale_of(name, scale, None, kind)


def geometry_of(given: Mapping[str, Any], k_cache: Array, v_cache: Array) -> Geometry:
    """The sizes that the shapes of the caches say, once layout and kv_dtype are ones that there are."""
    require_layout(given["layout"])
    require_kv_dtype(given["kv_dtype"])
    return cache_geometry(given["layout"], k_cache.shape, v_cache.shape, k_cache.itemsize)


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
    given: Mapping[str, Any], views: Mapping[str, Array], kind: str, placement: Placement
) -> tuple[Scale, Scale]:
    """Both scales, 1.0 where there is none."""
    numbers = {name: scale_of(name, given[name], views.get(name), kind) for name in ("k_scale", "v_scale")}
    k_scale, v_scale = (
        own_scales(name, views[name], placement) if number is None else number for name, number in numbers.items()
    )
    return k_scale, v_scale


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


def own_scales(name: str, view: Array, placement: Placement) -> Array:
    """A scale that is an array, as the call's own where it is on the host."""
    scales = placement.own(view)
    if placement.on_host:
        values.scales(name, scales)
    return scales
