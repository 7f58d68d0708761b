"""float16 by integers, as on a processor without instructions for it, against NumPy."""

import numpy as np
import pytest
from numba import njit

from pagedkv.cpu.attention.steps import halves
from pagedkv.cpu.attention.steps.code import SHORT, step, vector

LANES = 8
HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)


@pytest.fixture(autouse=True)
def _without_instructions(monkeypatch):
    monkeypatch.setattr(halves, "has_halves", lambda: False)


def converted(convert, x, element, dtype):
    """All of x, LANES at a time."""

    def emit(code, source, target):
        code.store(convert(code, code.load(source, vector(LANES, *element))), target)

    function = step(emit)

    @njit
    def call(source, target, count, item, wide):
        for i in range(count):
            function(source + i * item, target + i * wide)

    found = np.empty(x.size, dtype)
    call(x.ctypes.data, found.ctypes.data, x.size // LANES, LANES * x.itemsize, LANES * found.itemsize)
    return found


def assert_same(found, expected):
    np.testing.assert_array_equal(found, expected)
    assert ((np.signbit(found) == np.signbit(expected)) | np.isnan(expected)).all()


def test_every_float16_is_widened():
    assert_same(converted(halves.from_half, HALVES, (SHORT,), np.float32), HALVES.astype(np.float32))


def test_every_float32_between_two_of_float16_is_rounded_to_even():
    with np.errstate(over="ignore"):
        exact = HALVES[~np.isnan(HALVES)].astype(np.float32)
        between = (exact.astype(np.float64) + np.nextafter(HALVES[~np.isnan(HALVES)], np.float16(0)).astype(float)) / 2
        ties = np.concatenate([exact, between.astype(np.float32), np.float32([65519.996, 65520, 3e38, -65520, 1e-8])])
        beside = [np.nextafter(ties, np.float32(sign * np.inf)) for sign in (-1, 1)]
        numbers = np.concatenate([ties, *beside, np.float32([np.nan, -np.nan, 1e-40, -0.0])])
        numbers = np.resize(numbers, -(-numbers.size // LANES) * LANES)
        expected = numbers.astype(np.float16)
    assert_same(converted(halves.to_half, numbers, (), np.uint16).view(np.float16), expected)
