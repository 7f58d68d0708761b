"""Calls of the public operations on problems, and what is checked of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..operations.attention import decode_attention, prefill_attention
from .problems import Problem

Array = np.ndarray[Any, Any]


def run(problem: Problem, **changes: Any) -> tuple[Array, Array]:
    """(out, lse) of the public operation, and that it wrote its rows of `out` and nothing beside them."""
    problem.out_buffer[...] = np.nan
    operation = decode_attention if problem.query_starts is None else prefill_attention
    out, lse = operation(*problem.args, **{**problem.options, **changes}, out=problem.out, return_lse=True)
    assert out is problem.out
    assert lse.dtype == np.float32
    assert lse.shape == out.shape[:2]
    written = out[: problem.num_written].copy()
    problem.out[: problem.num_written] = np.nan
    assert np.isnan(problem.out_buffer.astype(np.float32)).all(), "written outside of the rows of out"
    return written, lse[: problem.num_written]
