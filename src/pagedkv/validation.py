"""What attention checks before it computes: arguments in, checked NumPy views and options out.

All shapes are checked before all dtypes, then strides, then options, then values. Nothing is written here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import checks
from .arrays import Array
from .checks import FLOAT32, INT32
from .layouts import (
    FLOAT_DTYPES,
    CacheSpec,
    Geometry,
    cache_geometry,
    cache_spec,
    check_kv_dtype,
    check_layout,
)
from .options import AttentionOptions
from .placement import Side, place

KERNELS = ("auto", "v1", "v2", "split")
# The arrays whose rows kernels move in vectors of 16 bytes.
ROWS = frozenset(("q", "k", "v", "k_cache", "v_cache", "out"))
_UINT8 = np.dtype(np.uint8)
_INT32_MAX = 2**31 - 1

# One number for all KV heads, or a (num_kv_heads,) float32 array.
Scale = npt.NDArray[np.float32] | float


class AttentionCall(NamedTuple):
    """The checked arguments of a decode or prefill call.

    The arrays are on the side of the call: on CUDA they are shadows, whose memory is never touched (device_arrays.py).
    query_starts is None in a decode call. `checked` says whether kernels look at values before they use them.
    """

    q: Array
    k_cache: Array
    v_cache: Array
    block_tables: Array
    seq_lens: Array
    query_starts: Array | None
    out: Array | None
    spec: CacheSpec
    k_scale: Scale
    v_scale: Scale
    options: AttentionOptions
    kernel: str
    checked: bool
    side: Side


def attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    query_starts: Any,
    *,
    ragged: bool,
    causal: object,
    scale: object,
    layout: Any,
    kv_dtype: Any,
    k_scale: Any,
    v_scale: Any,
    alibi_slopes: Any,
    window: object,
    softcap: object,
    sinks: Any,
    score_mod: Callable[..., Any] | None,
    kernel: object,
    backend: object,
    out: Any,
    return_lse: object,
    check: object,
) -> AttentionCall:
    """Check the arguments of decode_attention, or of prefill_attention if ragged."""
    named = [
        ("q", q),
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
    ]
    if ragged:
        named.append(("query_starts", query_starts))
    named += [(n, x) for n, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks), ("out", out)) if x is not None]
    named += scale_arrays(k_scale, v_scale)
    side, views = place(backend, named)
    given = {name: view for (name, _), view in zip(named, views, strict=True)}
    q, k_cache, v_cache, block_tables, seq_lens = views[:5]
    check_layout(layout)
    check_kv_dtype(kv_dtype)

    geometry = cache_geometry(layout, k_cache.shape, v_cache.shape, k_cache.itemsize)
    _attention_shapes(given, geometry, ragged)
    kind = _cache_kind(q, k_cache, v_cache, kv_dtype)
    for name, view in given.items():
        expected = _DTYPES.get(name)
        if expected is not None:
            checks.dtype(name, view, expected)
    if out is not None:
        checks.dtype("out", given["out"], q.dtype, ", that of q")
    for name, view in given.items():
        checks.strides(name, view)
        if name in ROWS:
            checks.row_alignment(name, view, side)

    _check_kernel(kernel, layout)
    for name, value in (("causal", causal), ("return_lse", return_lse)):
        if type(value) is not bool:
            checks.boolean(name, value)
    checked = checks.check_option(check)
    options = AttentionOptions(
        scale=1.0 / math.sqrt(geometry.head_dim) if scale is None else checks.number("scale", scale),
        causal=bool(causal),
        window=None if window is None else _window(window),
        softcap=None if softcap is None else checks.number("softcap", softcap, positive=True),
        alibi_slopes=given.get("alibi_slopes"),
        sinks=given.get("sinks"),
        score_mod=_score_mod(score_mod),
    )
    k_scales, v_scales = scales(k_scale, v_scale, given, kind, side)
    result = given.pop("out", None)
    if result is not None:
        checks.writable("out", result)
        checks.apart("out", result, given.items())

    if side.on_host:
        check_lengths(seq_lens, block_tables.shape[1] * geometry.block_size)
        if ragged:
            check_query_starts(given["query_starts"], seq_lens, q.shape[0])
        check_tables("block_tables", block_tables, seq_lens, geometry.block_size, geometry.num_blocks)
    return AttentionCall(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        given.get("query_starts"),
        result,
        cache_spec(layout, kind, geometry),
        k_scales,
        v_scales,
        options,
        str(kernel),
        checked,
        side,
    )


_DTYPES = {
    "block_tables": INT32,
    "seq_lens": INT32,
    "query_starts": INT32,
    "alibi_slopes": FLOAT32,
    "sinks": FLOAT32,
}


def _attention_shapes(given: dict[str, Array], geometry: Geometry, ragged: bool) -> None:
    q, block_tables = given["q"], given["block_tables"]
    rows = "num_tokens" if ragged else "num_seqs"
    checks.ndim("q", q, f"({rows}, num_heads, head_dim)", 3)
    num_rows, num_heads, head_dim = q.shape
    if head_dim != geometry.head_dim:
        checks.shape("q", q, f"({rows}, num_heads, head_dim)", (num_rows, num_heads, geometry.head_dim))
    if num_heads < 1 or num_heads % geometry.num_kv_heads:
        raise ValueError(
            f"num_heads must be a positive multiple of num_kv_heads, got {num_heads} heads of q "
            f"and {geometry.num_kv_heads} of k_cache"
        )
    checks.ndim("block_tables", block_tables, "(num_seqs, max_blocks)", 2)
    num_seqs = block_tables.shape[0]
    if not ragged and num_seqs != num_rows:
        checks.shape("block_tables", block_tables, "(num_seqs, max_blocks)", (num_rows, block_tables.shape[1]))
    checks.shape("seq_lens", given["seq_lens"], "(num_seqs,)", (num_seqs,))
    if ragged:
        checks.shape("query_starts", given["query_starts"], "(num_seqs + 1,)", (num_seqs + 1,))
    for name in ("alibi_slopes", "sinks"):
        if name in given:
            checks.shape(name, given[name], "(num_heads,)", (num_heads,))
    scale_checks(given, geometry.num_kv_heads)
    if "out" in given:
        checks.shape("out", given["out"], f"({rows}, num_heads, head_dim)", q.shape)


def scale_arrays(k_scale: Any, v_scale: Any) -> list[tuple[str, Any]]:
    """Those of the two scales that are not numbers, with their names."""
    pair = (("k_scale", k_scale), ("v_scale", v_scale))
    return [(name, x) for name, x in pair if x is not None and not np.isscalar(x)]


def scale_checks(given: dict[str, Array], num_kv_heads: int) -> None:
    """Raise ValueError for a scale among the given arrays that has not one element per KV head."""
    for name in ("k_scale", "v_scale"):
        if name in given:
            checks.shape(name, given[name], "(num_kv_heads,)", (num_kv_heads,))


def scales(k_scale: Any, v_scale: Any, given: dict[str, Array], kind: str, side: Side) -> tuple[Scale, Scale]:
    """Both scales, 1.0 where there is none; arrays among them are in `given`."""
    result: list[Scale] = []
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if value is not None and not kind.startswith("fp8"):
            raise ValueError(f"{name} needs an fp8 cache, got a cache of {kind}")
        if name in given:
            checks.dtype(name, given[name], FLOAT32)
            if side.on_host:
                _scale_values(name, given[name])
            result.append(given[name])
        else:
            result.append(1.0 if value is None else checks.number(name, value, positive=True))
    return result[0], result[1]


def _scale_values(name: str, scale: Array) -> None:
    bad = ~((scale > 0) & np.isfinite(scale))
    if bad.any():
        head = int(bad.argmax())
        raise ValueError(f"{name} must be positive and finite, got {scale[head]} for KV head {head}")


def per_head(scale: Scale, num_kv_heads: int) -> npt.NDArray[np.float32]:
    """A scale on the host as a (num_kv_heads,) float32 array."""
    return scale if isinstance(scale, np.ndarray) else np.full(num_kv_heads, scale, np.float32)


def _cache_kind(q: Array, k_cache: Array, v_cache: Array, kv_dtype: str | None) -> str:
    checks.float_dtype("q", q)
    kind = cache_kind(k_cache, v_cache, kv_dtype)
    if kv_dtype is None and k_cache.dtype != q.dtype and q.dtype != FLOAT32:
        raise TypeError(f"k_cache must have dtype {q.dtype}, that of q, or be fp8, got {k_cache.dtype}")
    return kind


def cache_kind(k_cache: Array, v_cache: Array, kv_dtype: str | None) -> str:
    """What the elements of a pair of caches are, or raise TypeError."""
    if kv_dtype is not None:
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            checks.dtype(name, cache, _UINT8, f" for kv_dtype {kv_dtype!r}")
        return kv_dtype
    if k_cache.dtype not in FLOAT_DTYPES:
        hint = "; an fp8 cache is uint8 and needs kv_dtype" if k_cache.itemsize == 1 else ""
        raise TypeError(f"k_cache must have dtype float32, float16 or bfloat16, got {k_cache.dtype}{hint}")
    checks.dtype("v_cache", v_cache, k_cache.dtype, ", that of k_cache")
    return k_cache.dtype.name


def _check_kernel(kernel: object, layout: str) -> None:
    if not (isinstance(kernel, str) and kernel in KERNELS):
        raise ValueError(f'kernel must be "auto", "v1", "v2" or "split", got {kernel!r}')
    if kernel != "auto" and (kernel == "split") == (layout == "vllm"):
        needs = "NHD or HND" if kernel == "split" else "vllm"
        raise ValueError(f'kernel "{kernel}" needs layout {needs}, got {layout}')


def _window(window: object) -> int:
    width = checks.integer("window", window)
    if width < 1:
        raise ValueError(f"window must be at least 1, got {width}")
    return min(width, _INT32_MAX)


def _score_mod(score_mod: Any) -> Callable[..., Any] | None:
    """The Python function that every backend compiles for itself, also of one that numba has decorated."""
    if score_mod is None:
        return None
    function = getattr(score_mod, "py_func", score_mod)
    if not isinstance(function, FunctionType):
        raise TypeError(f"score_mod must be a function made by def or lambda, got {type(score_mod).__name__}")
    code = function.__code__
    if code.co_argcount != 5 or code.co_kwonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        raise TypeError(
            "score_mod must be a function of (score, q_pos, k_pos, head, seq) without other parameters, got one of "
            f"({', '.join(inspect.signature(function).parameters)})"
        )
    return function


def check_lengths(seq_lens: Array, capacity: int) -> None:
    """Raise ValueError unless every length is in 0..capacity."""
    if not len(seq_lens) or int(seq_lens.view(np.uint32).max()) <= capacity:
        return
    seq = int((seq_lens.view(np.uint32) > capacity).argmax())
    raise ValueError(
        f"seq_lens must be in 0..max_blocks * block_size = 0..{capacity}, got {seq_lens[seq]} for sequence {seq}"
    )


def check_tables(name: str, block_tables: Array, seq_lens: Array, block_size: int, num_blocks: int) -> None:
    """Raise IndexError if a used entry of a table is no block's id; the lengths have been checked."""
    longest = int(seq_lens.max()) if len(seq_lens) else 0
    used = block_tables[:, : -(-longest // block_size)].view(np.uint32)
    # Most tables are valid even where they are not used: one pass, and no mask.
    if not used.size or int(used.max()) < num_blocks:
        return
    num_used = -(-seq_lens.astype(np.int64) // block_size)
    bad = (used >= num_blocks) & (np.arange(used.shape[1]) < num_used[:, None])
    if bad.any():
        seq, column = np.unravel_index(bad.argmax(), bad.shape)
        where = f"for sequence {seq}, column {column}" if name == "block_tables" else f"at column {column}"
        raise IndexError(
            f"{name} must hold block ids in 0..num_blocks-1 = 0..{num_blocks - 1}, "
            f"got {block_tables[seq, column]} {where}"
        )


def check_query_starts(query_starts: Array, seq_lens: Array, num_tokens: int) -> None:
    """Raise ValueError unless the starts begin at 0, never decrease, and fit q and the lengths."""
    if query_starts[0] != 0:
        raise ValueError(f"query_starts must begin with 0, got {query_starts[0]}")
    query_lens = np.diff(query_starts.astype(np.int64))
    if len(query_lens) and query_lens.min() < 0:
        seq = int((query_lens < 0).argmax())
        raise ValueError(
            f"query_starts must never decrease, "
            f"got {query_starts[seq]} and then {query_starts[seq + 1]} for sequence {seq}"
        )
    if query_starts[-1] > num_tokens:
        raise ValueError(f"query_starts must end at or before num_tokens = {num_tokens}, got {query_starts[-1]}")
    longer = query_lens > seq_lens
    if longer.any():
        seq = int(longer.argmax())
        raise ValueError(
            f"query_starts must give no sequence more tokens than its seq_len, "
            f"got {query_lens[seq]} tokens for sequence {seq} of length {seq_lens[seq]}"
        )
