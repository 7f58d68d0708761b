"""Problems of merge_states: partial results, some of them without keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import numpy as np

from .attention import FLOATS

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class MergeSpec:
    """The number, dtype and shape (rows, num_heads, head_dim) of states, in a list or stacked."""

    dtype: str = "float32"
    num_states: int = 2
    shape: tuple[int, int, int] = (5, 3, 16)
    as_list: bool = False
    seed: int = 0


@st.composite
def merge_specs(draw: st.DrawFn, head_dims: tuple[int, ...] = (8, 16, 64, 80)) -> MergeSpec:
    """Draw merges of up to five states."""
    shape = (draw(st.integers(0, 5)), draw(st.integers(1, 4)), draw(st.sampled_from(head_dims)))
    return MergeSpec(
        draw(st.sampled_from(list(FLOATS))),
        draw(st.integers(1, 5)),
        shape,
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
    )


def states(seed: int, count: int, dtype: str = "float32", shape: tuple[int, ...] = (5, 3, 16)) -> tuple[Array, Array]:
    """Make partial results, a third of them without keys."""
    rng = np.random.default_rng(seed)
    lses = (10 * rng.standard_normal((count, *shape[:-1]))).astype(np.float32)
    lses[rng.random(lses.shape) < 1 / 3] = -np.inf
    outs = rng.standard_normal((count, *shape)).astype(FLOATS[dtype])
    outs[lses == -np.inf] = 0
    return outs, lses
