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
    "move_blocks",
    "run",
]


def move_blocks(problem: Problem, first: int) -> None:
    """Move a problem's blocks behind so many others, which no test touches, so that they take no memory."""
    used = np.arange(problem.block_tables.shape[1]) < -(-problem.seq_lens[:, None] // problem.spec.block_size)
    problem.block_tables = np.where(used, problem.block_tables + np.int32(first) * used, problem.block_tables)

    def moved(small: np.ndarray) -> np.ndarray:
        large = np.empty((first + len(small), *small.shape[1:]), small.dtype)
        large[first:] = small
        return large

    problem.k_cache, problem.v_cache = moved(problem.k_cache), moved(problem.v_cache)
    problem.options.update((name, moved(x)) for name, x in problem.options.items() if name in ("k_scales", "v_scales"))


def as_torch(x: np.ndarray) -> torch.Tensor:
    """A torch tensor of the same bits: a copy, for torch warns about read-only arrays."""
    import torch

    if x.dtype == FLOATS["bfloat16"]:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())
