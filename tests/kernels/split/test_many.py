"""Many query heads: the split kernel with rows in shared memory; what every form has to do is in test_split.py."""

import numpy as np
import pytest

from pagedkv.kernels.split.config import SHORTEST_SPLIT
from pagedkv.kernels.split.tensor_cores.stages import StageShape

from ...support.devices import emulator
from ...support.problems import assert_close, build, expect
from ...support.strategies import long
from ..decode_cases import MANY_HEADS, Variant, decode
from .variants import config_of

# Stages of 32 and of 16 tokens.
VARIANTS = [
    MANY_HEADS,
    Variant("split", 128, 3, "bfloat16", "bfloat16", group_size=24),
    Variant("split", 256, 16, "bfloat16", "fp8_e5m2", group_size=33, capability=(8, 0)),
]
MORE_VARIANTS = [Variant("split", 256, 16, "float16", "fp8_e4m3", group_size=48)]
FORMS = pytest.mark.parametrize("variant", [*VARIANTS, *long(MORE_VARIANTS)], ids=str)


def tokens_of_stage(variant):
    return StageShape(config_of(variant, variant.capability)).tokens


def test_forms():
    assert [tokens_of_stage(variant) for variant in VARIANTS] == [32, 16, 16]


@FORMS
def test_the_last_stage_may_have_any_number_of_tokens(variant, open_device):
    lengths = range(1, 2 * tokens_of_stage(variant) + 2)
    problem = build(variant.spec(seq_lens=(*lengths, SHORTEST_SPLIT - 1), num_kv_heads=1))
    assert_close(problem, *decode(problem, variant, open_device))


@pytest.mark.parametrize("variant", [*VARIANTS[:2], *long(MORE_VARIANTS)], ids=str)
def test_a_needle_is_found_at_every_position_of_a_stage(variant, open_device):
    """As that of a step: eight KV heads have a needle each; its value is all of the output, to 16 bits."""
    for first in range(0, tokens_of_stage(variant), 8):
        needles = tuple(range(first, first + 8))
        spec = variant.spec(seq_lens=(SHORTEST_SPLIT,), num_kv_heads=8, needles=needles, fingerprint=True, group_size=1)
        problem = build(spec.replace(group_size=variant.group_size))
        out, lse = decode(problem, variant, open_device)
        assert_close(problem, out, lse)
        np.testing.assert_array_equal(out.astype(np.float32), np.round(expect(problem)[0]))


@pytest.mark.parametrize("group_size", [17, *long([32, 33, 64, 65])])
def test_the_heads_of_every_warp(group_size, open_device):
    variant = MANY_HEADS._replace(group_size=group_size)
    problem = build(variant.spec(seq_lens=(70, 5)))
    assert_close(problem, *decode(problem, variant, open_device))


@pytest.mark.parametrize(
    ("variant", "block_size", "layout"),
    [
        (VARIANTS[1], VARIANTS[1].block_size, "HND"),
        *long([(VARIANTS[1], 1, "HND"), (VARIANTS[1], 256, "NHD"), (VARIANTS[2], 256, "NHD")]),
        *long([(MORE_VARIANTS[0], 1, "HND")]),
    ],
    ids=str,
)
def test_the_bits_are_the_same_on_other_blocks(variant, block_size, layout, open_device):
    spec = variant.spec(seq_lens=(300, 17), num_kv_heads=1)
    out, lse = decode(build(spec), variant, open_device)
    other = spec.replace(block_size=block_size, layout=layout, placement_seed=5, seq_lens=(17, 300), ids=(1, 0))
    other_out, other_lse = decode(build(other), variant, open_device)
    np.testing.assert_array_equal(other_out[::-1], out)
    np.testing.assert_array_equal(other_lse[::-1], lse)


@FORMS
def test_lanes_keep_out_of_each_others_banks(variant):
    device = emulator(stats=True)
    decode(build(variant.spec(seq_lens=(SHORTEST_SPLIT,), num_kv_heads=1)), variant, device=device)
    stats = device.launches[0]
    assert stats.shared_wavefronts <= 1.1 * stats.shared_wavefronts_min
