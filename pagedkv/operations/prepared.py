"""Attention of a batch on the host: the call of the first layer is validated and planned, those of others only run.

This works because all layers have the same tables and lengths, and queries and caches of the same shapes, strides and
dtypes. FlashInfer splits its calls into plan and run for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Array, identify
from ..calls import AttentionArguments
from ..cpu import backend as cpu
from ..cpu.threads import get_num_threads
from ..validation.attention import attention_call

if TYPE_CHECKING:
    from ..cpu.attention.plan import AttentionPlan

# Options that are fully described by plain values; a call with another one is validated every time.
_OPTIONS = frozenset(
    ("scale", "window", "window_right", "softcap", "alibi_slopes", "sinks", "score_mod", "causal", "exact", "check")
)
_PLAIN_TYPES = frozenset((bool, int, float, str, NoneType))


def attend(
    operation: Callable[..., Any],
    prepared: dict[Hashable, AttentionPlan],
    caches_key: Hashable,
    q: Any,
    k_cache: Array,
    v_cache: Array,
    where: dict[str, Any],
    stored: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Run an attention call on a batch, reusing the launches of an earlier call like it.

    Parameters
    ----------
    operation : callable
        decode_attention or prefill_attention.
    prepared : dict
        The launches of earlier calls, by everything that they depend on; kept by the batch.
    caches_key
        Equal for calls whose caches have the same shapes, strides, dtypes and scales, so that they can share launches.
    q : (num_tokens, num_heads, head_dim) array
    k_cache, v_cache : array
    where : dict
        block_tables, seq_lens and, for prefill_attention, query_starts.
    stored, options : dict
        All other arguments of the operation: `stored` says how the caches are stored, `options` is what the caller of
        this layer passes. Where these hold arrays or unknown names, or q is on a device, the operation itself runs.

    Returns
    -------
    array
        What the operation returns.
    """
    chosen = options.values()
    is_known = _OPTIONS.issuperset(options) and _PLAIN_TYPES.issuperset(map(type, chosen))
    if not is_known or (argument := identify("q", q)).on_device:
        return operation(q, k_cache, v_cache, **where, **stored, **options)
    view = argument.view()
    facts = view.shape, view.strides, view.dtype, view.flags.num
    # Compare bytes, and plan by them too, since another thread may write to these arrays at any time.
    tables = [(x.shape, x.dtype, x.tobytes()) for x in where.values()]
    # 1, 1.0 and True are equal, but not all are valid.
    key = caches_key, facts, *tables, stored["max_seq_len"], get_num_threads(), *options, *chosen, *map(type, chosen)
    ready = prepared.get(key)
    if ready is None:
        ragged = "query_starts" in where
        copies = (np.frombuffer(raw, dtype).reshape(shape) for shape, dtype, raw in tables)
        where = dict(zip(where, copies, strict=True))
        arguments = AttentionArguments(view, k_cache, v_cache, ragged=ragged, **where, **stored, **options)
        ready = prepared[key] = cpu.plan_attention(attention_call(arguments))
    out, result = argument.new("out", view.shape, view.dtype, 0, "")
    if ready.num_rows:
        cpu.run_plan(ready, view, k_cache, v_cache, result, np.empty(view.shape[:2], np.float32))
    return out
