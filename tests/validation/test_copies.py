"""Small arrays are copied in each call, and checked once for calls that are alike."""

import numpy as np
import pytest

from pagedkv.placement import place
from pagedkv.validation import copies


@pytest.fixture
def checks():
    """The copies that were looked at, and a check that notes them and refuses what is beyond a bound."""
    seen = []

    def check(copy, bound):
        seen.append(copy)
        if copy.max() > bound:
            raise ValueError(f"beyond {bound}")
        return int(copy.max())

    return seen, check


def placed(x, backend="cpu"):
    return place(backend, [("x", x)])[0]


def test_the_same_contents_are_checked_once(checks):
    seen, check = checks
    x = np.array([[3, 1], [2, 0]], np.int32)
    for like in (x, x.copy(), np.asfortranarray(x)):
        own, largest = copies.checked_copy(placed(x), like, check, 9)
        assert (own.tolist(), largest) == (x.tolist(), 3)
        assert own.flags.c_contiguous
        assert own.flags.writeable  # a kernel is compiled for such arrays
    assert len(seen) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x + 1,
        lambda x: x.reshape(4, 1),
        lambda x: x.view(np.uint32),
    ],
)
def test_other_contents_are_not(checks, other):
    seen, check = checks
    x = np.array([[3, 1], [2, 0]], np.int32)
    copies.checked_copy(placed(x), x, check, 9)
    own, _ = copies.checked_copy(placed(x), other(x), check, 9)
    assert own.dtype == other(x).dtype
    np.testing.assert_array_equal(own, other(x))
    assert len(seen) == 2


def test_what_is_stored_later_is_looked_at(checks):
    seen, check = checks
    x = np.array([3, 1], np.int32)
    own, _ = copies.checked_copy(placed(x), x, check, 3)
    x[1] = 4
    assert own.tolist() == [3, 1]
    for _ in range(2):  # what was refused is refused again
        with pytest.raises(ValueError, match="beyond 3"):
            copies.checked_copy(placed(x), x, check, 3)
    assert copies.checked_copy(placed(x), x, check, 4)[1] == 4
    assert len(seen) == 4


def test_what_fits_one_pool_is_refused_for_a_smaller_one(checks):
    _, check = checks
    x = np.array([3, 1], np.int32)
    assert copies.checked_copy(placed(x), x, check, 3)[1] == 3
    with pytest.raises(ValueError, match="beyond 2"):
        copies.checked_copy(placed(x), x, check, 2)


@pytest.mark.parametrize(("length", "backend"), [(copies.MOST_BYTES // 4 + 1, "cpu"), (2, "emulator")])
def test_long_arrays_and_those_of_the_emulator_are_each_calls_own(checks, length, backend):
    seen, check = checks
    x = np.zeros(length, np.int32)
    first, second = (copies.checked_copy(placed(x, backend), x, check, 0)[0] for _ in range(2))
    assert len(seen) == 2
    assert not any(np.shares_memory(*pair) for pair in ((first, second), (first, x), (second, x)))
