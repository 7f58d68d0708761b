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
        "decode: queries of the wrong heads",
        "decode: keys and values of the first KV head for all",
        "decode: the last token is left out",
        "decode: v_scale of the wrong heads",
        "decode: k_scale of the wrong heads",
        "decode: empty rows keep what was there",
        "decode: the LSE of an empty row is 0",
        "decode: values are read with the strides of K",
        "scratch: a window of one key more",
        "scratch: without the sink",
        "scratch: the LSE to base 2",
        "logits: ALiBi with the other sign",
        "logits: softcap without its factor",
        "tiles: NHD with the strides of HND",
        "flash: accumulators are not rescaled",
        "steps: the sum is not rescaled",
        "dims come out in the order in which they were widened",
    ),
    "prefill": (
        "scratch: causal lets one later key in",
        "prefill: the tokens of a chunk at the positions of its heads",
        "prefill: queries one position early",
        "prefill: a chunk leaves its last token out",
        "prefill: the last visible tile is skipped",
        "flash: a row sees one token less than it should",
    ),
    "v1": ("v1: one token past the end is visible", "v1: the sink is left out of the denominator"),
    "split": ("split: the second K token is the next one",),
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
