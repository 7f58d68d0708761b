"""What the CPU kernels are compiled for in tests, and the problems that are drawn for each."""

import math
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest

from pagedkv.testing.problems.attention import Spec
from pagedkv.testing.problems.limits import GROUP_SIZES, HEAD_DIMS, Limits
from pagedkv.testing.problems.strategies import SPLIT, fade, own_parity, specs_within

__all__ = [
    "DECODE_KERNELS",
    "MORE_DECODE_KERNELS",
    "MORE_PREFILL_KERNELS",
    "PREFILL_KERNELS",
    "SPLIT",
    "Kernel",
    "each_of",
    "fade",
    "fading_faster",
    "fading_parity",
    "long",
    "own_parity",
    "specs",
]


def fading(rate):
    def fading_parity(score, q_pos, k_pos, head, seq):
        """All in one kernel: does a `score_mod` see positions, heads, sequences and the bias, and may it mask all?"""
        faded = 0.9 * score - rate * (head + 1) * (q_pos - k_pos) + 0.1 * seq
        return -math.inf if k_pos % 2 != head % 2 else faded

    return fading_parity


def long(cases):
    """Cases of a parametrisation for which CI has no time: others have the same in other pairs."""
    return [pytest.param(*(case if type(case) is tuple else [case]), marks=pytest.mark.long) for case in cases]


def each_of(argument, cases, *short):
    """Parametrise by cases that have names; in the short run by those that are named here, or by all."""
    assert set(short) <= set(cases)
    marks = {name: [] if not short or name in short else pytest.mark.long for name in cases}
    return pytest.mark.parametrize(
        argument, [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]
    )


fading_parity, fading_faster = fading(0.01), fading(0.2)


class Kernel(NamedTuple):
    """What the CPU kernels are compiled for: a few seconds for each one, and for each score_mod."""

    kv_dtype: str
    width: int  # the largest power of two up to 64 that divides head_dim
    is_vllm: bool = False
    score_mod: Any = None
    alone: bool | None = None  # decode has a kernel of its own where a KV head has one query head; None: both

    def __str__(self) -> str:
        name = f"{self.kv_dtype}-{self.width}{'-vllm' if self.is_vllm else ''}"
        name += {None: "", True: "-alone", False: "-grouped"}[self.alone]
        return f"{name}-{self.score_mod.__name__}" if self.score_mod else name


# Every value of each meets several of the others; the loops of each dtype have tests of their own.
DECODE_KERNELS = [
    Kernel("float32", 8, alone=False),
    Kernel("float32", 64),
    Kernel("bfloat16", 64, alone=False),
    Kernel("float16", 64, alone=False),
    Kernel("fp8_e4m3", 32),
    Kernel("int8", 32),
    Kernel("int8", 16, alone=False),
    Kernel("float32", 8, is_vllm=True),
    Kernel("float16", 16, is_vllm=True, alone=False),
    Kernel("fp8_e4m3", 16, is_vllm=True, alone=False),
    Kernel("int8", 16, is_vllm=True, alone=False),
    Kernel("float32", 64, score_mod=fading_parity),
]
MORE_DECODE_KERNELS = [
    Kernel("float32", 8, alone=True),
    *(Kernel(kv_dtype, 64, alone=True) for kv_dtype in ("bfloat16", "float16")),
    Kernel("bfloat16", 16, is_vllm=True),
    Kernel("fp8_e4m3", 16, is_vllm=True, alone=True),
    Kernel("float32", 8, is_vllm=True, score_mod=own_parity),
    *(Kernel(kv_dtype, 64, is_vllm=True) for kv_dtype in ("float16", "fp8_e5m2")),
    Kernel("bfloat16", 64, score_mod=own_parity),
    *(Kernel("float32", width) for width in (16, 32)),
    *(Kernel("fp8_e5m2", width) for width in (16, 64)),
    *(Kernel(kv_dtype, 8) for kv_dtype in ("bfloat16", "fp8_e4m3")),
    Kernel("float16", 16),
    *(Kernel("int8", 8), Kernel("int8", 64), Kernel("int8", 64, is_vllm=True, alone=True)),
    Kernel("int8", 64, score_mod=own_parity),
]
PREFILL_KERNELS = [
    Kernel("float32", 64),
    Kernel("bfloat16", 64),
    Kernel("float16", 16),
    Kernel("fp8_e4m3", 32),
    Kernel("fp8_e4m3", 16, is_vllm=True),
    Kernel("int8", 16),
    Kernel("int8", 16, is_vllm=True),
    Kernel("float32", 64, score_mod=fading_parity),
]
MORE_PREFILL_KERNELS = [
    *(Kernel("fp8_e5m2", 64), Kernel("float32", 8), Kernel("float32", 8, is_vllm=True)),
    Kernel("bfloat16", 64, score_mod=own_parity),
    *(Kernel("int8", 8), Kernel("int8", 64), Kernel("int8", 64, score_mod=own_parity)),
]


def specs(kernel: Kernel, prefill: bool = False) -> st.SearchStrategy[Spec]:
    """Every combination of shapes, dtypes and options that the contract allows, small enough for the oracle."""
    return specs_within(
        Limits(
            layouts=("vllm",) if kernel.is_vllm else ("NHD", "HND"),
            kv_dtypes=(kernel.kv_dtype,),
            head_dims=HEAD_DIMS[kernel.width],
            nums_kv_heads=(1, 2, 3),
            group_sizes=tuple(g for g in GROUP_SIZES if kernel.alone in (None, g == 1)),
            score_mods=(kernel.score_mod,),
            poisons=("nan",),
            needles=False,
        ),
        prefill=prefill,
    )
