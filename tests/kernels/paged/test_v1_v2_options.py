"""Corners of v1 and v2 that drawn problems meet by chance: windows, options, scales, strides, many partitions."""

import pytest

from ...support.problems import assert_close, build
from ...support.strategies import long
from ..decode_cases import V1, V2, decode
from .variants import MORE_VARIANTS, PARTITION, VARIANTS

FP8, MORE_FP8 = ([v for v in variants if v.kv_dtype.startswith("fp8")] for variants in (VARIANTS, MORE_VARIANTS))
BOTH = pytest.mark.parametrize("variant", [V1, V2], ids=lambda variant: variant.kernel)


@BOTH
def test_windows_over_the_edges_of_chunks_and_partitions(variant, open_device):
    lengths = (0, 1, 2, 130, 145, PARTITION, PARTITION + 1, PARTITION + 100, 2 * PARTITION + 1)
    for window in (1, 2, 130, PARTITION, PARTITION + 1):
        problem = build(variant.spec(seq_lens=lengths, window=window, num_kv_heads=1, group_size=3))
        assert_close(problem, *decode(problem, variant, open_device))


@BOTH
def test_each_option_alone_and_all_of_them(variant, open_device):
    options = {"alibi": True, "sinks": True, "softcap": 2.0, "scale": 0.3}
    for some in ({}, *({name: value} for name, value in options.items()), options):
        spec = variant.spec(seq_lens=(3, 2 * PARTITION + 9, 40), num_kv_heads=3, group_size=2, **some)
        problem = build(spec)
        assert_close(problem, *decode(problem, variant, open_device))


@pytest.mark.parametrize("variant", [*FP8, *long(MORE_FP8)], ids=str)
def test_scales_of_fp8(variant, open_device):
    for kv_scales in ("scalar", "per head"):
        problem = build(variant.spec(seq_lens=(37, 5, 600), kv_scales=kv_scales, num_kv_heads=3))
        assert_close(problem, *decode(problem, variant, open_device))


def test_more_partitions_than_the_reduction_has_threads(open_device):
    variant = next(v for v in VARIANTS if v.kernel == "v2" and v.head_dim == 8)
    problem = build(variant.spec(seq_lens=(258 * PARTITION + 3, 7), num_kv_heads=1, group_size=2))
    assert_close(problem, *decode(problem, variant, open_device))
