"""Validation of calls of write_kv, gather_kv, copy_blocks and swap_blocks.

The order is that of attention.py: shapes, dtypes, strides, options, values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..arrays import Array, Shadow, address_of
from ..calls import CACHES, CopyCall, GatherCall, Rotation, SwapCall, WriteCall
from ..layouts import FLOAT32, FORMATS, cache_spec
from ..placement import Placement, place
from ..typing import KvDtype, Layout
from . import cache_pair, require, tables, values

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_STORED_DTYPES = {kv_format.stored for kv_format in FORMATS.values()}
_WITH_SCALES = {kv_format.stored: name for name, kv_format in FORMATS.items() if kv_format.scale == "row"}


def write_call(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    *,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    backend: Any = "auto",
    check: bool | None = None,
) -> WriteCall:
    """Validate the arguments of write_kv, and make the call."""
    named = [("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache), ("slots", slots)]
    rotates = _wants_rotation(cos, sin, positions, rotary_dim, interleaved)
    if rotates:
        named += zip(tables.NAMES, (cos, sin, positions), strict=True)
    named += cache_pair.scale_arrays(k_scale, v_scale, k_scales, v_scales)
    placement, arrays = place(backend, named)
    views = dict(zip(dict(named), arrays, strict=True))
    k, v, k_cache, v_cache, slots = arrays[:5]

    geometry = cache_pair.geometry_of(layout, kv_dtype, k_cache, v_cache)
    symbols = "(num_tokens, num_kv_heads, head_dim)"
    require.ndim("k", k, symbols, 3)
    heads = geometry.num_kv_heads, geometry.head_dim
    if k.shape[1:] != heads:
        hint = cache_pair.other_layouts(layout, k_cache, v_cache, lambda other: other[2:] == k.shape[1:])
        raise ValueError(f"k must have shape {symbols} = {(len(k), *heads)}, got {k.shape}{hint}")
    require.shape("v", v, symbols, k.shape)
    require.shape("slots", slots, "(num_tokens,)", (len(k),))
    if rotates:
        tables.require_shapes(views, len(k), geometry.head_dim)
    cache_pair.scale_shapes(views, layout, kv_dtype, geometry)

    kv_format = cache_pair.format_of(views, kv_dtype)
    for name, x in (("k", k), ("v", v)):
        if kv_format.coded:
            require.float_dtype(name, x)
        elif x.dtype not in kv_format.takes:
            other = "" if k_cache.dtype == FLOAT32 else " or float32,"
            raise TypeError(f"{name} must have dtype {k_cache.dtype}, that of the cache,{other} got {x.dtype}")
    require.dtype("slots", slots, _INT64)
    if rotates:
        tables.require_dtypes(views, "k")
    require.memory(views, placement)
    checked = require.check(check)
    written = [name for name in CACHES if name in views]
    for name in written:
        require.writable(name, views[name])
    for name in written:
        others = [(other, x) for other, x in views.items() if other not in written[: written.index(name) + 1]]
        require.no_overlap(name, views[name], others)
    k_scale, v_scale = cache_pair.scales(k_scale, v_scale, views, kv_format, placement)
    if placement.on_host:
        slots = placement.private_copy(slots)
        values.slots(slots, geometry.num_blocks * geometry.block_size)
    rotation = _rotation(views, placement, slots, rotary_dim, interleaved) if rotates else None
    spec = cache_spec(layout, kv_format, geometry)
    return WriteCall(
        placement, k, v, k_cache, v_cache, slots, spec, k_scale, v_scale, views.get("k_scales"), views.get("v_scales"),
        checked, rotation,
    )  # fmt: skip


def _wants_rotation(cos: Any, sin: Any, positions: Any, rotary_dim: int | None, interleaved: bool) -> bool:
    """Whether to rotate k; raise unless all arguments for that are given, or none of them."""
    if cos is sin is positions is rotary_dim is None and interleaved is False:
        return False
    there = [name for name, x in zip(tables.NAMES, (cos, sin, positions), strict=True) if x is not None]
    require.boolean("interleaved", interleaved)
    if there and len(there) < len(tables.NAMES):
        missing = " and ".join(name for name in tables.NAMES if name not in there)
        raise ValueError(
            f"cos, sin and positions must be given together, to rotate k, or not at all, "
            f"got {' and '.join(there)} without {missing}"
        )
    if interleaved and not there:
        raise ValueError("interleaved says which dims are rotated together, and needs cos, sin and positions")
    if rotary_dim is not None and not there:
        raise ValueError("rotary_dim says how many dims are rotated, and needs cos, sin and positions")
    return bool(there)


def _rotation(
    views: Mapping[str, Array], placement: Placement, slots: Array, rotary_dim: int | None, interleaved: bool
) -> Rotation:
    cos, sin, positions = (views[name] for name in tables.NAMES)
    tables.require_rotary_dim(rotary_dim, cos, views["k"].shape[2])
    if placement.on_host:
        tables.require_columns_once(cos, sin, rotary_dim)
        positions = placement.private_copy(positions)
        values.positions(positions, len(cos), slots >= 0)
    return Rotation(cos, sin, positions, interleaved)


def gather_call(
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_len: int,
    *,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    backend: Any = "auto",
) -> GatherCall:
    """Validate the arguments of gather_kv, and make the call."""
    named = [("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table)]
    named += cache_pair.scale_arrays(k_scale, v_scale, k_scales, v_scales)
    placement, arrays = place(backend, named)
    views = dict(zip(dict(named), arrays, strict=True))
    k_cache, v_cache, block_table = arrays[:3]

    geometry = cache_pair.geometry_of(layout, kv_dtype, k_cache, v_cache)
    require.ndim("block_table", block_table, "(max_blocks,)", 1)
    cache_pair.scale_shapes(views, layout, kv_dtype, geometry)
    kv_format = cache_pair.format_of(views, kv_dtype)
    require.dtype("block_table", block_table, _INT32)
    require.memory(views, placement)
    length = require.integer("seq_len", seq_len)
    k_scale, v_scale = cache_pair.scales(k_scale, v_scale, views, kv_format, placement)
    capacity = len(block_table) * geometry.block_size
    if not 0 <= length <= capacity:
        raise ValueError(f"seq_len must be in 0..max_blocks * block_size = 0..{capacity}, got {length}")
    if placement.on_host:
        num_used = -(-length // geometry.block_size)
        block_table = placement.private_copy(placement.columns(block_table, num_used))
        used, lengths = block_table[None, :num_used], np.array([length])
        sizes = geometry.block_size, geometry.num_blocks
        values.block_tables("block_table", used, lengths, *sizes, lambda: 0 * lengths)
    spec = cache_spec(layout, kv_format, geometry)
    return GatherCall(
        placement, k_cache, v_cache, block_table, length, spec, k_scale, v_scale, views.get("k_scales"),
        views.get("v_scales"), require.check(None),
    )  # fmt: skip


def copy_call(
    k_cache: Any, v_cache: Any, pairs: Any, *, k_scales: Any = None, v_scales: Any = None, backend: object
) -> CopyCall:
    """Validate the arguments of copy_blocks, and make the call."""
    of_layers = [x for x in zip(CACHES, (k_cache, v_cache, k_scales, v_scales), strict=True) if x[1] is not None]
    for name, x in of_layers[1:]:
        if isinstance(k_cache, (list, tuple)) != isinstance(x, (list, tuple)):
            raise TypeError(f"k_cache and {name} must both be arrays or both be lists of arrays")
        if isinstance(k_cache, (list, tuple)) and len(k_cache) != len(x):
            raise ValueError(f"{name} must have as many layers as k_cache, got {len(x)} and {len(k_cache)}")
    layers = [named for name, x in of_layers for named in _flatten(name, x)]
    placement, (*caches, pairs) = place(backend, [*layers, ("pairs", pairs)])
    names = [name for name, _ in layers]
    are_scales = [name.startswith(require.SCALES_OF_ROWS) for name in names]
    num_blocks = _num_blocks(names, caches, are_scales)
    require.shape("pairs", pairs, "(num_pairs, 2)", (*pairs.shape[:1], 2))
    for name, cache, is_scales in zip(names, caches, are_scales, strict=True):
        if not is_scales:
            _require_stored(name, cache)
    _require_scales(dict(zip(names, caches, strict=True)))
    require.dtype("pairs", pairs, _INT64)
    for name, cache in zip(names, caches, strict=True):
        _require_memory(name, cache, placement)
        require.writable(name, cache)
    _require_no_overlap(list(zip(names, caches, strict=True)))
    require.strides("pairs", pairs)
    if placement.on_host:
        pairs = placement.private_copy(pairs)
        values.pairs(pairs, num_blocks, num_blocks, one_pool=True)
    return CopyCall(placement, [x for x, _ in map(_in_order, caches, caches)], pairs, require.check(None))


def swap_call(source: Any, destination: Any, pairs: Any, *, backend: object) -> SwapCall:
    """Validate the arguments of swap_blocks, and make the call."""
    sources, destinations = list(_flatten("source", source)), list(_flatten("destination", destination))
    if [name[6:] for name, _ in sources] != [name[11:] for name, _ in destinations]:
        raise ValueError("source and destination must be built alike: arrays, (k, v) pairs or lists of them")
    placement, (*views, pairs) = place(backend, [*sources, *destinations, ("pairs", pairs)], across=True)
    copies = list(zip(views[: len(sources)], views[len(sources) :], strict=True))
    from_names, to_names = [name for name, _ in sources], [name for name, _ in destinations]
    are_scales = [_holds_scales(x) for x, _ in copies]
    num_sources = _num_blocks(from_names, [x for x, _ in copies], are_scales)
    num_destinations = _num_blocks(to_names, [y for _, y in copies], are_scales)
    if isinstance(pairs, Shadow) and not all(isinstance(x, Shadow) for x in views):
        raise ValueError("pairs must be on the host where blocks move from the host or to it, got pairs on a device")
    for from_name, to_name, (x, y) in zip(from_names, to_names, copies, strict=True):
        if x.shape[1:] != y.shape[1:]:
            raise ValueError(
                f"{to_name} must have blocks of shape {x.shape[1:]}, those of {from_name}, got {y.shape[1:]}"
            )
    require.shape("pairs", pairs, "(num_pairs, 2)", (*pairs.shape[:1], 2))
    for from_name, to_name, (x, y) in zip(from_names, to_names, copies, strict=True):
        _require_stored(from_name, x)
        require.dtype(to_name, y, x.dtype, f", that of {from_name}")
    require.dtype("pairs", pairs, _INT64)
    one_pool = False
    for from_name, to_name, (x, y) in zip(from_names, to_names, copies, strict=True):
        for name, cache in ((from_name, x), (to_name, y)):
            _require_memory(name, cache, placement)
        require.writable(to_name, y)
        one_pool |= _same_memory(x, y)
    read = [(name, x) for name, (x, y) in zip(from_names, copies, strict=True) if not _same_memory(x, y)]
    written = [(name, y) for name, (_, y) in zip(to_names, copies, strict=True)]
    _require_no_overlap(written, read)
    require.strides("pairs", pairs)
    if not isinstance(pairs, Shadow):
        pairs = pairs.copy()  # copied like Placement.private_copy, though the caches may be on a device
        values.pairs(pairs, num_sources, num_destinations, one_pool=one_pool)
    return SwapCall(placement, [_in_order(x, y) for x, y in copies], pairs, require.check(None))


def _require_no_overlap(written: Sequence[tuple[str, Array]], read: Sequence[tuple[str, Array]] = ()) -> None:
    """Raise ValueError if a written cache shares an element with another cache."""
    caches = [*written, *read]
    bounds = [_bounds(cache) for _, cache in caches]
    if all(end <= start for (_, end), (start, _) in pairwise(sorted(bounds))):
        return
    starts, ends = np.array(bounds).T
    near = (starts[: len(written), None] < ends) & (starts < ends[: len(written), None])
    for i, j in np.argwhere(np.triu(near, 1)).tolist():
        require.no_overlap(*caches[i], [caches[j]])


def _bounds(x: Array) -> tuple[int, int]:
    """The addresses where the bytes of an array begin and end."""
    if x.flags.c_contiguous:
        return (address := address_of(x)), address + x.nbytes
    return byte_bounds(x)


def _flatten(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Flatten nested lists of arrays, naming each array by the expression that reaches it."""
    if isinstance(x, (list, tuple)):
        for i, y in enumerate(x):
            yield from _flatten(f"{name}[{i}]", y)
    else:
        yield name, x


