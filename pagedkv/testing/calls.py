"""Calls of the public operations on problems, with the checks of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import reference
from ..operations.attention import decode_attention, merge_states, prefill_attention
from ..operations.caches import write_kv
from .problems.attention import FLOATS, Problem
from .problems.merges import MergeSpec, states
from .problems.writes import WriteSpec, build_write

Array = np.ndarray[Any, Any]
# The error of one or two roundings of a weighted mean.
STEPS = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def run(problem: Problem, **changes: Any) -> tuple[Array, Array]:
    """Run the public operation and return (out, lse); check that it wrote only its rows of `out`."""
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


def check_merge(spec: MergeSpec, **changes: Any) -> None:
    """Compare merged states with the reference."""
    outs, lses = states(spec.seed, spec.num_states, spec.dtype, spec.shape)
    given = (list(outs), list(lses)) if spec.as_list else (outs, lses)
    out, lse = merge_states(*given, **changes)
    exact, exact_lse = reference.merge_states(outs, lses)
    assert out.dtype == FLOATS[spec.dtype]
    assert lse.dtype == np.float32
    np.testing.assert_array_equal(lse == -np.inf, exact_lse == -np.inf)
    assert (out[exact_lse == -np.inf] == 0).all()
    some = exact_lse > -np.inf
    np.testing.assert_allclose(lse[some], exact_lse[some], rtol=1e-6, atol=1e-6)
    step = STEPS[spec.dtype]
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=step, atol=step)


def check_write(spec: WriteSpec, **changes: Any) -> None:
    """Compare every bit of the caches with the reference: written slots, skipped ones, and all others."""
    write = build_write(spec)
    given, options = (write.k, write.v, write.slots), write.options
    expected = {name: x.copy() for name, x in write.problem.caches.items()}
    before = [x.tobytes() for x in given]
    reference.write_kv(write.k, write.v, slots=write.slots, **{**options, **expected})
    write_kv(write.k, write.v, slots=write.slots, **{**options, **write.problem.caches, **changes})
    for name, cache in write.problem.caches.items():
        np.testing.assert_array_equal(_bits(cache), _bits(expected[name]), err_msg=name)
    assert [x.tobytes() for x in given] == before, "an argument was written to"


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")
