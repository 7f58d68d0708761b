"""Arrays that a score_mod closes over are copied before it is compiled."""

import numpy as np
import pytest

import pagedkv
from pagedkv.score_mod import frozen

from .support.wrong_arguments import attention_arguments

GLOBAL = np.zeros(3, np.float32)
# What numba would read in place: an array with gaps, and one of more than a megabyte.
ARRAYS = {"gaps": lambda: np.zeros((3, 2), np.float32)[:, 0], "large": lambda: np.zeros(300_000, np.float32)}


def biased(biases, number):
    def score_mod(score, q_pos, k_pos, head, seq):
        return score + biases[k_pos] + GLOBAL[k_pos] + number

    return score_mod


def test_a_frozen_function_has_arrays_of_its_own():
    biases = np.zeros((3, 2), np.float32)[:, 0]
    function = biased(biases, 10)
    copied = frozen(function)
    biases[1], GLOBAL[1] = 100, 1000
    try:
        assert function(0, 0, 1, 0, 0) == 1110
        assert copied(0, 0, 1, 0, 0) == 10
    finally:
        GLOBAL[1] = 0
    assert copied.__name__ == "score_mod"
    assert frozen(lambda score, q_pos, k_pos, head, seq: abs(score))(-3, 0, 0, 0, 0) == 3


@pytest.mark.long
@pytest.mark.parametrize("kind", ARRAYS)
def test_kernels_do_not_see_later_stores(kind):
    biases = ARRAYS[kind]()

    def score_mod(score, q_pos, k_pos, head, seq):
        return score + biases[k_pos % 3]

    arguments = attention_arguments()
    arguments["v_cache"][...] = np.random.default_rng(0).standard_normal(arguments["v_cache"].shape)
    expected = pagedkv.decode_attention(**arguments, score_mod=score_mod)
    biases[:3] = 5, -5, 9
    np.testing.assert_array_equal(pagedkv.decode_attention(**arguments, score_mod=score_mod), expected)
