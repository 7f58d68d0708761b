"""The error rule of results."""

import numpy as np
import pytest

from pagedkv.testing import error_bound


@pytest.mark.parametrize(("largest", "small"), [(0, 1e-5), (-8, 1e-5), (16, 2e-5), (-32, 4e-5)])
def test_large_results_may_be_off_in_proportion(largest, small):
    exact, off = np.array([0.5, largest]), np.array([0, 1e-3])
    assert error_bound(exact, exact) == pytest.approx(small)
    assert error_bound(exact, exact + off) == pytest.approx(2e-3 + small)
    assert error_bound(exact, exact + off, factor=3) == pytest.approx(3e-3 + small)


def test_no_result_may_be_off():
    assert error_bound(np.empty(0), np.empty(0)) == pytest.approx(1e-5)
