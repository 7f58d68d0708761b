"""What the tests of v1 and v2 share: the variants that they compile, and calls on an emulator with all checks on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np

from pagedkv.calls import AttentionCall
from pagedkv.cuda.plans import attention
from pagedkv.emulator import EmulatorDevice
from pagedkv.validation.attention import attention_call

from ..problems import Problem, Spec
from ..strategies import fade, own_parity
from .block_cases import SparseDevice

PARTITION = 512


class Variant(NamedTuple):
    """What v1 and v2 are compiled for: a second or two for each."""

    kernel: str
    head_dim: int
    block_size: int
    q_dtype: str
    kv_dtype: str
    strides: str = "own"
    score_mod: Any = None
    capability: tuple[int, int] = (9, 0)

    def __str__(self) -> str:
        parts = [self.kernel, f"D{self.head_dim}", f"P{self.block_size}", self.q_dtype, self.kv_dtype]
        parts += [self.strides] if self.strides != "own" else []
        parts += [self.score_mod.__name__] if self.score_mod else []
        parts += ["cc{}.{}".format(*self.capability)] if self.capability != (9, 0) else []
        return "-".join(parts)

    def spec(self, **fields: Any) -> Spec:
        """A problem for this variant."""
        own = {name: value for name, value in self._asdict().items() if name not in ("kernel", "capability")}
        return Spec(layout="vllm", **{**own, **fields})


# Every value of each field meets several of the others; thread groups with too few vectors, rows of 8 bytes, rows that
# do not fill a warp, blocks that are longer than a warp.
VARIANTS = [
    Variant("v1", 64, 16, "float32", "float32"),
    Variant("v1", 24, 8, "float32", "float32", "strided"),
    Variant("v1", 128, 16, "float16", "float16"),
    Variant("v1", 40, 32, "float16", "float16", "strided"),
    Variant("v1", 256, 32, "bfloat16", "bfloat16"),
    Variant("v1", 8, 64, "bfloat16", "bfloat16"),
    Variant("v1", 128, 16, "bfloat16", "fp8_e4m3"),
    Variant("v1", 64, 8, "float32", "fp8_e4m3", capability=(8, 0)),
    Variant("v1", 16, 8, "float16", "fp8_e5m2"),
    Variant("v1", 112, 256, "float32", "fp8_e5m2"),
    Variant("v1", 120, 16, "float32", "bfloat16"),
    Variant("v1", 32, 16, "float32", "float32", score_mod=fade),
    Variant("v2", 64, 8, "float16", "float16"),
    Variant("v2", 72, 16, "float32", "float16", "strided"),
    Variant("v2", 8, 32, "float32", "float32"),
    Variant("v2", 96, 128, "float32", "float32"),
    Variant("v2", 512, 16, "bfloat16", "bfloat16"),
    Variant("v2", 80, 16, "float32", "fp8_e4m3"),
    Variant("v2", 32, 32, "bfloat16", "fp8_e5m2"),
    Variant("v2", 48, 256, "float16", "fp8_e4m3", capability=(8, 0)),
    Variant("v2", 64, 16, "bfloat16", "bfloat16", score_mod=own_parity),
]


def checked_call(problem: Problem, kernel: str = "auto", check: bool = False) -> AttentionCall:
    """The call of a problem as the public operation validates it."""
    names = ("q", "k_cache", "v_cache", "block_tables", "seq_lens")
    return attention_call(
        {
            **dict.fromkeys(("kv_dtype", "k_scale", "v_scale", "alibi_slopes", "sinks")),
            **dict(zip(names, problem.args, strict=True)),
            **problem.options,
            **{"kernel": kernel, "backend": "emulator", "out": problem.out, "return_lse": True, "check": check},
        }
    )


def decode(
    problem: Problem,
    kernel: str,
    open_device: Callable[..., Any] = EmulatorDevice,
    *,
    device: Any = None,
    capability: tuple[int, int] = (9, 0),
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a problem, and that nothing beside the rows of `out` was written.

    On `device`, or on a new one. The capability is what an emulator is said to have; a GPU has its own.
    """
    call = checked_call(problem, kernel)
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


def assert_same_bits(actual: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    """Equal outputs and LSEs, bit by bit."""
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))


class LargeCaches(SparseDevice):
    """Holds the last blocks of caches past 4 GiB, and nothing of the rest."""

    def __init__(self, num_blocks):
        super().__init__()
        self.num_blocks = num_blocks

    def address(self, name, array):
        is_new = name not in self.large
        where = super().address(name, array)
        if is_new and name in self.large:
            used = slice(len(array) - self.num_blocks, None)
            self.large[name].view()[used] = array[used]
            self.large[name].mark(True, used)
        return where


def move_past_4_gib(problem):
    """Move a problem's blocks to the end of caches that are larger than 2**32 bytes and take no memory else."""
    first = 2**32 // problem.k_cache[0].nbytes + 1
    used = np.arange(problem.block_tables.shape[1]) < -(-problem.seq_lens[:, None] // problem.spec.block_size)
    problem.block_tables = np.where(used, problem.block_tables + np.int32(first) * used, problem.block_tables)
    for name in ("k_cache", "v_cache"):
        small = getattr(problem, name)
        large = np.empty((first + len(small), *small.shape[1:]), small.dtype)
        large[first:] = small
        setattr(problem, name, large)


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
        0,
        1,
        block_size - 1,
        block_size,
        block_size + 1,
        PARTITION - 1,
        PARTITION,
        PARTITION + 1,
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
