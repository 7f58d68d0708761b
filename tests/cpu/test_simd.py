"""The vector operations against NumPy: every code of every 8- and 16-bit format, and the edges of exp."""

import ml_dtypes
import numpy as np
import pytest
from numba import njit

from pagedkv.cpu.simd import (
    add,
    broadcast,
    exp,
    fetch_add,
    fma,
    keep,
    load,
    maximum,
    multiply,
    part,
    splat,
    store,
    totals,
)
from pagedkv.cpu.simd import total as sum_lanes

FORMATS = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def _all_codes(kind):
    dtype = FORMATS[kind]
    return np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("lanes", [1, 8, 64])
def test_load_widens_every_code(kind, lanes):
    item = FORMATS[kind].itemsize

    @njit
    def widen(source, target, count):
        for i in range(0, count, lanes):
            store(target + i * 4, load(source + i * item, kind, lanes))

    codes = _all_codes(kind)
    widened = np.full(codes.size, np.nan, np.float32)
    widen(codes.ctypes.data, widened.ctypes.data, codes.size)
    expected = codes.astype(np.float32)
    np.testing.assert_array_equal(widened, expected)
    zeros = expected == 0
    np.testing.assert_array_equal(np.signbit(widened[zeros]), np.signbit(expected[zeros]))


def test_load_refuses_an_unknown_kind():
    @njit
    def widen(source):
        return sum_lanes(load(source, "int8", 8))

    with pytest.raises(Exception, match="int8"):
        widen(0)


@njit
def _exp(source, target, count):
    for i in range(0, count, 16):
        store(target + i * 4, exp(load(source + i * 4, "float32", 16)))


def _exp_of(values):
    padded = np.resize(np.asarray(values, np.float32), -(-len(values) // 16) * 16)
    result = np.empty_like(padded)
    _exp(padded.ctypes.data, result.ctypes.data, padded.size)
    return result[: len(values)]


def test_exp_is_within_two_units_in_the_last_place():
    values = np.concatenate([np.linspace(-87.29, 0, 200_000), -np.logspace(-30, 0, 1000)]).astype(np.float32)
    expected = np.exp(values.astype(np.float64))
    assert np.max(np.abs(_exp_of(values) - expected) / np.spacing(expected.astype(np.float32))) <= 2


def test_exp_of_zero_is_one_and_nothing_underflows_to_a_subnormal():
    assert _exp_of([0.0, -0.0]).tolist() == [1.0, 1.0]
    assert _exp_of([-np.inf, -1e30, -104.0, -87.31]).tolist() == [0.0] * 4
    assert np.isnan(_exp_of([np.nan, -np.nan])).all()


def test_arithmetic_and_reductions():
    @njit
    def run(a, b, result):
        x, y = load(a, "float32", 16), load(b, "float32", 16)
        store(result, add(fma(x, y, splat(np.float32(1), 16)), multiply(x, broadcast(b, 16))))
        store(result + 64, part(x, 4, 4))
        return sum_lanes(x), maximum(x)

    rng = np.random.default_rng(0)
    a, b = rng.integers(-50, 50, (2, 16)).astype(np.float32)
    result = np.empty(20, np.float32)
    assert run(a.ctypes.data, b.ctypes.data, result.ctypes.data) == (a.sum(), a.max())
    np.testing.assert_array_equal(result[:16], a * b + 1 + a * b[0])
    np.testing.assert_array_equal(result[16:], a[4:8])


def test_maximum_passes_nan_over():
    @njit
    def run(a):
        return maximum(load(a, "float32", 8))

    values = np.array([np.nan, -3, np.nan, 7, -np.inf, 2, np.nan, 1], np.float32)
    assert run(values.ctypes.data) == 7
    assert np.isnan(run(np.full(8, np.nan, np.float32).ctypes.data))


@pytest.mark.parametrize("lanes", [8, 16, 32])
def test_totals_keep_the_order_of_their_arguments(lanes):
    @njit
    def run(matrix, result):
        row = lanes * 4
        a, b = load(matrix, "float32", lanes), load(matrix + row, "float32", lanes)
        c, d = load(matrix + 2 * row, "float32", lanes), load(matrix + 3 * row, "float32", lanes)
        e, f = load(matrix + 4 * row, "float32", lanes), load(matrix + 5 * row, "float32", lanes)
        g, h = load(matrix + 6 * row, "float32", lanes), load(matrix + 7 * row, "float32", lanes)
        store(result, totals(a, b, c, d, e, f, g, h))

    matrix = np.random.default_rng(1).integers(-99, 99, (8, lanes)).astype(np.float32)
    result = np.empty(8, np.float32)
    run(matrix.ctypes.data, result.ctypes.data)
    np.testing.assert_array_equal(result, matrix.sum(axis=1))


@pytest.mark.parametrize(("start", "stop"), [(0, 16), (0, 0), (3, 9), (15, 16), (-5, 40)])
def test_keep_selects_and_does_not_multiply(start, stop):
    @njit
    def run(source, result, start, stop):
        store(result, keep(load(source, "float32", 16), start, stop, np.float32(-1)))

    source, result = np.full(16, np.nan, np.float32), np.empty(16, np.float32)
    run(source.ctypes.data, result.ctypes.data, start, stop)
    inside = (np.arange(16) >= start) & (np.arange(16) < stop)
    np.testing.assert_array_equal(np.isnan(result), inside)
    assert (result[~inside] == -1).all()


def test_fetch_add_returns_what_was_there():
    @njit
    def run(address):
        return fetch_add(address), fetch_add(address)

    counter = np.array([40], np.int64)
    assert run(counter.ctypes.data) == (40, 41)
    assert counter[0] == 42
