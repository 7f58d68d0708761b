"""Hypothesis strategies: specs of problems around every boundary, for each compiled kernel."""

import math
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest

from .problems import FLOATS, Spec

SPLIT = 512  # tokens; tests of cpu.attention.decode assert that it is the kernel's own


def fade(score, q_pos, k_pos, head, seq):
    return score - 0.01 * (head + 1) * (q_pos - k_pos)


def own_parity(score, q_pos, k_pos, head, seq):
    """Odd heads see odd keys: of a sequence of one token, none."""
    return -math.inf if k_pos % 2 != head % 2 else score


def capped(cap):
    def mod(score, q_pos, k_pos, head, seq):
        return cap * math.tanh(score / cap) + 0.1 * seq

    return mod


def long(cases):
    """Cases of a parametrisation for which CI has no time: others have the same in other pairs."""
    return [pytest.param(*(case if type(case) is tuple else [case]), marks=pytest.mark.long) for case in cases]


capped_2, capped_half = capped(2.0), capped(0.5)


class Kernel(NamedTuple):
    """What the CPU kernels are compiled for: a few seconds for each one, and for each score_mod."""

    kv_dtype: str
    width: int  # the largest power of two up to 64 that divides head_dim
    is_vllm: bool = False
    score_mod: Any = None

    def __str__(self) -> str:
        name = f"{self.kv_dtype}-{self.width}{'-vllm' if self.is_vllm else ''}"
        return f"{name}-{self.score_mod.__name__}" if self.score_mod else name


# Every value of each meets several of the others.
DECODE_KERNELS = [
    *(Kernel("float32", width) for width in (8, 64)),
    Kernel("bfloat16", 64),
    Kernel("float16", 64),
    Kernel("fp8_e4m3", 32),
    Kernel("float32", 8, is_vllm=True),
    Kernel("bfloat16", 16, is_vllm=True),
    Kernel("fp8_e4m3", 16, is_vllm=True),
    Kernel("float32", 64, score_mod=fade),
    Kernel("float32", 8, is_vllm=True, score_mod=own_parity),
]
MORE_DECODE_KERNELS = [
    *(Kernel(kv_dtype, 64, is_vllm=True) for kv_dtype in ("float16", "fp8_e5m2")),
    Kernel("bfloat16", 64, score_mod=own_parity),
    *(Kernel("float32", width) for width in (16, 32)),
    *(Kernel("fp8_e5m2", width) for width in (16, 64)),
    *(Kernel(kv_dtype, 8) for kv_dtype in ("bfloat16", "fp8_e4m3")),
    Kernel("float16", 16),
]
PREFILL_KERNELS = [
    Kernel("float32", 64),
    Kernel("bfloat16", 64),
    Kernel("float16", 16),
    Kernel("fp8_e4m3", 32),
    Kernel("float32", 8, is_vllm=True),
    Kernel("fp8_e4m3", 16, is_vllm=True),
    Kernel("float32", 64, score_mod=fade),
]
MORE_PREFILL_KERNELS = [Kernel("fp8_e5m2", 64), Kernel("float32", 8), Kernel("bfloat16", 64, score_mod=own_parity)]
HEAD_DIMS = {
    8: (8, 24, 40, 72, 120, 504),
    16: (16, 48, 80, 80, 112, 176),
    32: (32, 32, 96, 96, 160, 224),
    64: (64, 64, 128, 128, 192, 256, 512),
}


@st.composite
def specs(draw: st.DrawFn, kernel: Kernel, prefill: bool = False) -> Spec:
    """Every combination of shapes, dtypes and options that the contract allows, small enough for the oracle."""
    kv_dtype, score_mod, is_fp8 = kernel.kv_dtype, kernel.score_mod, kernel.kv_dtype.startswith("fp8")
    layout = "vllm" if kernel.is_vllm else draw(st.sampled_from(["NHD", "HND"]))
    block_size = draw(st.sampled_from([8, 16, 32, 256] if kernel.is_vllm else [1, 2, 3, 7, 16, 24, 32, 256]))
    head_dim = draw(st.sampled_from(HEAD_DIMS[kernel.width]))
    num_kv_heads = draw(st.integers(1, 3))
    most_heads = 12 if prefill or score_mod else 96
    # At least 64 numbers per row: the error bound compares the largest of many errors.
    groups = [
        g for g in (1, 2, 3, 4, 5, 7, 8, 16, 48) if g * num_kv_heads * head_dim >= 64 and g * num_kv_heads <= most_heads
    ]
    if score_mod:  # decode with one head to a KV head is a kernel of its own, and none with a score_mod is kept
        groups = [g for g in groups if g > 1]
    group_size = draw(st.sampled_from(groups))
    lengths = _lengths(block_size, longest=2**21 // (num_kv_heads * head_dim * (4 if prefill else 1)))
    seq_lens = tuple(draw(st.lists(lengths, min_size=1, max_size=4)))
    query_lens, padding_rows = None, 0
    if prefill:
        query_lens = tuple(draw(_query_lengths(length)) for length in seq_lens)
        padding_rows = draw(st.integers(0, 3))
    return Spec(
        seq_lens=seq_lens,
        query_lens=query_lens,
        padding_rows=padding_rows,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        block_size=block_size,
        layout=layout,
        q_dtype=draw(st.sampled_from(list(FLOATS))) if is_fp8 else draw(st.sampled_from([kv_dtype, "float32"])),
        kv_dtype=kv_dtype,
        strides=draw(st.sampled_from(["own", "halves", "strided"])),
        kv_scales=draw(st.sampled_from([None, "scalar", "per head"])) if is_fp8 else None,
        scale=draw(st.sampled_from([None, None, 0.0, -0.1, 0.25])),
        softcap=draw(st.sampled_from([None, None, 0.7, 30.0])),
        alibi=draw(st.booleans()),
        window=draw(st.none() | st.sampled_from([1, 2, block_size, block_size + 1, SPLIT, SPLIT + 1, 10**6])),
        sinks=draw(st.booleans()),
        score_mod=score_mod,
        causal=draw(st.booleans()) if prefill else True,
        seed=draw(st.integers(0, 2**16)),
    )


def _lengths(block_size: int, longest: int) -> st.SearchStrategy[int]:
    """Lengths at the boundaries of blocks and splits, and any others."""
    near = [0, 1, block_size - 1, block_size, block_size + 1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 1]
    return st.sampled_from([n for n in near if n <= longest]) | st.integers(0, min(longest, 1100))


def _query_lengths(seq_len: int) -> st.SearchStrategy[int]:
    near = sorted({0, min(1, seq_len), min(2, seq_len), min(17, seq_len), min(65, seq_len)})
    return st.sampled_from(near) | st.integers(0, min(seq_len, 130))
