"""Functions with one wrong change, and the changes that a check does not notice."""

import math

import pytest
from numba import njit

from pagedkv.testing import edited, survivors


def scaled(factor):
    @njit
    def times(x, *, shift=1.0):
        """Not the first line."""
        return factor * math.sqrt(x) + shift

    return times


def test_one_place_is_another():
    plain = edited(scaled(3), "math.sqrt(x)", "x")
    assert plain(4) == 13
    assert plain(4, shift=0) == 12
    assert scaled(3).py_func(4) == 7


@pytest.mark.parametrize(("old", "count"), [("cube", 0), ("shift", 2)])
def test_the_place_must_be_one(old, count):
    with pytest.raises(ValueError, match=f"^old must occur exactly once in times, got {count} times: '{old}'$"):
        edited(scaled(3), old, "")


def test_survivors_are_the_edits_that_a_check_misses():
    def check(times):
        assert times(0) == 1

    edits = [("+ shift", "- shift"), ("factor *", "2 *")]
    assert survivors(scaled(3).py_func, edits, check) == [("factor *", "2 *")]
    with pytest.raises(AssertionError):
        survivors(lambda x: 2, [], check)


@pytest.mark.parametrize(("edit", "error"), [(("cube", ""), ValueError), (("+ shift", "+"), SyntaxError)])
def test_an_edit_that_cannot_be_made_is_an_error(edit, error):
    with pytest.raises(error):
        survivors(scaled(3).py_func, [edit], lambda times: None)
