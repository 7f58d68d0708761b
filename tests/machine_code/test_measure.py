"""One row of the static report, and the arrays that its kernel runs on."""

import numpy as np
import pytest

from .measure import _Device, measure
from .variants import WORK, Variant


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(Variant("split", "float16", "fp8_e4m3", 64, 1, "", 24), marks=pytest.mark.long),
        pytest.param(Variant("split", "float16", "float16", 256, 16, "", 48), marks=pytest.mark.long),
    ],
    ids=["G24-fp8-D64-P1", "G48-float16-D256-P16"],
)
def test_many_query_heads_ask_for_each_row_once(variant):
    row = measure(variant, (9, 0))
    assert row["spill B"] == row["stack B"] == 0
    assert row["KV sectors"] <= 1.01
    assert row["KV in flight KiB"] >= 64
    assert row["KV load B"] == 16
    assert row["wavefronts"] <= 1.1
    assert row["loop instr/512B"] <= 120
    assert row["partials"] <= 0.04


def test_arrays_are_aligned_as_on_a_gpu():
    with _Device((9, 0)) as device:
        k_cache = WORK["v1"](Variant("v1", "float16", "float16", 8, 8)).call.args[1]
        assert device.address("k_cache", k_cache) % 256 == 0
        assert device.address("x", np.zeros(100, np.uint8)[3:]) % 256 == 0
