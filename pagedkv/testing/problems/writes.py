"""Problems of write_kv: tokens, slots that may be negative, and caches full of poison."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import numpy as np

from ...layouts import FORMATS, LAYOUTS
from .attention import FLOATS, Problem, Spec, build
from .limits import BLOCK_SIZES, KV_DTYPES, STRIDES

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class WriteSpec:
    """The caches as a Spec, and the tokens to write to them.

    Attributes
    ----------
    cache : Spec
    token_dtype : str
        The dtype of k and v.
    num_tokens : int
    backwards : bool
        Whether k and v have negative strides.
    """

    cache: Spec
    token_dtype: str
    num_tokens: int
    backwards: bool = False


@dataclasses.dataclass
class WriteProblem:
    """The arguments of a call of write_kv."""

    k: Array
    v: Array
    problem: Problem
    slots: Array
    options: dict[str, Any]


@st.composite
def write_specs(
    draw: st.DrawFn,
    layouts: tuple[str, ...] = LAYOUTS,
    kv_dtypes: tuple[str, ...] = KV_DTYPES,
    strides: tuple[str, ...] = STRIDES,
) -> WriteSpec:
    """Draw writes to caches of any layout and dtype."""
    kv_dtype = draw(st.sampled_from(kv_dtypes))
    layout = draw(st.sampled_from(layouts))
    cache = Spec(
        seq_lens=(0, 100),
        kv_dtype=kv_dtype,
        layout=layout,
        head_dim=draw(st.sampled_from([16, 32, 48, 128])),
        num_kv_heads=draw(st.integers(1, 3)),
        block_size=draw(st.sampled_from(BLOCK_SIZES[layout][:-1])),
        strides=draw(st.sampled_from(strides)),
        kv_scales=draw(st.sampled_from([None, "scalar", "per head"])) if FORMATS[kv_dtype].scale == "call" else None,
        seed=draw(st.integers(0, 2**16)),
    )
    token_dtype = draw(st.sampled_from(FORMATS[kv_dtype].takes)).name
    return WriteSpec(cache, token_dtype, draw(st.integers(0, 40)), draw(st.booleans()))


def build_write(spec: WriteSpec) -> WriteProblem:
    """Make the arrays of a spec, with negative slots for a fifth of the tokens."""
    problem = build(spec.cache)
    k, v = tokens(spec.num_tokens, spec.cache, spec.token_dtype, spec.cache.seed)
    rng = np.random.default_rng(spec.cache.seed)
    slots = rng.permutation(len(problem.k_cache) * spec.cache.block_size)[: spec.num_tokens]
    slots[rng.random(spec.num_tokens) < 0.2] = -1 - rng.integers(2**40)
    if spec.backwards:
        k, v = k[::-1, ::-1], v[::-1, ::-1]
    names = ("layout", "kv_dtype", "k_scale", "v_scale", "k_scales", "v_scales")
    options = {name: problem.options.get(name) for name in names}
    return WriteProblem(k, v, problem, slots, options)


def tokens(count: int, spec: Spec, dtype: str = "float32", seed: int = 0) -> Array:
    """Draw k and v (count, Hkv, D) that need rounding and exceed the range of fp8."""
    rng = np.random.default_rng(seed)
    shape = (2, count, spec.num_kv_heads, spec.head_dim)
    x = rng.standard_normal(shape, np.float32) * 10.0 ** rng.uniform(-4, 3, shape).astype(np.float32)
    x.flat[: min(3, x.size)] = (np.nan, -np.nan, -0.0)[: min(3, x.size)]
    with np.errstate(over="ignore"):
        return x.astype(FLOATS[dtype])
