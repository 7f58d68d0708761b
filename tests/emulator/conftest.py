"""Launches of the harness on each device that a kernel runs on, and how exact that device is."""

from functools import partial

import numpy as np
import pytest

from ..support.devices import emulator
from . import ptx_harness


@pytest.fixture(scope="module")
def launch(open_device):
    """`ptx_harness.launch_on` a device."""
    return partial(ptx_harness.launch_on, open_device)


@pytest.fixture(scope="module")
def run(open_device):
    """`ptx_harness.run_on` a device."""
    return partial(ptx_harness.run_on, open_device)


@pytest.fixture(scope="module")
def one(run):
    """`run` for one output array, which it returns."""
    return lambda body, inputs, dtype="u4", **options: run(body, inputs, [dtype], **options)[0]


@pytest.fixture(scope="module")
def assert_near(open_device):
    """That values differ by at most rtol of the expected ones, or atol, on a GPU: the emulator's are as NumPy's."""

    def check(actual, expected, rtol=0, atol=0):
        if open_device is emulator:
            rtol, atol = 1e-6, 0
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)

    return check


@pytest.fixture(scope="module")
def assert_sums(open_device):
    """That sums of k products, and of what they are added to, are as exact as matrix instructions are.

    The emulator's are rounded once. PTX promises no order and no rounding. Tensor cores shift the products of 4 to 16
    steps of k and what they are added to, to the exponent of the largest, cut off what is below 2**-23 of it, and cut
    off the sum (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021): at most 2 k cuts, each of less than
    2**-23 of the sum of the magnitudes.
    """

    def check(actual, expected, magnitudes, k, *, bits=23, tolerance=1e-6):
        if open_device is emulator:
            np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
        else:
            errors = np.abs(actual.astype(np.float64) - expected)
            np.testing.assert_array_less(errors, 2 * k * 2.0**-bits * magnitudes + 2.0**-149)

    return check
