"""Cases: an operation and a family of problems that few compiled kernels serve, drawn at random."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

from hypothesis.strategies import SearchStrategy

from ...layouts import FORMATS
from ..problems.limits import BLOCK_SIZES, HEAD_DIMS, KV_DTYPES, OPTIONS, STRIDES, Limits, fits
from ..problems.merges import merge_specs
from ..problems.strategies import fade, own_parity, specs_within
from ..problems.writes import write_specs

DEVICE_HEAD_DIMS = (8, 16, 40, 64, 64, 72, 80, 96, 128, 128, 192, 256)
DEVICE_GROUP_SIZES = (1, 2, 3, 4, 5, 7, 8, 16)


class FuzzCase(NamedTuple):
    """An operation, a strategy for problems that few compiled kernels serve, and further arguments of the calls."""

    operation: str
    strategy: SearchStrategy[Any]
    changes: dict[str, Any]


def draw_case(backend: str, seed: int, number: int) -> FuzzCase:
    """Draw a case: the same one for the same seed and number."""
    rng = random.Random(f"{seed} {number}")
    [operation] = rng.choices(("decode", "prefill", "write", "merge"), (5, 5, 1, 1))
    if operation == "merge":
        return FuzzCase(operation, merge_specs(head_dims=(rng.choice((8, 16, 64, 80)),)), {})
    layouts = rng.choice((("NHD", "HND"), ("NHD", "HND"), ("vllm",)))
    if operation == "write":
        kv_dtype = rng.choice(KV_DTYPES)
        return FuzzCase(operation, write_specs(layouts, (kv_dtype,), _strides(backend, kv_dtype)), {})
    limits = _cpu_limits(rng, layouts) if backend == "cpu" else _device_limits(rng, layouts, operation)
    if backend == "emulator":  # a key takes milliseconds per head: draw few heads, and few keys for wide ones
        [group_size] = limits.group_sizes
        nums_kv_heads = tuple(n for n in limits.nums_kv_heads if n * group_size <= 12) or (1,)
        limits = replace(limits, nums_kv_heads=nums_kv_heads, elements=2**16)
    is_vllm_decode = layouts == ("vllm",) and operation == "decode"
    changes = {"kernel": rng.choice(("v1", "v2"))} if is_vllm_decode and backend != "cpu" else {}
    return FuzzCase(operation, specs_within(limits, prefill=operation == "prefill"), changes)


def _cpu_limits(rng: random.Random, layouts: tuple[str, ...]) -> Limits:
    kv_dtype = rng.choice(KV_DTYPES)
    head_dims = _fitting(HEAD_DIMS[rng.choice((8, 16, 32, 64, 64))], kv_dtype, layouts)
    score_mod = rng.choice((None,) * 8 + (fade, own_parity))
    longest = rng.choice((130, 130, 300, 1100))  # most of the time goes into the reference
    return Limits(
        layouts=layouts,
        kv_dtypes=(kv_dtype,),
        head_dims=head_dims,
        score_mods=(score_mod,),
        longest=130 if score_mod and longest < 1100 else longest,  # the reference calls a score_mod for each score
        elements=2**20,  # for the reference, too
    )


def _device_limits(rng: random.Random, layouts: tuple[str, ...], operation: str) -> Limits:
    """Draw one value of everything for which a kernel is compiled: sizes, dtypes, and whether logits are changed."""
    kv_dtype = rng.choice(KV_DTYPES)
    modifies = rng.random() < 0.5
    options = OPTIONS if modifies else tuple(x for x in OPTIONS if x not in ("softcap", "alibi_slopes"))
    return Limits(
        layouts=layouts,
        q_dtypes=(rng.choice(FORMATS[kv_dtype].takes).name,),
        kv_dtypes=(kv_dtype,),
        head_dims=(rng.choice(_fitting(DEVICE_HEAD_DIMS, kv_dtype, layouts)),),
        block_sizes=(rng.choice(BLOCK_SIZES[layouts[0]]),),
        group_sizes=(rng.choice(DEVICE_GROUP_SIZES),),
        strides=_strides("emulator", kv_dtype),
        options=options,
        score_mods=(rng.choice((None,) * 9 + (fade,)),),
        longest=600 if operation == "decode" else 130,
        most_seqs=3,
    )


def _strides(backend: str, kv_dtype: str) -> tuple[str, ...]:
    """The strides that the backend accepts: CUDA kernels need rows of codes that are aligned for whole vectors."""
    return STRIDES[:2] if backend != "cpu" and FORMATS[kv_dtype].coded else STRIDES


def _fitting(head_dims: tuple[int, ...], kv_dtype: str, layouts: tuple[str, ...]) -> tuple[int, ...]:
    """The head sizes that the layouts support; 64 if they support none."""
    return tuple(d for d in head_dims if fits(d, kv_dtype, layouts)) or (64,)
