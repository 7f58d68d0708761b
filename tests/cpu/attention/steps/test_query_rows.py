"""Rows of q on their way in and of the result on their way out, against NumPy."""

from functools import cache

import numpy as np
import pytest

from pagedkv.cpu.attention.steps.query_rows import make_load_query, make_round_query, make_store_result
from pagedkv.cpu.attention.steps.widen import dim_places, is_shuffled
from pagedkv.layouts import FLOAT_DTYPES

from .stepper import grouped, stepper

DIMS = 72
ORDERS = ["float32", "bfloat16", "fp8_e4m3"]
RNG = np.random.default_rng(0)


@cache
def step_of(make, kind):
    return stepper(make(even_odd=is_shuffled(kind)))


def numbers():
    """Dims of many magnitudes, and what rounds to even, overflows and underflows."""
    special = [
        1 + 2**-8,
        1 + 3 * 2**-8,
        1 + 2**-11,
        1 + 3 * 2**-11,
        65520,
        3.4e38,
        1e-40,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
    ]
    drawn = RNG.standard_normal(DIMS - len(special)) * 2.0 ** RNG.integers(-20, 20, DIMS - len(special))
    return np.array([*special, *drawn], np.float32)


def in_places(row, kind):
    found = np.zeros(-(-DIMS // 16) * 16, np.float32)
    found[dim_places(kind, DIMS)] = row
    return found


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ORDERS)
def test_a_row_of_q_goes_into_its_group(kind, dtype):
    q, load_query = RNG.standard_normal((4, DIMS)).astype(dtype), step_of(make_load_query, kind)
    factor = np.array([0.3], np.float32)
    rows = np.stack([in_places(row.astype(np.float32) * factor, kind) for row in q])
    for group_rows in (1, 4):
        group = np.zeros(rows[:group_rows].size, np.float32)
        for r in range(group_rows):
            place, index = group[4 * r :], FLOAT_DTYPES.index(dtype)
            load_query(place, group_rows, q[r], index, factor, DIMS, np.array(dim_places(kind, DIMS)))
        np.testing.assert_array_equal(group, grouped(rows[:group_rows], group_rows).reshape(-1))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ORDERS)
def test_a_result_is_rounded_to_the_dtype_of_q(kind, dtype):
    row, found, store_result = numbers(), np.empty(DIMS, dtype), step_of(make_store_result, kind)
    for factor in (np.float32([1]), np.float32([0.3])):
        store_result(
            found, in_places(row, kind), FLOAT_DTYPES.index(dtype), factor, DIMS, np.array(dim_places(kind, DIMS))
        )
        with np.errstate(all="ignore"):
            expected = (row * factor).astype(dtype)
        np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
        assert ((np.signbit(found) == np.signbit(expected)) | np.isnan(row)).all()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_a_row_of_q_is_rounded_to_int16(dtype):
    """Two dims in each place; a row that is not finite has the factor NaN, whatever its numbers are."""
    round_query, index = stepper(make_round_query()), FLOAT_DTYPES.index(dtype)
    q, factor = RNG.standard_normal((4, DIMS)).astype(dtype), np.array([0.3], np.float32)
    largest = abs(q.astype(np.float32)).max(1, keepdims=True)
    rows = np.rint(q.astype(np.float32) * (np.float32(32767) / largest)).astype(np.int16)
    for group_rows in (1, 4):
        group, factors = np.zeros((group_rows, DIMS // 2), np.int32), np.empty(group_rows, np.float32)
        for r in range(group_rows):
            round_query(group.reshape(-1)[4 * r :], group_rows, q[r], index, factor, DIMS, factors[r:])
        words = rows[:group_rows].view(np.int32)
        np.testing.assert_array_equal(group.reshape(-1), grouped(words, group_rows).reshape(-1))
        np.testing.assert_allclose(factors, largest[:group_rows, 0] * (0.3 / 32767), rtol=3e-7)
    for value in (np.inf, -np.inf, np.nan):
        q[0, 70] = value
        round_query(group, 1, q[0], index, factor, DIMS, factors)
        assert np.isnan(factors[0])
