"""What attention requires: arguments in, views and options out.

All shapes come before all dtypes, then strides, then options, then values (values.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array
from ..calls import AttentionCall, AttentionOptions
from ..layouts import FLOAT32, Geometry, cache_spec
from ..placement import place
from ..score_mod import python_function
from . import cache_pair, require, values

KERNELS = ("auto", "v1", "v2", "split")
_INT32 = np.dtype(np.int32)
_INT32_MAX = 2**31 - 1

_REQUIRED = ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "query_starts")
_OPTIONAL = ("alibi_slopes", "sinks", "out")
_DTYPES = {
    "block_tables": _INT32,
    "seq_lens": _INT32,
    "query_starts": _INT32,
    "alibi_slopes": FLOAT32,
    "sinks": FLOAT32,
}


def attention_call(given: Mapping[str, Any]) -> AttentionCall:
    """The call with these arguments of prefill_attention if query_starts is among them, or of decode_attention."""
    ragged = "query_starts" in given
    named = [(name, given[name]) for name in (_REQUIRED if ragged else _REQUIRED[:-1])]
    named += [(name, given[name]) for name in _OPTIONAL if given[name] is not None]
    named += cache_pair.scale_arrays(given)
    placement, arrays = place(given["backend"], named)
    views = {name: view for (name, _), view in zip(named, arrays, strict=True)}
    q, k_cache, v_cache, block_tables, seq_lens = arrays[:5]

    geometry = cache_pair.geometry_of(given, k_cache, v_cache)
    _require_shapes(views, geometry, ragged)
    kind = _kind_of(q, k_cache, v_cache, given["kv_dtype"])
    for name, view in views.items():
        if (expected := _DTYPES.get(name)) is not None:
            require.dtype(name, view, expected)
    if "out" in views:
        require.dtype("out", views["out"], q.dtype, ", that of q")
    require.memory(views, placement)

    kernel, layout = given["kernel"], given["layout"]
    _require_kernel(kernel, layout)
    causal = given.get("causal", True)
    require.boolean("causal", causal)
    require.boolean("return_lse", given["return_lse"])
    checked = require.check(given["check"])
    scale, softcap, window = given["scale"], given["softcap"], given["window"]
    alibi_slopes, sinks = (placement.own(views.get(name)) for name in ("alibi_slopes", "sinks"))
    options = AttentionOptions(
        scale=1.0 / math.sqrt(geometry.head_dim) if scale is None else require.number("scale", scale),
        causal=bool(causal),
        window=None if window is None else _window(window),
        softcap=None if softcap is None else require.number("softcap", softcap, positive=True),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        score_mod=python_function(given["score_mod"]),
    )
    capacity = block_tables.shape[1] * geometry.block_size
    max_seq_len = capacity if given["max_seq_len"] is None else min(_max_seq_len(given["max_seq_len"]), capacity)
    k_scale, v_scale = cache_pair.scales(given, views, kind, placement)
    out = views.pop("out", None)
    if out is not None:
        require.writable("out", out)
        require.apart("out", out, views.items())

    query_starts = views.get("query_starts")
    if placement.on_host:
        block_size, seq_lens = geometry.block_size, placement.own(seq_lens)
        num_used = -(-values.seq_lens(seq_lens, max_seq_len, capacity) // block_size)
        if query_starts is not None:
            query_starts = placement.own(query_starts)
            values.query_starts(query_starts, seq_lens, q.shape[0])
        block_tables = placement.own_table(block_tables, num_used)
        values.block_tables("block_tables", block_tables[:, :num_used], seq_lens, block_size, geometry.num_blocks)
    return AttentionCall(
        given=given,
        placement=placement,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        query_starts=query_starts,
        out=out,
        spec=cache_spec(layout, kind, geometry),
        k_scale=k_scale,
        v_scale=v_scale,
        options=options,
        kernel=str(kernel),
        checked=checked,
    )


def _require_shapes(views: Mapping[str, Array], geometry: Geometry, ragged: bool) -> None:
    q, block_tables = views["q"], views["block_tables"]
    rows = "num_tokens" if ragged else "num_seqs"
    require.ndim("q", q, f"({rows}, num_heads, head_dim)", 3)
    num_rows, num_heads, head_dim = q.shape
    if head_dim != geometry.head_dim:
        require.shape("q", q, f"({rows}, num_heads, head_dim)", (num_rows, num_heads, geometry.head_dim))
    if num_heads < 1 or num_heads % geometry.num_kv_heads:
        raise ValueError(
            f"num_heads must be a positive multiple of num_kv_heads, got {num_heads} heads of q "
            f"and {geometry.num_kv_heads} of k_cache"
        )
    require.ndim("block_tables", block_tables, "(num_seqs, max_blocks)", 2)
    num_seqs = block_tables.shape[0]
    if not ragged and num_seqs != num_rows:
        require.shape("block_tables", block_tables, "(num_seqs, max_blocks)", (num_rows, block_tables.shape[1]))
    require.shape("seq_lens", views["seq_lens"], "(num_seqs,)", (num_seqs,))
    if ragged:
        require.shape("query_starts", views["query_starts"], "(num_seqs + 1,)", (num_seqs + 1,))
    for name in ("alibi_slopes", "sinks"):
        if name in views:
            require.shape(name, views[name], "(num_heads,)", (num_heads,))
    cache_pair.scale_shapes(views, geometry.num_kv_heads)
    if "out" in views:
        require.shape("out", views["out"], f"({rows}, num_heads, head_dim)", q.shape)


def _kind_of(q: Array, k_cache: Array, v_cache: Array, kv_dtype: str | None) -> str:
    require.float_dtype("q", q)
    kind = cache_pair.kind_of(k_cache, v_cache, kv_dtype)
    if kv_dtype is None and k_cache.dtype != q.dtype and q.dtype != FLOAT32:
        raise TypeError(f"k_cache must have dtype {q.dtype}, that of q, or be fp8, got {k_cache.dtype}")
    return kind


def _require_kernel(kernel: object, layout: str) -> None:
    if not (isinstance(kernel, str) and kernel in KERNELS):
        raise ValueError(f'kernel must be "auto", "v1", "v2" or "split", got {kernel!r}')
    if kernel != "auto" and (kernel == "split") == (layout == "vllm"):
        needs = "NHD or HND" if kernel == "split" else "vllm"
        raise ValueError(f'kernel "{kernel}" needs layout {needs}, got {layout}')


def _window(window: object) -> int:
    width = require.integer("window", window)
    if width < 1:
        raise ValueError(f"window must be at least 1, got {width}")
    return min(width, _INT32_MAX)


def _max_seq_len(value: object) -> int:
    """The bound on lengths as an int, or raise; objects with ``__index__`` are refused, which may wait for a GPU."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"max_seq_len must be an int, got {type(value).__name__}: pass the max_seq_len of PagedKVCache.batch, "
            "or int(...) once"
        )
    if value < 0:
        raise ValueError(f"max_seq_len must be at least 0, got {value}")
    return int(value)
