"""Validation of apply_rotary, in the order of attention.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..arrays import Array, address_of
from ..calls import RotaryCall
from ..layouts import require_head_dim
from ..placement import place
from . import require, tables, values

_ROWS = "(num_tokens, num_heads, head_dim)"
_KV_ROWS = "(num_tokens, num_kv_heads, head_dim)"


def rotary_call(
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    out: Any = None,
    backend: Any = "auto",
    check: bool | None = None,
) -> RotaryCall:
    """Validate the arguments of apply_rotary, and make the call."""
    outs = _outputs(out, k)
    named = [("q", q), ("k", k), ("cos", cos), ("sin", sin), ("positions", positions)]
    named = [(name, x) for name, x in named if name != "k" or x is not None]
    placement, arrays = place(backend, [*named, *outs])
    views = dict(zip((name for name, _ in (*named, *outs)), arrays, strict=True))
    _require_shapes(views)

    q, cos, sin, positions = (views[name] for name in ("q", "cos", "sin", "positions"))
    require.float_dtype("q", q)
    for name in ("k", "out[0]", "out[1]"):
        if name in views:
            require.dtype(name, views[name], q.dtype, ", that of q")
    tables.require_dtypes(views, "q")
    for name, x in views.items():
        require.strides(name, x)
        if name != "positions":
            require.row_alignment(name, x, placement)
    require.boolean("interleaved", interleaved)
    checked = require.check(check)
    _require_writable(views)
    tables.require_rotary_dim(rotary_dim, cos, q.shape[2])
    if placement.on_host:
        tables.require_columns_once(cos, sin, rotary_dim)
        positions = placement.private_copy(positions)
        values.positions(positions, len(cos))
    results = (views["out[0]"], views.get("out[1]")) if outs else None
    return RotaryCall(placement, q, views.get("k"), cos, sin, positions, results, interleaved, checked)


def _outputs(out: Any, k: Any) -> list[tuple[str, Any]]:
    """The arrays for the results, with their names."""
    if out is None:
        return []
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} items" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"out must be a pair of arrays for q and k, such as (q, k) to rotate in place, got {got}")
    if k is None and out[1] is not None:
        raise TypeError(f"out[1] must be None where k is None, got {type(out[1]).__name__}")
    return [("out[0]", out[0])] if k is None else [("out[0]", out[0]), ("out[1]", out[1])]


def _require_shapes(views: Mapping[str, Array]) -> None:
    q = views["q"]
    require.ndim("q", q, _ROWS, 3)
    num_tokens, _, head_dim = q.shape
    require_head_dim(head_dim)
    if "k" in views:
        k = views["k"]
        require.ndim("k", k, _KV_ROWS, 3)
        require.shape("k", k, _KV_ROWS, (num_tokens, k.shape[1], head_dim))
    tables.require_shapes(views, num_tokens, head_dim)
    for name, like, symbols in (("out[0]", "q", _ROWS), ("out[1]", "k", _KV_ROWS)):
        if name in views:
            require.shape(name, views[name], symbols, views[like].shape)


def _require_writable(views: Mapping[str, Array]) -> None:
    """Raise ValueError unless each output is writable, and overlaps nothing or is the very array that it rotates."""
    for name, own in (("out[0]", "q"), ("out[1]", "k")):
        if name in views:
            require.writable(name, views[name])
            in_place = _is_same(views[name], views[own])
            others = [(x, views[x]) for x in views if x != name and not (in_place and x == own)]
            require.no_overlap(name, views[name], others)


def _is_same(x: Array, y: Array) -> bool:
    """Whether two views of one shape have the same elements in the same places."""
    strides = zip(x.shape, x.strides, y.strides, strict=True)
    return address_of(x) == address_of(y) and all(a == b for length, a, b in strides if length > 1)
