"""The problems of `pagedkv.testing`, and what only the tests of this package do with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagedkv.testing.calls import run
from pagedkv.testing.error_rule import assert_close, error_bound, expect
from pagedkv.testing.problems.attention import FLOATS, POISONS, Problem, Spec, build, in_layout

if TYPE_CHECKING:
    import torch

__all__ = [
    "FLOATS",
    "POISONS",
    "Problem",
    "Spec",
    "as_torch",
    "assert_close",
    "build",
    "error_bound",
    "expect",
    "in_layout",
    "move_past_2_31_elements",
    "run",
]


def move_past_2_31_elements(problem: Problem) -> None:
    """Move an fp8 problem's blocks to the end of caches of more than 2**31 elements.

    Only these blocks are ever touched, so that the rest of the caches takes no memory.
    """
    used = np.arange(problem.block_tables.shape[1]) < -(-problem.seq_lens[:, None] // problem.spec.block_size)
    num_blocks = 2**31 // problem.k_cache[0].size + 1 + len(problem.k_cache)
    first = num_blocks - len(problem.k_cache)
    problem.block_tables = np.where(used, problem.block_tables + np.int32(first) * used, problem.block_tables)
    for name in ("k_cache", "v_cache"):
        small = getattr(problem, name)
        large = np.empty((num_blocks, *small.shape[1:]), np.uint8)
        assert first * large.strides[0] >= 2**31
        large[first:] = small
        setattr(problem, name, large)


def as_torch(x: np.ndarray) -> torch.Tensor:
    """A torch tensor of the same bits: a copy, for torch warns about read-only arrays."""
    import torch

    if x.dtype == FLOATS["bfloat16"]:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())