def _num_blocks(names: Sequence[str], caches: Sequence[Array], are_scales: Sequence[bool]) -> int:
    if not caches:
        raise ValueError("there must be at least one cache, got none")
    for name, cache, is_scales in zip(names, caches, are_scales, strict=True):
        if cache.ndim not in ((3,) if is_scales else (4, 5)):
            axes = "3" if is_scales else "4 or 5"
            raise ValueError(f"{name} must have shape (num_blocks, ...) with {axes} axes, got {cache.shape}")
        if len(cache) != len(caches[0]):
            raise ValueError(f"{name} must have num_blocks = {len(caches[0])}, that of {names[0]}, got {len(cache)}")
    return len(caches[0])


def _require_stored(name: str, cache: Array) -> None:
    if cache.dtype not in _STORED_DTYPES:
        raise TypeError(f"{name} must have dtype float32, float16, bfloat16, int8 or uint8 (fp8), got {cache.dtype}")


def _holds_scales(x: Array) -> bool:
    """Whether an array among caches holds the scales of rows."""
    return x.ndim == 3 and x.dtype == FLOAT32


def _require_scales(views: Mapping[str, Array]) -> None:
    """Raise unless each cache to copy has scales for all of its rows just where its rows have them."""
    for name, cache in views.items():
        part, layer = name[: len("k_cache")], name[len("k_cache") :]
        if part not in CACHES[:2]:
            continue
        scales = f"{part[0]}_scales{layer}"
        if cache.dtype not in _WITH_SCALES:
            if scales in views:
                raise ValueError(f"{scales} holds the scales of int8 rows, got caches of dtype {cache.dtype}")
            continue
        if scales not in views:
            raise ValueError(cache_pair.missing_scales(scales, _WITH_SCALES[cache.dtype], "(num_blocks, ...)"))
        k_shape = views[f"k_cache{layer}"].shape
        shape = (*k_shape[:2], k_shape[3 if len(k_shape) == 5 else 2])  # a block of K has 5 axes in layout vllm
        require.shape(scales, views[scales], f"of the rows of k_cache{layer}", shape)
        require.dtype(scales, views[scales], FLOAT32)


def _require_memory(name: str, cache: Array, placement: Placement) -> None:
    """Raise ValueError unless kernels can move the blocks of a cache, or of its scales."""
    if _holds_scales(cache):
        require.scattered(name, cache)
        return
    require.strides(name, cache)
    if isinstance(cache, Shadow) or placement.backend == "emulator":
        require.row_alignment(name, cache, placement)


def _in_order(source: Array, destination: Array) -> tuple[Array, Array]:
    """View blocks of scales with the axes in memory order, so that they move in one piece."""
    if _holds_scales(source) and source.strides[1] < source.strides[2]:
        return source.swapaxes(1, 2), destination.swapaxes(1, 2)
    return source, destination


def _same_memory(x: Array, y: Array) -> bool:
    return address_of(x) == address_of(y) and x.strides == y.strides
