"""Validation of attention calls: from the caller's arguments to an AttentionCall.

All shapes are checked before all dtypes, then strides, then options, then values (values.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import get_args

import numpy as np

from ..arrays import Array
from ..calls import AttentionArguments, AttentionCall, AttentionOptions
from ..layouts import FLOAT32, Geometry, KvFormat, cache_spec
from ..placement import Placement, place
from ..score_mod import python_function
from ..typing import Kernel, KvDtype
from ..visible import FURTHEST, Visible
from . import cache_pair, require, values

KERNELS = get_args(Kernel)
_INT32 = np.dtype(np.int32)
_VECTORS = ("alibi_slopes", "sinks", "leftpad", "mask")
_DTYPES = {
    "block_tables": _INT32,
    "seq_lens": _INT32,
    "query_starts": _INT32,
    "alibi_slopes": FLOAT32,
    "sinks": FLOAT32,
    "leftpad": _INT32,
}
_MASK_DTYPES = (np.dtype(np.bool_), np.dtype(np.uint8))


def attention_call(arguments: AttentionArguments) -> AttentionCall:
    """Validate the arguments of decode_attention or prefill_attention, and make the call."""
    a = arguments
    named = [("q", a.q), ("k_cache", a.k_cache), ("v_cache", a.v_cache)]
    named += [("block_tables", a.block_tables), ("seq_lens", a.seq_lens)]
    if a.ragged:
        named.append(("query_starts", a.query_starts))
    named += [(name, x) for name in (*_VECTORS, "out") if (x := getattr(a, name)) is not None]
    named += cache_pair.scale_arrays(a.k_scale, a.v_scale, a.k_scales, a.v_scales)
    placement, arrays = place(a.backend, named)
    return placed_call(a, placement, dict(zip(dict(named), arrays, strict=True)))


def placed_call(arguments: AttentionArguments, placement: Placement, views: dict[str, Array]) -> AttentionCall:
    """Validate a call whose placement is known; `views` are the arrays among the arguments."""
    a, q, k_cache, v_cache = arguments, views["q"], views["k_cache"], views["v_cache"]
    geometry = cache_pair.geometry_of(a.layout, a.kv_dtype, k_cache, v_cache)
    _require_shapes(views, geometry, a)
    kv_format = _format_of(views, a.kv_dtype)
    for name, view in views.items():
        if (expected := _DTYPES.get(name)) is not None:
            require.dtype(name, view, expected)
    if "mask" in views and views["mask"].dtype not in _MASK_DTYPES:
        raise TypeError(f"mask must have dtype bool, or uint8 for bits, got {views['mask'].dtype}")
    if "out" in views:
        require.dtype("out", views["out"], q.dtype, ", that of q")
    require.memory(views, placement)

    _require_kernel(a.kernel, a.layout)
    require.boolean("causal", a.causal)
    require.boolean("exact", a.exact)
    require.boolean("return_lse", a.return_lse)
    checked = require.check(a.check)
    scale = 1.0 / math.sqrt(geometry.head_dim) if a.scale is None else require.number("scale", a.scale)
    visible = _visible(a, placement.private_copy(views.get("leftpad")))
    softcap = None if a.softcap is None else require.number("softcap", a.softcap, positive=True)
    if "out" in views:
        require.writable("out", views["out"])
    score_mod = python_function(a.score_mod)
    capacity = views["block_tables"].shape[1] * geometry.block_size
    max_seq_len = capacity if a.max_seq_len is None else min(_max_seq_len(a.max_seq_len), capacity)
    alibi_slopes, sinks = (placement.private_copy(views.get(name)) for name in ("alibi_slopes", "sinks"))
    k_scale, v_scale = cache_pair.scales(a.k_scale, a.v_scale, views, kv_format, placement)
    options = AttentionOptions(scale, visible, softcap, alibi_slopes, sinks, views.get("mask"), score_mod)
    out = views.pop("out", None)
    if out is not None:
        require.no_overlap("out", out, views.items())

    block_tables, seq_lens, query_starts = views["block_tables"], views["seq_lens"], views.get("query_starts")
    if placement.on_host:
        seq_lens = placement.private_copy(seq_lens)
        longest = values.seq_lens(seq_lens, max_seq_len, capacity)
        if query_starts is not None:
            query_starts = placement.private_copy(query_starts)
            values.query_starts(query_starts, seq_lens, len(q))
            if visible.leftpad is not None:
                values.leftpad(visible.leftpad, seq_lens)
            if options.mask is not None:
                values.mask(options.mask, query_starts, seq_lens)
        num_used = -(-longest // geometry.block_size)
        block_tables = placement.private_copy(placement.columns(block_tables, num_used))
        used = block_tables[:, :num_used]
        values.block_tables(
            "block_tables", used, seq_lens, geometry.block_size, geometry.num_blocks,
            lambda: visible.first_keys(seq_lens, 1 if query_starts is None else np.diff(query_starts)),
        )  # fmt: skip
    spec = cache_spec(a.layout, kv_format, geometry)
    return AttentionCall(
        arguments, placement, q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, query_starts, out, spec,
        k_scale, v_scale, views.get("k_scales"), views.get("v_scales"), options, str(a.kernel), bool(a.exact), checked,
    )  # fmt: skip


def _require_shapes(views: Mapping[str, Array], geometry: Geometry, arguments: AttentionArguments) -> None:
    q, block_tables, ragged = views["q"], views["block_tables"], "query_starts" in views
    rows = "num_tokens" if ragged else "num_seqs"
    require.ndim("q", q, f"({rows}, num_heads, head_dim)", 3)
    num_rows, num_heads, head_dim = q.shape
    if head_dim != geometry.head_dim:
        require.shape("q", q, f"({rows}, num_heads, head_dim)", (num_rows, num_heads, geometry.head_dim))
    if not _shares_heads(num_heads, geometry):
        hint = cache_pair.other_layouts(
            arguments.layout, views["k_cache"], views["v_cache"], partial(_shares_heads, num_heads)
        )
        raise ValueError(
            f"num_heads must be a positive multiple of num_kv_heads, got {num_heads} heads of q "
            f"and {geometry.num_kv_heads} of k_cache{hint}"
        )
    require.ndim("block_tables", block_tables, "(num_seqs, max_blocks)", 2)
    num_seqs = block_tables.shape[0]
    if not ragged and num_seqs != num_rows:
        require.shape("block_tables", block_tables, "(num_seqs, max_blocks)", (num_rows, block_tables.shape[1]))
    require.shape("seq_lens", views["seq_lens"], "(num_seqs,)", (num_seqs,))
    if ragged:
        require.shape("query_starts", views["query_starts"], "(num_seqs + 1,)", (num_seqs + 1,))
    if "alibi_slopes" in views:
        slopes = views["alibi_slopes"]
        if ragged and slopes.ndim == 2:
            require.shape("alibi_slopes", slopes, "(num_seqs, num_heads)", (num_seqs, num_heads))
        else:
            require.shape("alibi_slopes", slopes, "(num_heads,)", (num_heads,))
    if "sinks" in views:
        require.shape("sinks", views["sinks"], "(num_heads,)", (num_heads,))
    if "leftpad" in views:
        require.shape("leftpad", views["leftpad"], "(num_seqs,)", (num_seqs,))
    if "mask" in views:
        require.ndim("mask", views["mask"], "(n,), the rows one after the other as ravel() gives them", 1)
    cache_pair.scale_shapes(views, arguments.layout, arguments.kv_dtype, geometry)
    if "out" in views:
        require.shape("out", views["out"], f"({rows}, num_heads, head_dim)", q.shape)


def _shares_heads(num_heads: int, geometry: Geometry) -> bool:
    return num_heads > 0 and not num_heads % geometry.num_kv_heads


def _format_of(views: Mapping[str, Array], kv_dtype: KvDtype | None) -> KvFormat:
    q, k_cache = views["q"], views["k_cache"]
    require.float_dtype("q", q)
    kv_format = cache_pair.format_of(views, kv_dtype)
    if q.dtype not in kv_format.takes:
        raise TypeError(f"k_cache must have dtype {q.dtype}, that of q, or be in 8 bits, got {k_cache.dtype}")
    return kv_format


def _require_kernel(kernel: object, layout: str) -> None:
    if not (isinstance(kernel, str) and kernel in KERNELS):
        raise ValueError(f'kernel must be "auto", "v1", "v2" or "split", got {kernel!r}')
    if kernel != "auto" and (kernel == "split") == (layout == "vllm"):
        needs = "NHD or HND" if kernel == "split" else "vllm"
        raise ValueError(f'kernel "{kernel}" needs layout {needs}, got {layout}')


def _visible(a: AttentionArguments, leftpad: Array | None) -> Visible:
    """The rule that window, window_right, causal and leftpad give."""
    before, after = FURTHEST, 0 if a.causal else FURTHEST
    if a.window is not None:
        before = min(_tokens("window", a.window, 1) - 1, FURTHEST)
    if a.window_right is not None:
        if a.causal:
            raise ValueError("window_right needs causal=False: a causal query sees no later key")
        after = min(_tokens("window_right", a.window_right, 0), FURTHEST)
    return Visible(before, after, leftpad)


def _tokens(name: str, value: object, least: int) -> int:
    number = require.integer(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def _max_seq_len(value: object) -> int:
    """Convert the bound on lengths to an int, or raise; ``__index__`` is not called, since it may wait for a GPU."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"max_seq_len must be an int, got {type(value).__name__}: pass the max_seq_len of PagedKVCache.batch, "
            "or int(...) once"
        )
    if value < 0:
        raise ValueError(f"max_seq_len must be at least 0, got {value}")
    return int(value)
