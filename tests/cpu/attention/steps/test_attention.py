"""Dots, softmax, values and merging, each against NumPy, and that groups of rows and registers change no bit."""

from functools import cache

import numpy as np
import pytest

from pagedkv.cpu.attention.steps import dots, values
from pagedkv.cpu.attention.steps.code import LANES, STEP, TILE, VALUE_STEP
from pagedkv.cpu.attention.steps.softmax import make_merge_state, make_rescale, make_softmax
from pagedkv.cpu.attention.steps.tile_pass import PassConfig, make_add_values, make_score_keys
from pagedkv.cpu.attention.steps.widen import PAIR

from .stepper import grouped, pass_over, stepper

PLACES = 48
RNG = np.random.default_rng(0)


@pytest.fixture(params=[16, 4], ids=["32 registers", "16 registers"])
def registers(request, monkeypatch):
    for module in (dots, values):
        monkeypatch.setattr(module, "num_accumulators", lambda: request.param)


@cache
def step_of(make, group_rows, registers):
    """A pass over a tile, compiled once for each size of a group and number of registers."""
    return stepper(make(PassConfig("float32", group_rows, whole=True, staged=False)))


def dot_products(q, keys, num_groups, group_rows):
    scores = np.full((num_groups, TILE, group_rows), np.nan, np.float32)
    run = step_of(make_score_keys, group_rows, dots.num_accumulators())
    run(scores, grouped(q, group_rows), pass_over(keys[:, None], num_groups))
    assert np.isnan(scores[:, STEP:]).all()
    return scores[:, :STEP].transpose(0, 2, 1).reshape(-1, STEP)


@pytest.mark.usefixtures("registers")
def test_dot_products_have_the_same_bits_in_any_group():
    q, keys = RNG.standard_normal((8, PLACES), np.float32), RNG.standard_normal((STEP, PLACES), np.float32)
    exact = q.astype(np.float64) @ keys.T
    found = dot_products(q, keys, 2, 4)
    np.testing.assert_allclose(found, exact, atol=1e-5)
    for row in range(8):
        alone = dot_products(q[row : row + 1], keys, 1, 1)
        np.testing.assert_array_equal(alone[0], found[row])
    np.testing.assert_array_equal(dot_products(q[4:], keys, 1, 4), found[4:])


@pytest.mark.usefixtures("registers")
def test_dots_are_rounded_in_their_order():
    q = RNG.integers(-(2**12), 2**12, (1, PLACES)).astype(np.float32)
    keys = RNG.integers(-(2**12), 2**12, (STEP, PLACES)).astype(np.float32)
    sums = np.zeros((8, STEP), np.float32)
    for place in range(PLACES):  # the products, and their sums with others, are exact in float64
        product = q[0, place].astype(np.float64) * keys[:, place]
        sums[place % 8] = (sums[place % 8] + product).astype(np.float32)
    four = sums[:4] + sums[4:]
    expected = (four[0] + four[1]) + (four[2] + four[3])
    assert (expected != (q.astype(np.float64) @ keys.T)[0]).any()
    np.testing.assert_array_equal(dot_products(q, keys, 1, 1)[0], expected)


def weighted_sums(acc, weights, rows, num_groups, group_rows):
    acc = acc.copy()
    run = step_of(make_add_values, group_rows, values.num_accumulators())
    run(acc, weights, pass_over(rows[:, None], num_groups))
    return acc


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("count", [1, 5, 2 * STEP + 3])
def test_values_are_added_token_after_token(count):
    acc = RNG.standard_normal((8, PLACES), np.float32)
    weights = RNG.uniform(0, 1, (2, TILE, 4)).astype(np.float32)
    rows = RNG.standard_normal((count, PLACES), np.float32)
    of_row = weights.transpose(0, 2, 1).reshape(8, TILE)
    exact = acc + of_row[:, :count].astype(np.float64) @ rows
    found = weighted_sums(acc, weights, rows, 2, 4)
    np.testing.assert_allclose(found, exact, atol=1e-5)
    for row in range(8):
        mine = np.ascontiguousarray(of_row[row])
        alone = weighted_sums(acc[row : row + 1], mine, rows, 1, 1)
        np.testing.assert_array_equal(alone[0], found[row])


@cache
def softmax(group_rows, masked):
    return stepper(make_softmax(group_rows, masked=masked, rounded=False))


def softmax_of(logits, maximum, total, seen=None):
    """Weights (rows, TILE) and the state after them, of rows that see the positions from and to `seen`, or all."""
    group_rows = len(logits)
    scores = np.ascontiguousarray(logits.T)
    maximum, total, factor = maximum.copy(), total.copy(), np.empty_like(maximum)
    starts, stops = np.zeros((2, group_rows), np.int32) if seen is None else np.array(seen, np.int32)
    run = softmax(group_rows, seen is not None)
    run(scores, maximum, total, factor, starts, stops, 1000, 0)
    return scores.T, maximum, total, factor


