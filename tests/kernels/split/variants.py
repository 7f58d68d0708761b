"""What kernel split is compiled for in tests, and the problems drawn for each."""

import hypothesis.strategies as st

from pagedkv.cuda.plans import split
from pagedkv.kernels.split.config import SHORTEST_SPLIT, SplitConfig

from ...support.problems import Spec, build
from ...support.strategies import fade, own_parity
from ..decode_cases import Variant, checked_call

# Every dtype of q and of a cache; folded fragments, two head tiles, blocks side by side; rows of one chunk, of several,
# shared by pairs of warps, that fill no vector, of 8 bytes; sums in dynamic shared memory; heads shared by four warps
# (by two: test_many.py), alone and side by side.
VARIANTS = [
    Variant("split", 128, 16, "float16", "float16", group_size=8),
    Variant("split", 128, 24, "float32", "float16", group_size=5),
    Variant("split", 128, 16, "bfloat16", "fp8_e4m3", group_size=12),
    Variant("split", 72, 16, "float32", "fp8_e5m2", group_size=48),
    Variant("split", 512, 16, "bfloat16", "bfloat16", group_size=8, modified=True, capability=(8, 0)),
    Variant("split", 8, 256, "float32", "fp8_e4m3", group_size=9, capability=(8, 0)),
    Variant("split", 256, 16, "float16", "float16", group_size=8, modified=True, capability=(8, 0)),
    Variant("split", 256, 16, "float32", "bfloat16", group_size=12),
    Variant("split", 64, 3, "float32", "float32", group_size=4, capability=(8, 0)),
    Variant("split", 64, 1, "float16", "fp8_e4m3", group_size=71, modified=True),
    Variant("split", 256, 16, "bfloat16", "fp8_e5m2", group_size=33, capability=(8, 0)),
    Variant("split", 320, 16, "float32", "fp8_e5m2", group_size=8, capability=(10, 0)),
]
FOUR_BLOCKS = Variant("split", 64, 16, "float16", "fp8_e4m3", group_size=8)  # on a multiprocessor
# Each fp8 dtype, widened by instructions and, before 8.9, by arithmetic; and by terms of a float32 q.
CODES = [
    Variant("split", 72, 16, "float16", "fp8_e4m3", group_size=8, capability=(8, 0)),
    FOUR_BLOCKS,
    VARIANTS[-1],
]
# Others that have the same in other pairs.
MORE_VARIANTS = [
    Variant("split", 128, 16, "bfloat16", "bfloat16", group_size=16),
    Variant("split", 72, 16, "float16", "fp8_e5m2", group_size=48),
    Variant("split", 128, 16, "float16", "float16", group_size=16, modified=True, capability=(8, 0)),
    Variant("split", 256, 16, "float32", "float16", group_size=12),
    Variant("split", 96, 16, "float32", "float32", group_size=2, score_mod=fade),
    Variant("split", 128, 256, "float32", "bfloat16", group_size=64),
    Variant("split", 112, 16, "float16", "float16", group_size=18, score_mod=own_parity),
    Variant("split", 320, 16, "float32", "fp8_e5m2", group_size=2, capability=(10, 0)),
    Variant("split", 264, 16, "float32", "fp8_e5m2", group_size=2),
    Variant("split", 320, 16, "float32", "float16", group_size=2, capability=(10, 0)),
    Variant("split", 128, 16, "float16", "fp8_e4m3", group_size=32, modified=True, capability=(8, 0)),
    Variant("split", 512, 16, "bfloat16", "bfloat16", group_size=8, modified=True),
    Variant("split", 256, 16, "bfloat16", "fp8_e5m2", group_size=17),
    Variant("split", 24, 3, "float32", "float32", group_size=7),
    Variant("split", 64, 7, "float32", "bfloat16", group_size=4, modified=True),
    Variant("split", 256, 3, "float16", "float16", group_size=3),
    Variant("split", 64, 1, "bfloat16", "bfloat16", group_size=1, modified=True),
    Variant("split", 504, 16, "float32", "float32", group_size=1),
    Variant("split", 40, 1, "float32", "float16", group_size=48),
    Variant("split", 256, 3, "float16", "float16", group_size=48),
    Variant("split", 128, 16, "float32", "float32", group_size=4, modified=True),
    Variant("split", 64, 16, "float32", "float32", group_size=4, modified=True, capability=(8, 0)),
    Variant("split", 64, 16, "float16", "float16", group_size=8, score_mod=own_parity),
    Variant("split", 128, 16, "bfloat16", "bfloat16", group_size=24),
    Variant("split", 256, 16, "float32", "bfloat16", group_size=20),
    Variant("split", 192, 64, "float16", "fp8_e5m2", group_size=48, modified=True),
    Variant("split", 200, 5, "float32", "bfloat16", group_size=3, modified=True, capability=(8, 0)),
]


MOST_SHARED = 99 * 1024  # of a thread block on GPUs of compute capability 8.6, 8.9 and 12.0


def config_of(variant: Variant, capability: tuple[int, int]) -> SplitConfig:
    """What the kernel is compiled for in a call of this variant."""
    problem = build(variant.spec(seq_lens=(1,)))
    return split.split_config(checked_call(problem, "split"), capability=capability)


@st.composite
def specs(draw: st.DrawFn, variant: Variant) -> Spec:
    """Problems for a variant: every option that is an argument of the launch."""
    block_size, is_fp8, size = variant.block_size, variant.kv_dtype.startswith("fp8"), SHORTEST_SPLIT
    whole_vectors = is_fp8 and variant.head_dim % 16 == 0  # which rows with gaps of 8 bytes cannot have
    near = [size + 1, 0, 1, 15, 16, 17, 31, 33, 63, 65, block_size - 1, block_size, block_size + 1, size - 1, size]
    longest = 300 if variant.score_mod or variant.head_dim > 256 else 700
    lengths = st.sampled_from([n for n in near if n <= longest]) | st.integers(0, longest)
    softcap = draw(st.sampled_from([None, 0.7, 30.0])) if variant.modified else None
    return variant.spec(
        seq_lens=tuple(draw(st.lists(lengths, min_size=1, max_size=3))),
        num_kv_heads=draw(st.integers(1, 2)),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        strides=draw(st.sampled_from(["own", "halves"] if whole_vectors else ["own", "halves", "strided"])),
        kv_scales=draw(st.sampled_from([None, "scalar", "per head"])) if is_fp8 else None,
        scale=draw(st.sampled_from([None, None, 0.0, -0.1, 0.25])),
        softcap=softcap,
        alibi=variant.modified and (softcap is None or draw(st.booleans())),
        window=draw(st.none() | st.sampled_from([1, 2, 17, block_size + 1, size, size + 1, 10**6])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
