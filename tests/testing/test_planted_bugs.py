"""Bugs planted in our kernels: `assert_matches_reference` finds each one with its default settings."""

from functools import partial

import pytest

from pagedkv import decode_attention, prefill_attention
from pagedkv.testing import assert_matches_reference

from ..mutants.__main__ import COMPILE_ERROR, FAILED, MUTANTS, run_tests

pytestmark = pytest.mark.long

# Functions to test, the layouts that they have, and whether arrays must be contiguous: CUDA kernels refuse rows of fp8
# with gaps of 8 bytes.
OURS = {
    "decode": (decode_attention, None, False),
    "prefill": (prefill_attention, None, False),
    "v1": (partial(decode_attention, backend="emulator", kernel="v1"), ("vllm",), True),
    "split": (partial(decode_attention, backend="emulator"), ("NHD", "HND"), True),
}
# By their names in tests/mutants.
PLANTED = {
    "decode": (
        "decode: queries of some heads read another head's keys",
        "decode: all heads read the first KV head",
        "decode: the last token is left out",
        "decode: values take the v_scale of the first heads",
        "decode: keys take the k_scale of another head",
        "decode: rows without keys keep what was in `out`",
        "decode: the LSE of a row without keys is 0",
        "decode: values are read with the strides of K",
        "the window is one key too wide",
        "the sink is left out",
        "the LSE is to base 2",
        "ALiBi has the wrong sign",
        "the softcap is not multiplied by its limit",
        "an NHD cache is read with the strides of HND",
        "the output is not rescaled when the maximum grows",
        "the sum of weights is not rescaled when the maximum grows",
        "dims of the output are out of order",
    ),
    "prefill": (
        "causal attention sees one later key",
        "prefill: the tokens of a chunk have the positions of its heads",
        "prefill: queries are one position too early",
        "prefill: the last token of a chunk is left out",
        "prefill: the last visible tile is left out",
        "each row sees one token too few",
    ),
    "v1": ("v1: the token after the last one is visible", "v1: the sink is left out"),
    "split": ("split: the second K token is the wrong one",),
}


@pytest.mark.parametrize("name", OURS)
def test_what_has_no_bug_passes(name):
    fn, layouts, contiguous = OURS[name]
    assert assert_matches_reference(fn, layouts=layouts, contiguous=contiguous) > 0


@pytest.mark.parametrize(("name", "planted"), [(name, bug) for name, bugs in PLANTED.items() for bug in bugs])
def test_a_planted_bug_is_found(name, planted, tmp_path):
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == planted]
    test = f"{__file__}::{test_what_has_no_bug_passes.__name__}[{name}]"
    status, output = run_tests(mutant, (test,), tmp_path)
    assert status == FAILED, output
    assert "fails problem" in output
    assert "must begin at a multiple" not in output  # of an array that the function does not take
    assert COMPILE_ERROR not in output