@pytest.mark.parametrize("seen", [None, ([900, 1003, 1010, 1064], [2000, 1050, 1011, 1064])])
def test_softmax_is_online(seen):
    logits = 3 * RNG.standard_normal((4, TILE)).astype(np.float32)
    before, total = np.array([-np.inf, 0.5, 50, 1.5], np.float32), np.array([0, 2, 3, 1], np.float32)
    weights, maximum, sums, factor = softmax_of(logits, before, total, seen)
    if seen is not None:
        position = 1000 + np.arange(TILE)
        start, stop = np.array(seen)[:, :, None]
        logits = np.where((position >= start) & (position < stop), logits, np.float32(-np.inf))
    after = np.maximum(before, logits.max(1))
    np.testing.assert_array_equal(maximum, after)
    exact = np.exp(logits.astype(np.float64) - after[:, None])
    np.testing.assert_allclose(weights, exact, rtol=1e-5)
    np.testing.assert_allclose(factor, np.exp(before.astype(np.float64) - after), rtol=1e-6)
    np.testing.assert_allclose(sums, total * np.exp(before.astype(np.float64) - after) + exact.sum(1), rtol=1e-6)
    for row in range(4):
        alone = softmax_of(
            logits[row : row + 1],
            before[row : row + 1],
            total[row : row + 1],
            seen and np.array(seen)[:, row : row + 1],
        )
        for mine, together in zip(alone, (weights, maximum, sums, factor), strict=True):
            np.testing.assert_array_equal(mine[0], together[row])


def test_a_tile_that_a_row_does_not_see_leaves_its_state():
    logits = np.full((4, TILE), np.nan, np.float32)
    before, total = np.array([-np.inf, 0, 7, -3], np.float32), np.array([0, 1, 2, 3], np.float32)
    weights, maximum, sums, factor = softmax_of(logits, before, total, ([2000] * 4, [3000] * 4))
    assert (weights == 0).all()
    np.testing.assert_array_equal(maximum, before)
    np.testing.assert_array_equal(sums, total)
    assert (factor == 1).all()


@pytest.mark.parametrize("seen", [None, ([900, 1003, 1010, 1064], [2000, 1050, 1011, 1064])])
def test_weights_of_int8_values_are_rounded_with_their_scales(seen):
    """Those of a step against the largest of them; a scale that is NaN reaches the rows that see its token."""
    logits = 3 * RNG.standard_normal((4, TILE)).astype(np.float32)
    before, total = np.array([-np.inf, 0.5, 50, 1.5], np.float32), np.array([0, 2, 3, 1], np.float32)
    scales = RNG.uniform(0, 2, TILE).astype(np.float32)
    scales[40] = np.nan
    weights, *state = softmax_of(logits, before, total, seen)
    products = np.where(weights > 0, weights * scales, 0).reshape(4, -1, VALUE_STEP)
    expected = products.max(2) / 32767
    for group_rows in (4, 1):
        run = stepper(make_softmax(group_rows, masked=seen is not None, rounded=True))
        for first in range(0, 4, group_rows):
            mine = slice(first, first + group_rows)
            scores = np.ascontiguousarray(logits[mine].T)
            found, factor = [before[mine].copy(), total[mine].copy()], np.empty(group_rows, np.float32)
            starts, stops = np.zeros((2, group_rows), np.int32) if seen is None else np.array(seen, np.int32)[:, mine]
            run(scores, *found, factor, starts.copy(), stops.copy(), 1000, scales)
            for x, y in zip((*found, factor), state, strict=True):
                np.testing.assert_array_equal(x, y[mine])
            steps = scores.reshape(-1, VALUE_STEP, group_rows)
            factors = steps[:, VALUE_STEP // 2].T
            np.testing.assert_allclose(factors, expected[mine], rtol=1e-6, atol=2.0**-124)
            pairs = np.ascontiguousarray(steps[:, : VALUE_STEP // 2]).view(np.int16)
            pairs = pairs.reshape(-1, 2, PAIR, group_rows, 2).transpose(3, 0, 1, 4, 2)
            numbers = pairs.reshape(group_rows, -1, VALUE_STEP) * factors[..., None]
            error = abs(numbers - products[mine])
            assert (error <= 0.501 * factors[..., None])[np.isfinite(expected[mine])].all()


def merged(state, other):
    """The state (acc, maximum, total) after another one has been merged into it."""
    arrays = [np.array(x, np.float32) for x in (*state, *other)]
    stepper(make_merge_state())(*arrays, PLACES // LANES)
    return arrays[0], float(arrays[1]), float(arrays[2])


def test_merging_weighs_by_the_larger_maximum():
    a, b = RNG.standard_normal((2, PLACES), np.float32)
    for low, high in ((-1.0, 2.0), (2.0, -1.0), (0.5, 0.5)):
        acc, maximum, total = merged((a, low, 3.0), (b, high, 5.0))
        assert maximum == max(low, high)
        f, g = np.exp([low - maximum, high - maximum])
        np.testing.assert_allclose(acc, f * a + g * b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(total, 3 * f + 5 * g, rtol=1e-6)


def test_merging_into_nothing_gives_the_other_state():
    a = RNG.standard_normal(PLACES).astype(np.float32)
    acc, maximum, total = merged((np.zeros(PLACES), -np.inf, 0.0), (a, 1.5, 4.0))
    np.testing.assert_array_equal(acc, a)
    assert (maximum, total) == (1.5, 4.0)


def test_rescale_multiplies_by_the_factor():
    a, factor = RNG.standard_normal(PLACES).astype(np.float32), np.array([0.3], np.float32)
    scaled = np.empty_like(a)
    stepper(make_rescale())(scaled, a, factor, PLACES // LANES)
    np.testing.assert_array_equal(scaled, a * factor)
