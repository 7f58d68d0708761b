"""Specs: what they say of themselves."""

import pytest

from pagedkv.testing import Spec, fade

NEEDLES = "needles: KV head h has one key that takes all the weight, at position needles[h % len(needles)]"


@pytest.mark.parametrize(
    ("spec", "lines"),
    [
        (Spec(), ["Spec()"]),
        (Spec(score_mod=fade, seed=3), ["Spec(score_mod=fade, seed=3)"]),
        (Spec(needles=(0, 7)), ["Spec(needles=(0, 7))", NEEDLES]),
        (
            Spec(needles=(2,), fingerprint=True, poison="inf"),
            [
                "Spec(needles=(2,), fingerprint=True, poison='inf')",
                NEEDLES,
                "fingerprint: values are the numbers of their block, offset and head",
                "poison: unused slots and blocks hold -inf, unused entries of tables 2147483647, 1000000000",
            ],
        ),
        (
            Spec(kv_dtype="fp8_e4m3", poison="huge"),
            [
                "Spec(kv_dtype='fp8_e4m3', poison='huge')",
                "poison: unused slots and blocks hold 0x7b in fp8, unused entries of tables -2147483648",
            ],
        ),
    ],
)
def test_special_words_of_a_spec_are_explained(spec, lines):
    assert spec.explained().splitlines() == lines
    assert eval(lines[0]) == spec
