"""What the operations on the contents of caches check before they compute: write, gather, copy, swap.

The order is that of validation.py: shapes, dtypes, strides, options, values. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from . import checks
from .arrays import Array
from .checks import FLOAT32, INT32, INT64
from .device_arrays import Shadow
from .layouts import FLOAT_DTYPES, CacheSpec, cache_geometry, cache_spec, check_kv_dtype, check_layout
from .placement import Side, place
from .validation import ROWS, Scale, cache_kind, check_tables, scale_arrays, scale_checks, scales

_STORED_DTYPES = (*FLOAT_DTYPES, np.dtype(np.uint8))


class WriteCall(NamedTuple):
    """The checked arguments of write_kv."""

    k: Array
    v: Array
    k_cache: Array
    v_cache: Array
    slots: Array
    spec: CacheSpec
    k_scale: Scale
    v_scale: Scale
    checked: bool
    side: Side


class GatherCall(NamedTuple):
    """The checked arguments of gather_kv."""

    k_cache: Array
    v_cache: Array
    block_table: Array
    seq_len: int
    spec: CacheSpec
    k_scale: Scale
    v_scale: Scale
    checked: bool
    side: Side


class CopyCall(NamedTuple):
    """The checked arguments of copy_blocks: all caches of all layers."""

    caches: list[Array]
    pairs: Array
    checked: bool
    side: Side


class SwapCall(NamedTuple):
    """The checked arguments of swap_blocks: every (source, destination) pair of caches.

    On CUDA those on a device are shadows, and the others are on the host.
    """

    copies: list[tuple[Array, Array]]
    pairs: Array
    checked: bool
    side: Side


def write(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    *,
    layout: Any,
    kv_dtype: Any,
    k_scale: Any,
    v_scale: Any,
    backend: object,
    check: object,
) -> WriteCall:
    """Check the arguments of write_kv."""
    named = [("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache), ("slots", slots)]
    named += scale_arrays(k_scale, v_scale)
    side, views = place(backend, named)
    given = {name: view for (name, _), view in zip(named, views, strict=True)}
    k, v, k_cache, v_cache, slots = views[:5]
    check_layout(layout)
    check_kv_dtype(kv_dtype)

    geometry = cache_geometry(layout, k_cache.shape, v_cache.shape, k_cache.itemsize)
    symbols = "(num_tokens, num_kv_heads, head_dim)"
    checks.ndim("k", k, symbols, 3)
    checks.shape("k", k, symbols, (len(k), geometry.num_kv_heads, geometry.head_dim))
    checks.shape("v", v, symbols, k.shape)
    checks.shape("slots", slots, "(num_tokens,)", (len(k),))
    scale_checks(given, geometry.num_kv_heads)

    kind = cache_kind(k_cache, v_cache, kv_dtype)
    for name, x in (("k", k), ("v", v)):
        if kv_dtype is not None:
            checks.float_dtype(name, x)
        elif x.dtype != k_cache.dtype and x.dtype != FLOAT32:
            raise TypeError(f"{name} must have dtype {k_cache.dtype}, that of the cache, or float32, got {x.dtype}")
    checks.dtype("slots", slots, INT64)
    for name, view in given.items():
        checks.strides(name, view)
        if name in ROWS:
            checks.row_alignment(name, view, side)
    checked = checks.check_option(check)
    k_scales, v_scales = scales(k_scale, v_scale, given, kind, side)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.writable(name, cache)
        checks.apart(name, cache, [(other, x) for other, x in given.items() if other != name])
    if side.on_host:
        _check_slots(slots, geometry.num_blocks * geometry.block_size)
    spec = cache_spec(layout, kind, geometry)
    return WriteCall(k, v, k_cache, v_cache, slots, spec, k_scales, v_scales, checked, side)


def _check_slots(slots: Array, num_slots: int) -> None:
    """Raise IndexError for a slot that is not there, ValueError for one named twice; negative ones are skipped."""
    if not len(slots):
        return
    if int(slots.max()) >= num_slots:
        token = int((slots >= num_slots).argmax())
        raise IndexError(
            f"slots must be below num_blocks * block_size = {num_slots}, got {slots[token]} for token {token}"
        )
    if (slots[1:] > slots[:-1]).all():
        return
    ordered = np.sort(slots)
    again = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if again.any():
        slot = ordered[1:][again][0]
        first, second = np.flatnonzero(slots == slot)[:2]
        raise ValueError(f"slots must name a slot once, got {slot} for tokens {first} and {second}")


def gather(
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_len: object,
    *,
    layout: Any,
    kv_dtype: Any,
    k_scale: Any,
    v_scale: Any,
    backend: object,
) -> GatherCall:
    """Check the arguments of gather_kv."""
    named = [("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table)]
    named += scale_arrays(k_scale, v_scale)
    side, views = place(backend, named)
    given = {name: view for (name, _), view in zip(named, views, strict=True)}
    k_cache, v_cache, block_table = views[:3]
    check_layout(layout)
    check_kv_dtype(kv_dtype)

    geometry = cache_geometry(layout, k_cache.shape, v_cache.shape, k_cache.itemsize)
    checks.ndim("block_table", block_table, "(max_blocks,)", 1)
    scale_checks(given, geometry.num_kv_heads)
    kind = cache_kind(k_cache, v_cache, kv_dtype)
    checks.dtype("block_table", block_table, INT32)
    for name, view in given.items():
        checks.strides(name, view)
        if name in ROWS:
            checks.row_alignment(name, view, side)
    length = checks.integer("seq_len", seq_len)
    k_scales, v_scales = scales(k_scale, v_scale, given, kind, side)
    capacity = len(block_table) * geometry.block_size
    if not 0 <= length <= capacity:
        raise ValueError(f"seq_len must be in 0..max_blocks * block_size = 0..{capacity}, got {length}")
    if side.on_host:
        check_tables("block_table", block_table[None], np.array([length]), geometry.block_size, geometry.num_blocks)
    spec = cache_spec(layout, kind, geometry)
    return GatherCall(k_cache, v_cache, block_table, length, spec, k_scales, v_scales, checks.check_option(None), side)


def copy(k_cache: Any, v_cache: Any, pairs: Any, *, backend: object) -> CopyCall:
    """Check the arguments of copy_blocks."""
    layers = [*_leaves("k_cache", k_cache), *_leaves("v_cache", v_cache)]
    if isinstance(k_cache, (list, tuple)) != isinstance(v_cache, (list, tuple)):
        raise TypeError("k_cache and v_cache must both be arrays or both be lists of arrays")
    if isinstance(k_cache, (list, tuple)) and len(k_cache) != len(v_cache):
        raise ValueError(f"v_cache must have as many layers as k_cache, got {len(v_cache)} and {len(k_cache)}")
    side, (*caches, pairs) = place(backend, [*layers, ("pairs", pairs)])
    names = [name for name, _ in layers]
    num_blocks = _num_blocks(names, caches)
    checks.shape("pairs", pairs, "(num_pairs, 2)", (*pairs.shape[:1], 2))
    for name, cache in zip(names, caches, strict=True):
        _check_stored(name, cache)
    checks.dtype("pairs", pairs, INT64)
    for name, cache in zip(names, caches, strict=True):
        checks.strides(name, cache)
        checks.row_alignment(name, cache, side)
        checks.writable(name, cache)
    checks.strides("pairs", pairs)
    if side.on_host:
        checks.block_pairs(pairs, num_blocks, num_blocks, one_pool=True)
    return CopyCall(caches, pairs, checks.check_option(None), side)


def swap(source: Any, destination: Any, pairs: Any, *, backend: object) -> SwapCall:
    """Check the arguments of swap_blocks."""
    sources, destinations = list(_leaves("source", source)), list(_leaves("destination", destination))
    if [name[6:] for name, _ in sources] != [name[11:] for name, _ in destinations]:
        raise ValueError("source and destination must be built alike: arrays, (k, v) pairs or lists of them")
    side, (*views, pairs) = place(backend, [*sources, *destinations, ("pairs", pairs)], across=True)
    copies = list(zip(views[: len(sources)], views[len(sources) :], strict=True))
    from_names, to_names = [name for name, _ in sources], [name for name, _ in destinations]
    num_sources = _num_blocks(from_names, [x for x, _ in copies])
    num_destinations = _num_blocks(to_names, [y for _, y in copies])
    if isinstance(pairs, Shadow) and not all(isinstance(x, Shadow) for x in views):
        raise ValueError("pairs must be on the host where blocks move from the host or to it, got pairs on a device")
    for from_name, to_name, (x, y) in zip(from_names, to_names, copies, strict=True):
        if x.shape[1:] != y.shape[1:]:
            raise ValueError(
                f"{to_name} must have blocks of shape {x.shape[1:]}, those of {from_name}, got {y.shape[1:]}"
            )
    checks.shape("pairs", pairs, "(num_pairs, 2)", (*pairs.shape[:1], 2))
    for from_name, to_name, (x, y) in zip(from_names, to_names, copies, strict=True):
        _check_stored(from_name, x)
        checks.dtype(to_name, y, x.dtype, f", that of {from_name}")
    checks.dtype("pairs", pairs, INT64)
    one_pool = False
    for from_name, to_name, (x, y) in zip(from_names, to_names, copies, strict=True):
        for name, cache in ((from_name, x), (to_name, y)):
            checks.strides(name, cache)
            if isinstance(cache, Shadow) or side.backend == "emulator":
                checks.row_alignment(name, cache, side)
        checks.writable(to_name, y)
        one_pool |= _same_memory(x, y)
    _check_apart(list(zip(from_names, to_names, copies, strict=True)))
    checks.strides("pairs", pairs)
    if not isinstance(pairs, Shadow):
        checks.block_pairs(pairs, num_sources, num_destinations, one_pool=one_pool)
    return SwapCall(copies, pairs, checks.check_option(None), side)


def _check_apart(copies: list[tuple[str, str, tuple[Array, Array]]]) -> None:
    """Raise ValueError if a destination shares an element with any other cache; it may be its own source."""
    named = [(from_name, x) for from_name, _, (x, y) in copies if not _same_memory(x, y)]
    named += [(to_name, y) for _, to_name, (_, y) in copies]
    bounds = sorted(byte_bounds(array) for _, array in named)
    if all(end <= start for (_, end), (start, _) in pairwise(bounds)):
        return
    for _, to_name, (_, y) in copies:
        checks.apart(to_name, y, [(name, other) for name, other in named if name != to_name])


def _leaves(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of nested lists, named like the expressions that reach them."""
    if isinstance(x, (list, tuple)):
        for i, y in enumerate(x):
            yield from _leaves(f"{name}[{i}]", y)
    else:
        yield name, x


def _num_blocks(names: Sequence[str], caches: Sequence[Array]) -> int:
    if not caches:
        raise ValueError("there must be at least one cache, got none")
    for name, cache in zip(names, caches, strict=True):
        if cache.ndim not in (4, 5):
            raise ValueError(f"{name} must have shape (num_blocks, ...) with 4 or 5 axes, got {cache.shape}")
        if len(cache) != len(caches[0]):
            raise ValueError(f"{name} must have num_blocks = {len(caches[0])}, that of {names[0]}, got {len(cache)}")
    return len(caches[0])


def _check_stored(name: str, cache: Array) -> None:
    if cache.dtype not in _STORED_DTYPES:
        raise TypeError(f"{name} must have dtype float32, float16, bfloat16 or uint8 (fp8), got {cache.dtype}")


def _same_memory(x: Array, y: Array) -> bool:
    return checks.address_of(x) == checks.address_of(y) and x.strides == y.strides
