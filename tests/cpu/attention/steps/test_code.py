"""The vector operations against NumPy, and the edges of exp."""

import numpy as np
import pytest
from numba import njit

from pagedkv.cpu.attention.steps import code as steps_code
from pagedkv.cpu.attention.steps.code import FLOAT, INT32, SHORT, Code, step, vector


def called(emit, *arguments):
    """Run a step on the addresses of arrays, and on integers."""
    function = step(emit)

    @njit
    def call(arguments):
        function(*arguments)

    call(tuple(x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments))


def _exp_of(values):
    padded = np.resize(np.asarray(values, np.float32), -(-len(values) // 16) * 16)
    result = np.empty_like(padded)

    def emit(code: Code, target, source, count):
        def turn(i):
            at = code.times(i, 64)
            code.store(code.exp(code.load(code.builder.add(source, at), vector(16))), code.builder.add(target, at))

        code.repeatedly(count, turn)

    called(emit, result, padded, padded.size // 16)
    return result[: len(values)]


def test_exp_is_within_two_units_in_the_last_place():
    values = np.concatenate([np.linspace(-87.29, 0, 200_000), -np.logspace(-30, 0, 1000)]).astype(np.float32)
    expected = np.exp(values.astype(np.float64))
    assert np.max(np.abs(_exp_of(values) - expected) / np.spacing(expected.astype(np.float32))) <= 2


def test_exp_of_zero_is_one_and_nothing_underflows_to_a_subnormal():
    assert _exp_of([0.0, -0.0]).tolist() == [1.0, 1.0]
    assert _exp_of([-np.inf, -1e30, -104.0, -87.31]).tolist() == [0.0] * 4
    assert np.isnan(_exp_of([np.nan, -np.nan])).all()


def test_arithmetic_and_shuffles():
    def emit(code: Code, result, a, b):
        x, y = code.load(a, vector(16)), code.load(b, vector(16))
        first = code.splat(code.load(b, FLOAT), 16)
        code.store(code.fma(x, y, first), result)
        code.store(code.larger(x, y), result, 64)
        code.store(code.joined([code.shuffle(v, range(0, 16, 2)) for v in (x, y)]), result, 128)
        code.store(code.repeat(code.shuffle(x, (3, 5)), 16), result, 192)
        code.store(code.halve(x, code.builder.fadd, 2), result, 256)
        code.store(code.lane(code.pair(code.lane(x, 7), code.lane(y, 9)), 1), result, 264)

    a, b = np.random.default_rng(0).integers(-50, 50, (2, 16)).astype(np.float32)
    result = np.empty(67, np.float32)
    called(emit, result, a, b)
    expected = [
        *(a * b + b[0], np.maximum(a, b), np.concatenate([a[::2], b[::2]])),
        *(np.resize(a[[3, 5]], 16), a.reshape(8, 2).sum(0), b[9:10]),
    ]
    np.testing.assert_array_equal(result, np.concatenate(expected))


def test_larger_is_the_second_one_beside_nan():
    def emit(code: Code, result, a, b):
        code.store(code.larger(code.load(a, vector(4)), code.load(b, vector(4))), result)

    a, b = np.array([[np.nan, 1, -np.inf, 2], [3, np.nan, -np.inf, 1]], np.float32)
    result = np.empty(4, np.float32)
    called(emit, result, a, b)
    np.testing.assert_array_equal(result, np.array([3, np.nan, -np.inf, 2], np.float32))


@pytest.mark.parametrize("features", [["avx512bw"], ["avx2"], []], ids=["AVX-512", "AVX2", "none"])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_products_of_int16_are_added_exactly_by_any_instructions(monkeypatch, features, lanes):
    if not all(map(steps_code._has, features)):
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(steps_code, "_has", lambda feature: feature in features)

    def emit(code: Code, result, x, y, sums):
        operands = (code.load(address, vector(lanes, INT32)) for address in (x, y, sums))
        code.store(code.add_products(*operands), result)

    rng = np.random.default_rng(lanes)
    x, y = rng.integers(-32767, 32768, 2 * lanes).astype(np.int16), rng.integers(-128, 128, 2 * lanes).astype(np.int16)
    x[:2], y[:2] = -32767, -128
    sums, result = rng.integers(-(2**30), 2**30, lanes).astype(np.int32), np.empty(lanes, np.int32)
    called(emit, result, x, y, sums)
    np.testing.assert_array_equal(result, sums + (x.astype(np.int32) * y).reshape(lanes, 2).sum(1))


def test_numbers_are_rounded_to_int16_against_their_largest():
    def emit(code: Code, shorts, unit, x):
        numbers = code.load(x, vector(16))
        to_short, from_short = code.shares(code.halve(code.magnitudes(numbers), code.greater, 1))
        scaled = code.builder.fmul(numbers, code.repeat(to_short, 16))
        code.store(code.builder.trunc(code.shorts(scaled), vector(16, SHORT)), shorts)
        code.store(from_short, unit)

    drawn = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    for x in (drawn, -abs(drawn), drawn * np.float32(1e38 / abs(drawn).max()), drawn * np.float32(1e-30)):
        shorts, unit = np.empty(16, np.int16), np.empty(1, np.float32)
        called(emit, shorts, unit, x)
        assert abs(shorts).max() == 32767
        largest = np.float64(abs(x).max())
        np.testing.assert_allclose(unit, largest / 32767, rtol=3e-7)
        assert (abs(shorts * largest / 32767 - x) <= 0.501 * largest / 32767).all()
    for number, expected in ((0.0, 0), (1e-40, 0), (np.inf, np.inf), (-np.inf, np.inf), (np.nan, np.nan)):
        called(emit, shorts, unit, np.where(np.arange(16) == 5, np.float32(number), 0))
        np.testing.assert_allclose(unit, expected, atol=2.0**-124)


def test_loops_carry_values_and_may_be_empty():
    def emit(code: Code, result, count):
        one = code.constant(1.0, 4)
        (total,) = code.loop(count, [one], lambda i, values: [code.builder.fadd(values[0], values[0])])
        code.store(total, result)

    for count in (0, 1, 5):
        result = np.empty(4, np.float32)
        called(emit, result, count)
        assert result.tolist() == [2.0**count] * 4
