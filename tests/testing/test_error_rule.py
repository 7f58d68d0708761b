"""The error rule of results."""

import numpy as np
import pytest

from pagedkv import reference
from pagedkv.testing import Spec, assert_close, build, error_bound, expect


@pytest.mark.parametrize(("largest", "small"), [(0, 1e-5), (-8, 1e-5), (16, 2e-5), (-32, 4e-5)])
def test_large_results_may_be_off_in_proportion(largest, small):
    exact, off = np.array([0.5, largest]), np.array([0, 1e-3])
    assert error_bound(exact, exact) == pytest.approx(small)
    assert error_bound(exact, exact + off) == pytest.approx(2e-3 + small)
    assert error_bound(exact, exact + off, factor=3) == pytest.approx(3e-3 + small)


def test_no_result_may_be_off():
    assert error_bound(np.empty(0), np.empty(0)) == pytest.approx(1e-5)


def integers(x, most):
    """Rows x as whole numbers of a unit, `most` of which make the largest of a row."""
    unit = np.abs(x).max(axis=-1, keepdims=True) / most
    return np.rint(x / unit) * unit


@pytest.mark.parametrize(("most", "is_close"), [(32767, True), (127, False)])
@pytest.mark.parametrize("name", ["q", "probabilities"])
def test_beside_int8_rows_q_and_probabilities_may_be_integers_of_16_bits(name, most, is_close):
    """The largest of q is that of a row; of the probabilities times the scales of values, that of 16 tokens."""
    problem = build(Spec(seq_lens=(320,), kv_dtype="int8", num_kv_heads=1, group_size=1))
    stored = {name: problem.options[name] for name in ("kv_dtype", "k_scales", "v_scales")}
    k, v = reference.gather_kv(problem.k_cache, problem.v_cache, problem.block_tables[0], 320, **stored)
    exact, lse = expect(problem)
    q, scales = problem.q[0, 0].astype(np.float64), np.abs(v[:, 0]).max(axis=1) / 127
    weights = np.exp(k[:, 0] @ (integers(q, most) if name == "q" else q) / 8 - lse[0, 0])
    if name == "probabilities":
        weights = integers((weights * scales).reshape(-1, 16), most).ravel() / scales
    out = np.broadcast_to((weights @ v[:, 0]).astype(np.float32), exact.shape)
    if is_close:
        assert_close(problem, out, None)
        return
    with pytest.raises(AssertionError, match="out is off at"):
        assert_close(problem, out, None)
