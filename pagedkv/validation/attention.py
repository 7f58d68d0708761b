"""What attention requires: arguments in, views and options out.

First all that shapes, dtypes, strides and options say (forms.py), then values (values.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array
from ..calls import RAGGED, REQUIRED, VECTORS, AttentionCall, AttentionOptions, Form
from ..compiling.score_mod import python_function
from ..placement import Placement, place
from . import require, values
from .cache_pair import own_scales, scale_arrays
from .copies import checked_copy
from .forms import attention_forms

_ON_CPU = Placement("cpu", 0, 0, None)
_forms = attention_forms()


def attention_call(given: Mapping[str, Any]) -> AttentionCall:
    """The call with these arguments of prefill_attention if query_starts is among them, or of decode_attention."""
    named = [(name, given[name]) for name in (RAGGED if "query_starts" in given else REQUIRED)]
    named += [(name, x) for name in (*VECTORS, "out") if (x := given[name]) is not None]
    named += scale_arrays(given)
    placement, arrays = place(given["backend"], named)
    return placed_call(given, placement, dict(zip(dict(named), arrays, strict=True)))


def placed_call(given: Mapping[str, Any], placement: Placement, views: dict[str, Array]) -> AttentionCall:
    """The call with these arguments, of which `views` are the arrays, where `placement` says."""
    q, k_cache, v_cache = (views[name] for name in ("q", "k_cache", "v_cache"))
    form = _forms.of(given, views, placement)
    spec, capacity, options, max_seq_len = form.spec, form.capacity, form.options, given["max_seq_len"]
    score_mod = python_function(given["score_mod"])
    max_seq_len = capacity if max_seq_len is None else min(_max_seq_len(max_seq_len), capacity)
    if score_mod is not None or "alibi_slopes" in views or "sinks" in views:
        alibi_slopes, sinks = (placement.own(views.get(name)) for name in VECTORS)
        options = AttentionOptions(
            options.scale, options.causal, options.window, options.softcap, alibi_slopes, sinks, score_mod
        )
    k_scale, v_scale = form.k_scale, form.v_scale
    k_scales = own_scales("k_scale", views["k_scale"], placement) if k_scale is None else k_scale
    v_scales = own_scales("v_scale", views["v_scale"], placement) if v_scale is None else v_scale
    out = views.pop("out", None)
    if out is not None:
        require.apart("out", out, views.items())

    where = views["block_tables"], views["seq_lens"], views.get("query_starts")
    if placement.on_host:
        where = _own_values(placement, form, max_seq_len, *where)
    block_tables, seq_lens, query_starts = where
    return AttentionCall(
        given, form, placement, q, k_cache, v_cache, block_tables, seq_lens, max_seq_len, query_starts, out, spec,
        k_scales, v_scales, options, form.kernel, form.exact, form.checked,
    )  # fmt: skip


def longest_of(form: Form, block_tables: Array, seq_lens: Array, max_seq_len: int) -> int:
    """The longest of a call's own lengths, or raise for its values; all else of a call on the CPU is known."""
    spec = form.spec
    longest = values.seq_lens(seq_lens, min(max_seq_len, form.capacity), form.capacity)
    used = block_tables[:, : -(-longest // spec.block_size)]
    values.block_tables("block_tables", used, seq_lens, spec.block_size, spec.num_blocks)
    return longest


def known_decode(
    form: Form, q: Array, k_cache: Array, v_cache: Array, block_tables: Array, seq_lens: Array, longest: int
) -> AttentionCall:
    """A call of decode_attention on the CPU without scales and options that are arrays; all of it is known."""
    return AttentionCall(
        {}, form, _ON_CPU, q, k_cache, v_cache, block_tables, seq_lens, longest, None, None, form.spec,
        1.0, 1.0, form.options, form.kernel, form.exact, form.checked,
    )  # fmt: skip


def _own_values(
    placement: Placement,
    form: Form,
    max_seq_len: int,
    block_tables: Array,
    seq_lens: Array,
    query_starts: Array | None,
) -> tuple[Array, Array, Array | None]:
    """The call's own tables, lengths and query_starts; raises unless they are valid."""
    spec = form.spec
    seq_lens, longest = checked_copy(placement, seq_lens, values.seq_lens, max_seq_len, form.capacity)
    num_used, lengths = -(-longest // spec.block_size), seq_lens.tobytes()
    if query_starts is not None:
        query_starts, _ = checked_copy(placement, query_starts, _query_starts, lengths, form.q_shape[0])
    facts = num_used, lengths, spec.block_size, spec.num_blocks
    block_tables, _ = checked_copy(placement, placement.columns(block_tables, num_used), _block_tables, *facts)
    return block_tables, seq_lens, query_starts


def _query_starts(starts: Array, lengths: bytes, num_tokens: int) -> None:
    values.query_starts(starts, np.frombuffer(lengths, np.int32), num_tokens)


def _block_tables(tables: Array, num_used: int, lengths: bytes, block_size: int, num_blocks: int) -> None:
    used, seq_lens = tables[:, :num_used], np.frombuffer(lengths, np.int32)
    values.block_tables("block_tables", used, seq_lens, block_size, num_blocks)


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
