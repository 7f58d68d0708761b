"""What the tests of the split kernel share: the variants that they compile, and calls with all checks on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np

from pagedkv.cuda.plans import attention, split
from pagedkv.emulator import EmulatorDevice
from pagedkv.kernels.split.config import SHORTEST_SPLIT, SplitConfig

from ...problems import Problem, Spec, build
from ...strategies import fade, own_parity
from ..decode_cases import checked_call


class Variant(NamedTuple):
    """What the split kernel is compiled for: a few seconds for each."""

    head_dim: int
    group_size: int
    block_size: int
    q_dtype: str
    kv_dtype: str
    modified: bool = False
    score_mod: Any = None
    capability: tuple[int, int] = (9, 0)

    def __str__(self) -> str:
        parts = [f"D{self.head_dim}", f"G{self.group_size}", f"P{self.block_size}", self.q_dtype, self.kv_dtype]
        parts += ["modified"] if self.modified else []
        parts += [self.score_mod.__name__] if self.score_mod else []
        parts += ["cc{}.{}".format(*self.capability)] if self.capability != (9, 0) else []
        return "-".join(parts)

    def spec(self, **fields: Any) -> Spec:
        """A problem for this variant."""
        own = {name: value for name, value in self._asdict().items() if name not in ("modified", "capability")}
        return Spec(**{**own, **fields})


# Every pair of dtypes; folded fragments, two head tiles, blocks side by side; rows of one chunk, of several, shared by
# pairs of warps, that fill no vector, of 8 bytes; sums in dynamic shared memory; heads shared by two and by four warps,
# alone and side by side.
VARIANTS = [
    Variant(128, 8, 16, "float16", "float16"),
    Variant(64, 1, 1, "bfloat16", "bfloat16", modified=True),
    Variant(256, 3, 3, "float16", "float16"),
    Variant(128, 16, 16, "bfloat16", "bfloat16"),
    Variant(64, 4, 7, "float32", "bfloat16", modified=True),
    Variant(128, 5, 24, "float32", "float16"),
    Variant(128, 12, 16, "bfloat16", "fp8_e4m3"),
    Variant(72, 48, 16, "float16", "fp8_e5m2"),
    Variant(512, 8, 16, "bfloat16", "bfloat16", modified=True),
    Variant(8, 9, 256, "float32", "fp8_e4m3", capability=(8, 0)),
    Variant(264, 2, 16, "float32", "fp8_e5m2"),
    Variant(40, 48, 1, "float32", "float16"),
    Variant(128, 16, 16, "float16", "float16", modified=True, capability=(8, 0)),
    Variant(256, 12, 16, "float32", "float16"),
    Variant(64, 4, 3, "float32", "float32", capability=(8, 0)),
    Variant(128, 4, 16, "float32", "float32", modified=True),
    Variant(24, 7, 3, "float32", "float32"),
    Variant(504, 1, 16, "float32", "float32"),
    Variant(64, 8, 16, "float16", "float16", score_mod=own_parity),
    Variant(96, 2, 16, "float32", "float32", score_mod=fade),
    Variant(128, 24, 16, "bfloat16", "bfloat16"),
    Variant(256, 48, 3, "float16", "float16"),
    Variant(64, 71, 1, "float16", "fp8_e4m3", modified=True),
    Variant(256, 17, 16, "bfloat16", "fp8_e5m2"),
    Variant(128, 64, 256, "float32", "bfloat16"),
    Variant(256, 20, 16, "float32", "bfloat16"),
    Variant(128, 32, 16, "float16", "fp8_e4m3", modified=True, capability=(8, 0)),
    Variant(112, 18, 16, "float16", "float16", score_mod=own_parity),
    Variant(192, 48, 64, "float16", "fp8_e5m2", modified=True),
    Variant(200, 3, 5, "float32", "bfloat16", modified=True, capability=(8, 0)),
    Variant(320, 2, 16, "float32", "float16", capability=(10, 0)),
]
TENSOR, CUDA_CORES = Variant(64, 4, 16, "float16", "float16"), Variant(64, 3, 16, "float32", "float32")
MANY_HEADS = Variant(64, 17, 16, "float16", "float16")


def config_of(variant: Variant, capability: tuple[int, int], **fields: Any) -> SplitConfig:
    """What the kernel is compiled for in a call of this variant."""
    problem = build(variant.spec(seq_lens=(1,), **fields))
    return split.split_config(checked_call(problem, "split"), capability=capability)


def decode(
    problem: Problem,
    open_device: Callable[..., Any] = EmulatorDevice,
    *,
    device: Any = None,
    capability: tuple[int, int] = (9, 0),
    check: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a problem, and that nothing beside the rows of `out` was written."""
    call = checked_call(problem, "split", check)
    problem.out_buffer[...] = np.nan
    lse = np.full(problem.q.shape[:2], np.nan, np.float32)
    if device is None:
        device = open_device(global_race=True)
        device.lineinfo = False  # the kernels that a GPU gets
    if isinstance(device, EmulatorDevice):
        device.capability = capability
    with device:
        attention.decode_attention(device, call, problem.out, lse)
    written = problem.out.copy()
    problem.out[...] = np.nan
    assert np.isnan(problem.out_buffer.astype(np.float32)).all()
    return written, lse


@st.composite
def specs(draw: st.DrawFn, variant: Variant) -> Spec:
    """Problems for a variant: every option that is an argument of the launch."""
    block_size, is_fp8, size = variant.block_size, variant.kv_dtype.startswith("fp8"), SHORTEST_SPLIT
    whole_vectors = is_fp8 and variant.head_dim % 16 == 0  # which rows with gaps of 8 bytes cannot have
    near = [0, 1, 15, 16, 17, 31, 33, 63, 65, block_size - 1, block_size, block_size + 1, size - 1, size, size + 1]
    longest = 300 if variant.score_mod or variant.head_dim > 256 else 700
    lengths = st.sampled_from([n for n in near if n <= longest]) | st.integers(0, longest)
    return variant.spec(
        seq_lens=tuple(draw(st.lists(lengths, min_size=1, max_size=3))),
        num_kv_heads=draw(st.integers(1, 2)),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        strides=draw(st.sampled_from(["own", "halves"] if whole_vectors else ["own", "halves", "strided"])),
        kv_scales=draw(st.sampled_from([None, "scalar", "per head"])) if is_fp8 else None,
        scale=draw(st.sampled_from([None, None, 0.0, -0.1, 0.25])),
        softcap=draw(st.sampled_from([None, 0.7, 30.0])) if variant.modified else None,
        alibi=variant.modified and draw(st.booleans()),
        window=draw(st.none() | st.sampled_from([1, 2, 17, block_size + 1, size, size + 1, 10**6])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
