"""The error rule: how far from the reference a result may be."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from .. import reference
from ..layouts import INT8_MAX
from .problems.attention import FLOATS, Problem

Array = np.ndarray[Any, Any]


def expect(problem: Problem, round_to: Any = None) -> tuple[Array, Array]:
    """Compute (out, lse) of a problem with :mod:`pagedkv.reference`, in float64.

    Parameters
    ----------
    problem : Problem
    round_to : dtype, optional
        Compute with float32 sums, and round scores, probabilities and output to this dtype.

    Examples
    --------
    >>> from pagedkv.testing import Spec, build, expect
    >>> problem = build(Spec(seq_lens=(5, 3)))
    >>> out, lse = expect(problem)
    >>> out.shape, out.dtype.name
    ((2, 4, 64), 'float64')
    """
    operation = reference.decode_attention if problem.query_starts is None else reference.prefill_attention
    out, lse = operation(*problem.args, **problem.options, return_lse=True, round_to=round_to)
    return out[: problem.num_written], lse[: problem.num_written]


def error_bound(exact: Array, rounded: Array, factor: float = 2) -> float:
    """The largest allowed error: `factor` times that of dense attention in q's dtype, plus 1e-5.

    If results exceed 8, it is 1e-5 for each 8 of the largest, since sums in float32 round in proportion: the sum of 512
    values of 16 may be off by 1.5e-5 in one order and by 4e-7 in another.

    Parameters
    ----------
    exact, rounded : array
        Results of `expect` without and with `round_to`.
    factor : float

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv.testing import error_bound
    >>> exact, rounded = np.array([1.0, 2.0]), np.array([1.0, 2.25])
    >>> error_bound(exact, rounded) == 2 * 0.25 + 1e-5
    True
    """
    small = 1e-5 * max(1.0, np.abs(exact).max(initial=0.0) / 8)
    return float(factor * np.abs(rounded - exact).max(initial=0.0) + small)


def assert_close(
    problem: Problem, out: Array, lse: Array | None, *, factor: float = 2, lse_dtype: str = "float32"
) -> None:
    """Compare a result with the reference: within the error bound, and exactly for rows without keys.

    The bound is that of `error_bound`, for dense attention whose scores, probabilities and output are rounded to q's
    dtype; in float32 with ALiBi biases beyond 100 it is 2.5 times as large. Beside an int8 cache, a row of q may be
    rounded to 16-bit integers, and so may the probabilities times the scales of their values, of 16 tokens at a time;
    in prefill these may be rounded to q's dtype.

    Parameters
    ----------
    problem : Problem
    out : (rows, num_heads, head_dim) array
        The rows of the queries, without padding.
    lse : (rows, num_heads) array or None
        None to compare `out` alone.
    factor : float
    lse_dtype : str
        "float32" if the LSE must be as good as one of float32 sums, whatever q's dtype; otherwise "q".

    Raises
    ------
    AssertionError
        An error exceeds the bound, or a row without keys is not 0.

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv.testing import Spec, assert_close, build, expect
    >>> problem = build(Spec(seq_lens=(5, 3)))
    >>> out, lse = (x.astype(np.float32) for x in expect(problem))
    >>> assert_close(problem, out, lse)
    """
    spec = problem.spec
    biased = spec.alibi and max(spec.seq_lens, default=0) * problem.options["alibi_slopes"].max() > 100
    exact, exact_lse = expect(problem)
    coarse = _with_q_of_integers(problem) if spec.has_scales else problem
    rounded, rounded_lse = expect(coarse, np.float32)
    if spec.q_dtype != "float32":
        rounded, narrow_lse = expect(problem, FLOATS[spec.q_dtype])
        rounded_lse = rounded_lse if lse_dtype == "float32" else narrow_lse
    errors = np.abs(out.astype(np.float64) - exact)
    bound = error_bound(exact, rounded, factor * 2.5 if biased and spec.q_dtype == "float32" else factor)
    if spec.has_scales:  # half a unit of each of 16 products of largest probability and value, at random
        unit = 2.0**-14
        if spec.query_lens is not None and spec.q_dtype != "float32":  # or of one product, in q's dtype
            unit = max(unit, float(ml_dtypes.finfo(FLOATS[spec.q_dtype]).eps) / 2)
        bound += unit * max((np.nanmax(scales, initial=0.0) * INT8_MAX for *_, scales in problem.contents), default=0.0)
    error = errors.max(initial=0.0)  # NaN stays, and fails
    assert error <= bound, _at_fault(problem, "out", out, exact, errors, bound)
    empty = exact_lse == -np.inf
    assert (out[empty] == 0).all(), "a row that sees no key must be 0"
    if lse is None:
        return
    np.testing.assert_array_equal(lse == -np.inf, empty, err_msg="where the LSE is -inf")
    errors = np.abs(np.where(empty, 0, lse.astype(np.float64) - np.where(empty, 0, exact_lse)))
    rounding = np.abs(rounded_lse[~empty] - exact_lse[~empty]).max(initial=0.0)
    bound = (factor * 2.5 if biased else factor) * rounding + 1e-5 + 1e-6 * np.abs(exact_lse[~empty]).max(initial=0.0)
    assert errors.max(initial=0.0) <= bound, _at_fault(problem, "lse", lse, exact_lse, errors, bound)


def _with_q_of_integers(problem: Problem) -> Problem:
    """The problem with rows of q as 16-bit integers, the largest of each 32,767."""
    q = problem.q.astype(np.float32)
    unit = np.abs(q).max(axis=-1, keepdims=True) / 32767
    return dataclasses.replace(problem, q=np.rint(q / np.where(unit > 0, unit, 1)) * unit)


def _at_fault(problem: Problem, name: str, got: Array, expected: Array, errors: Array, bound: float) -> str:
    """Describe how many numbers are wrong, and the first of them."""
    wrong = ~(errors <= bound)
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    starts = np.arange(len(problem.seq_lens) + 1) if problem.query_starts is None else problem.query_starts
    seq = int(np.searchsorted(starts, at[0], side="right")) - 1
    where = ", ".join(f"{word} {i}" for word, i in zip(("row", "head", "dim"), at, strict=False))
    return (
        f"{name} is off at {int(wrong.sum())} of {wrong.size} places by more than {bound:.2g}, first at {where} "
        f"(sequence {seq} of {problem.seq_lens[seq]} tokens): {float(got[at]):.6g}, expected {float(expected[at]):.6g}"
    )
