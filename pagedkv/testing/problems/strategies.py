"""Hypothesis strategies for attention problems around every boundary, and functions for score_mod."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import hypothesis.strategies as st

from ...layouts import FORMATS
from .attention import Problem, Spec, build
from .limits import BLOCK_SIZES, Limits

SPLIT = 512  # tokens that kernels sum without a merge; longer sequences take another path


def fade(score, q_pos, k_pos, head, seq):
    """A `score_mod` for problems: older keys count less, by an amount that depends on the head.

    Examples
    --------
    >>> from pagedkv.testing import fade
    >>> fade(1.0, q_pos=3, k_pos=2, head=0, seq=0)
    0.99
    """
    return score - 0.01 * (head + 1) * (q_pos - k_pos)


def own_parity(score, q_pos, k_pos, head, seq):
    """A `score_mod` with which odd heads see only odd keys, and none in a sequence of one token."""
    return -math.inf if k_pos % 2 != head % 2 else score


def decode_problems(limits: Limits | None = None) -> st.SearchStrategy[Problem]:
    """A strategy for problems of decode_attention within limits, by default `Limits()`.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> from pagedkv.testing import Limits, decode_problems
    >>> @settings(max_examples=2, database=None, deadline=None)
    ... @given(decode_problems(Limits(head_dims=(64,), longest=20)))
    ... def test(problem):
    ...     assert problem.q.shape[2] == 64
    >>> test()
    """
    return specs_within(limits or Limits(), prefill=False).map(build)


def prefill_problems(limits: Limits | None = None) -> st.SearchStrategy[Problem]:
    """A strategy for problems of prefill_attention within limits, by default `Limits()`.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> from pagedkv.testing import Limits, prefill_problems
    >>> @settings(max_examples=2, database=None, deadline=None)
    ... @given(prefill_problems(Limits(head_dims=(64,), longest=20)))
    ... def test(problem):
    ...     assert problem.q.shape[2] == 64
    >>> test()
    """
    return specs_within(limits or Limits(), prefill=True).map(build)


# Cached, since Hypothesis takes longer to check a new strategy than to draw from it.
@lru_cache(typed=True)
def _one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def specs_within(draw: st.DrawFn, limits: Limits, prefill: bool = False) -> Spec:
    """Draw any combination of shapes, dtypes and options that the limits allow, small enough for the reference."""
    layout = draw(_one_of(*limits.layouts))
    kv_dtype = draw(_one_of(*limits.kv_dtypes))
    score_mod = draw(st.sampled_from(limits.score_mods))  # not cached, since these functions belong to the caller
    kv_format = FORMATS[kv_dtype]
    block_size = draw(_one_of(*(limits.block_sizes or BLOCK_SIZES[layout])))
    head_dim = draw(_one_of(*limits.head_dims))
    num_kv_heads = draw(_one_of(*limits.nums_kv_heads))
    most_heads = 12 if prefill or score_mod else 96
    # At least 64 numbers per row: the error bound compares the largest of many errors.
    groups = [
        g for g in limits.group_sizes if g * num_kv_heads * head_dim >= 64 and g * num_kv_heads <= most_heads
    ] or [max(limits.group_sizes)]
    if score_mod:  # kernels with a score_mod are not kept on disk: compile none for one head per KV head
        groups = [g for g in groups if g > 1] or groups
    group_size = draw(_one_of(*groups))
    fits = limits.elements // (num_kv_heads * head_dim * (4 if prefill else 1))
    if block_size < limits.longest:  # there is always a second block
        fits = max(fits, block_size + 1)
    lengths = _lengths(block_size, min(fits, limits.longest))
    seq_lens = tuple(draw(st.lists(lengths, min_size=1, max_size=limits.most_seqs)))
    query_lens, padding_rows = None, 0
    if prefill:
        query_lens = tuple(draw(_query_lengths(length)) for length in seq_lens)
        padding_rows = draw(st.integers(0, 3))
    q_dtypes = [name for name in limits.q_dtypes if FORMATS[name].stored in kv_format.takes]
    strides = ["own"] if limits.contiguous else [*limits.strides]

    def option(name: str, values: st.SearchStrategy[Any], default: Any = None) -> Any:
        return draw(values) if name in limits.options else default

    windows = [1, 2, block_size, block_size + 1, SPLIT, SPLIT + 1, 10**6]
    scales = _one_of(None, "scalar", "per head")
    causal = option("causal", st.booleans(), True) if prefill else True
    rare = prefill and draw(_one_of(False, False, True))
    spec = Spec(
        seq_lens=seq_lens,
        query_lens=query_lens,
        padding_rows=padding_rows,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        block_size=block_size,
        layout=layout,
        q_dtype=draw(_one_of(*q_dtypes)),
        kv_dtype=kv_dtype,
        strides=draw(_one_of(*strides)),
        contiguous=limits.contiguous,
        kv_scales=option("k_scale", scales) if kv_format.scale == "call" else None,
        scale=option("scale", _one_of(None, None, 0.0, -0.1, 0.25)),
        softcap=option("softcap", _one_of(None, None, 0.7, 30.0)),
        alibi=option("alibi_slopes", st.booleans(), False),
        window=option("window", st.none() | _one_of(*windows)),
        sinks=option("sinks", st.booleans(), False),
        score_mod=score_mod,
        causal=causal,
        seq_slopes=rare and option("seq_slopes", st.booleans(), False),
        window_right=None if causal else option("window_right", _one_of(None, 0, 1, block_size, SPLIT)),
        leftpad=rare and option("leftpad", st.booleans(), False),
        mask=option("mask", _one_of(None, "bool", "bits")) if rare else None,
        seed=draw(st.integers(0, 2**16)),
        poison=draw(_one_of(*limits.poisons)),
    )
    if spec.poisons_left_of_window and limits.finite_left_of_window:
        spec = spec.replace(finite_left_of_window=True)
    if limits.needles and draw(_one_of(False, False, False, True)):
        spec = spec.replace(needles=draw(_needles(spec)), fingerprint=draw(st.booleans()))
    return spec


@lru_cache
def _lengths(block_size: int, longest: int) -> st.SearchStrategy[int]:
    """Draw lengths at the boundaries of blocks and splits, and any others."""
    near = [0, 1, block_size - 1, block_size, block_size + 1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 1]
    return st.sampled_from([n for n in near if n <= longest]) | st.integers(0, min(longest, 1100))


@lru_cache(2048)
def _query_lengths(seq_len: int) -> st.SearchStrategy[int]:
    near = sorted({0, min(1, seq_len), min(2, seq_len), min(17, seq_len), min(65, seq_len)})
    return st.sampled_from(near) | st.integers(0, min(seq_len, 130))


def _needles(spec: Spec) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw a position for each KV head: near the ends of a sequence or a block, or anywhere."""
    last = max(spec.seq_lens) - 1
    near = sorted({min(max(n, 0), max(last, 0)) for n in (0, 1, spec.block_size - 1, spec.block_size, last - 1, last)})
    positions = st.sampled_from(near) | st.integers(0, max(last, 0))
    return st.lists(positions, min_size=spec.num_kv_heads, max_size=spec.num_kv_heads).map(tuple)
