"""What v1 and v2 are compiled for in tests, and the problems drawn for each."""

import math

import hypothesis.strategies as st

from ...support.problems import Spec
from ..decode_cases import Variant

PARTITION = 512


def nothing_for_head_1(score, q_pos, k_pos, head, seq):
    """The others see keys of their own parity, and of these older ones less."""
    if head == 1 or k_pos % 2 != head % 2:
        return -math.inf
    return score - 0.01 * (head + 1) * (q_pos - k_pos)


# Every value of each field, capabilities too, meets several of the others; thread groups with too few vectors, rows of
# 8 bytes, rows that do not fill a warp, blocks that are longer than a warp.
VARIANTS = [
    Variant("v1", 64, 16, "float32", "float32"),
    Variant("v1", 24, 8, "float32", "float32", "strided"),
    Variant("v1", 40, 32, "float16", "float16", "strided", capability=(10, 0)),
    Variant("v1", 8, 64, "bfloat16", "bfloat16"),
    Variant("v1", 128, 16, "bfloat16", "fp8_e4m3"),
    Variant("v1", 16, 8, "float16", "fp8_e5m2"),
    Variant("v1", 112, 256, "float32", "fp8_e5m2", capability=(10, 0)),
    Variant("v1", 120, 16, "float32", "bfloat16", capability=(8, 0)),
    Variant("v1", 32, 16, "float32", "float32", score_mod=nothing_for_head_1),
    Variant("v2", 64, 8, "float16", "float16"),
    Variant("v2", 72, 16, "float32", "float16", "strided"),
    Variant("v2", 8, 32, "float32", "float32"),
    Variant("v2", 512, 16, "bfloat16", "bfloat16"),
    Variant("v2", 48, 256, "float16", "fp8_e4m3", capability=(8, 0)),
    Variant("v2", 64, 16, "bfloat16", "bfloat16", score_mod=nothing_for_head_1),
]
# Others that have the same in other pairs.
MORE_VARIANTS = [
    Variant("v1", 128, 16, "float16", "float16"),
    Variant("v2", 96, 128, "float32", "float32", capability=(10, 0)),
    Variant("v2", 80, 16, "float32", "fp8_e4m3"),
    Variant("v2", 32, 32, "bfloat16", "fp8_e5m2", capability=(8, 0)),
    Variant("v1", 256, 32, "bfloat16", "bfloat16"),
    Variant("v1", 64, 8, "float32", "fp8_e4m3", capability=(8, 0)),
]


@st.composite
def specs(draw: st.DrawFn, variant: Variant) -> Spec:
    """Problems for a variant: every option that is an argument of the launch."""
    block_size, is_fp8 = variant.block_size, variant.kv_dtype.startswith("fp8")
    num_kv_heads = draw(st.integers(1, 3))
    most = 6 if variant.score_mod else 16
    # At least 64 numbers per row: the error bound compares the largest of many errors.
    groups = [
        g for g in (1, 2, 3, 4, 5, 7, 8) if g * num_kv_heads * variant.head_dim >= 64 and g * num_kv_heads <= most
    ]
    near = [
        PARTITION + 1,
        0,
        1,
        block_size - 1,
        block_size,
        block_size + 1,
        PARTITION - 1,
        PARTITION,
        2 * PARTITION + 1,
    ]
    longest = 700 if variant.score_mod else 1100
    lengths = st.sampled_from([n for n in near if n <= longest]) | st.integers(0, longest)
    return variant.spec(
        seq_lens=tuple(draw(st.lists(lengths, min_size=1, max_size=3))),
        num_kv_heads=num_kv_heads,
        group_size=draw(st.sampled_from(groups or [8])),
        strides="strided" if variant.strides == "strided" else draw(st.sampled_from(["own", "halves"])),
        kv_scales=draw(st.sampled_from([None, "scalar", "per head"])) if is_fp8 else None,
        scale=draw(st.sampled_from([None, None, 0.0, -0.1, 0.25])),
        softcap=draw(st.sampled_from([None, None, 0.7, 30.0])),
        alibi=draw(st.booleans()),
        window=draw(st.none() | st.sampled_from([1, 2, block_size, block_size + 1, PARTITION, PARTITION + 1, 10**6])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
