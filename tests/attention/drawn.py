"""What the kernels are compiled for beside the usual, and the problems that are drawn for each."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import hypothesis.strategies as st

from pagedkv.kernels.prefill.config import FEW_ROWS as MOST_FEW_ROWS

from ..support import strategies as cpu
from ..support.problems import Spec
from ..support.strategies import fade, own_parity
from .kernels import (
    BF16,
    FEW,
    FEW_ROWS,
    FEW_ROWS_SPLIT,
    FP8,
    HALF,
    NO_WARPGROUPS,
    ONE_STAGE,
    OPTIONS,
    PREFILL_FP8,
    PREFILL_INT8,
    PREFILLS,
    STRETCHES,
    VLLM,
    WGMMA,
    WGMMA_STRETCHES,
    Kernel,
    decode_kernel,
    prefill_kernel,
)


def nothing_for_head_1(score, q_pos, k_pos, head, seq):
    """The others see keys of their own parity, and of these older ones less."""
    if head == 1 or k_pos % 2 != head % 2:
        return -math.inf
    return score - 0.01 * (head + 1) * (q_pos - k_pos)


# Every value of each field, capabilities too, meets several of the others; thread groups with too few vectors, rows of
# 8 bytes, rows that do not fill a warp, blocks that are longer than a warp.
PAGED = [
    decode_kernel("v1", 64, 16, "float32", "float32"),
    decode_kernel("v1", 24, 8, "float32", "float32", "strided"),
    decode_kernel("v1", 40, 32, "float16", "float16", "strided", capability=(10, 0)),
    decode_kernel("v1", 8, 64, "bfloat16", "bfloat16"),
    decode_kernel("v1", 128, 16, "bfloat16", "fp8_e4m3"),
    decode_kernel("v1", 16, 8, "float16", "fp8_e5m2"),
    decode_kernel("v1", 112, 256, "float32", "fp8_e5m2", capability=(10, 0)),
    decode_kernel("v1", 120, 16, "float32", "bfloat16", capability=(8, 0)),
    decode_kernel("v1", 32, 16, "float32", "float32", score_mod=nothing_for_head_1),
    decode_kernel("v2", 64, 8, "float16", "float16"),
    decode_kernel("v2", 72, 16, "float32", "float16", "strided"),
    decode_kernel("v2", 8, 32, "float32", "float32"),
    decode_kernel("v2", 512, 16, "bfloat16", "bfloat16"),
    decode_kernel("v2", 48, 256, "float16", "fp8_e4m3", capability=(8, 0)),
    decode_kernel("v2", 64, 16, "bfloat16", "bfloat16", score_mod=nothing_for_head_1),
    decode_kernel("v2", 48, 32, "float16", "int8"),
]
# Others that have the same in other pairs.
MORE_PAGED = [
    decode_kernel("v1", 128, 16, "float16", "float16"),
    decode_kernel("v2", 96, 128, "float32", "float32", capability=(10, 0)),
    decode_kernel("v2", 80, 16, "float32", "fp8_e4m3"),
    decode_kernel("v2", 32, 32, "bfloat16", "fp8_e5m2", capability=(8, 0)),
    decode_kernel("v1", 256, 32, "bfloat16", "bfloat16"),
    decode_kernel("v1", 64, 8, "float32", "fp8_e4m3", capability=(8, 0)),
]
CAPPED = {"softcap": 30.0}
INT8 = {"q_dtype": "bfloat16", "kv_dtype": "int8"}
# Every dtype of q and of a cache; folded fragments, two head tiles, blocks side by side; rows of one chunk, of several,
# shared by pairs of warps, that fill no vector, of 8 bytes; sums in dynamic shared memory; heads shared by four warps
# (by two: test_many.py), alone and side by side.
SPLITS = [
    decode_kernel("split", 128, 16, "float16", "float16", group_size=8),
    decode_kernel("split", 128, 24, "float32", "float16", group_size=5),
    decode_kernel("split", 128, 16, "bfloat16", "fp8_e4m3", group_size=12),
    decode_kernel("split", 72, 16, "bfloat16", "fp8_e5m2", group_size=48),
    decode_kernel("split", 512, 16, "bfloat16", "bfloat16", group_size=8, **CAPPED, capability=(8, 0)),
    decode_kernel("split", 8, 256, "bfloat16", "fp8_e4m3", group_size=9, capability=(8, 0)),
    decode_kernel("split", 256, 16, "float16", "float16", group_size=8, **CAPPED, capability=(8, 0)),
    decode_kernel("split", 256, 16, "float32", "bfloat16", group_size=12),
    decode_kernel("split", 64, 3, "float32", "float32", group_size=4, capability=(8, 0)),
    decode_kernel("split", 64, 1, "float16", "fp8_e4m3", group_size=71, **CAPPED),
    decode_kernel("split", 256, 16, "bfloat16", "fp8_e5m2", group_size=33, capability=(8, 0)),
    decode_kernel("split", 320, 16, "float32", "fp8_e5m2", group_size=8, capability=(10, 0)),
    decode_kernel("split", 72, 3, "float16", "int8", group_size=12, **CAPPED, capability=(8, 0)),
    decode_kernel("split", 64, 16, "bfloat16", "int8", group_size=17),
]
MORE_SPLITS = [
    decode_kernel("split", 128, 16, "bfloat16", "bfloat16", group_size=16),
    decode_kernel("split", 72, 16, "float16", "fp8_e5m2", group_size=48),
    decode_kernel("split", 128, 16, "float16", "float16", group_size=16, **CAPPED, capability=(8, 0)),
    decode_kernel("split", 256, 16, "float16", "float16", group_size=12),
    decode_kernel("split", 96, 16, "float32", "float32", group_size=2, score_mod=fade),
    decode_kernel("split", 128, 256, "bfloat16", "bfloat16", group_size=64),
    decode_kernel("split", 112, 16, "float16", "float16", group_size=18, score_mod=own_parity),
    decode_kernel("split", 320, 16, "bfloat16", "fp8_e5m2", group_size=2, capability=(10, 0)),
    decode_kernel("split", 264, 16, "float16", "fp8_e5m2", group_size=2),
    decode_kernel("split", 320, 16, "float16", "float16", group_size=2, capability=(10, 0)),
    decode_kernel("split", 128, 16, "float16", "fp8_e4m3", group_size=32, **CAPPED, capability=(8, 0)),
    decode_kernel("split", 512, 16, "bfloat16", "bfloat16", group_size=8, **CAPPED),
    decode_kernel("split", 256, 16, "bfloat16", "fp8_e5m2", group_size=17),
    decode_kernel("split", 24, 3, "float32", "fp8_e4m3", group_size=7, capability=(8, 0)),
    decode_kernel("split", 64, 7, "float32", "bfloat16", group_size=4, **CAPPED),
    decode_kernel("split", 256, 3, "float16", "float16", group_size=3),
    decode_kernel("split", 64, 1, "bfloat16", "bfloat16", group_size=1, **CAPPED),
    decode_kernel("split", 504, 16, "float32", "float32", group_size=1),
    decode_kernel("split", 40, 1, "float16", "float16", group_size=48),
    decode_kernel("split", 256, 3, "float16", "float16", group_size=48),
    decode_kernel("split", 128, 16, "float32", "float32", group_size=4, **CAPPED),
    decode_kernel("split", 64, 16, "float32", "float32", group_size=4, **CAPPED, capability=(8, 0)),
    decode_kernel("split", 64, 16, "float16", "float16", group_size=8, score_mod=own_parity),
    decode_kernel("split", 128, 16, "bfloat16", "bfloat16", group_size=24),
    decode_kernel("split", 256, 16, "bfloat16", "bfloat16", group_size=20),
    decode_kernel("split", 192, 64, "float16", "fp8_e5m2", group_size=48, **CAPPED),
    decode_kernel("split", 200, 5, "float32", "bfloat16", group_size=3, **CAPPED, capability=(8, 0)),
    decode_kernel("split", 128, 16, "bfloat16", "int8", group_size=4),
    decode_kernel("split", 320, 16, "float16", "int8", group_size=2, capability=(10, 0)),
    decode_kernel("split", 256, 16, "float16", "int8", group_size=48, capability=(8, 0)),
    decode_kernel("split", 96, 7, "float32", "int8", group_size=5, **CAPPED),
]
MORE_PREFILLS = {
    kernel.name: kernel
    for kernel in (
        prefill_kernel("fp8 of 40 dims", **FP8, head_dim=40),
        prefill_kernel("128 dims", capability=NO_WARPGROUPS, **HALF, head_dim=128, group_size=5),
        prefill_kernel(
            "128 dims of bfloat16", capability=NO_WARPGROUPS, **BF16, head_dim=128, block_size=3, group_size=8
        ),
        prefill_kernel("8 dims", **HALF, head_dim=8, group_size=9, block_size=1),
        prefill_kernel(
            "256 dims with options",
            capability=NO_WARPGROUPS,
            **{**HALF, "head_dim": 256, "group_size": 1, "alibi": True, "block_size": 7},
        ),
        prefill_kernel("fp8 as float16", **{**FP8, "q_dtype": "float16"}, head_dim=128),
        prefill_kernel("e5m2", **{**FP8, "kv_dtype": "fp8_e5m2", "group_size": 7}, head_dim=256),
        prefill_kernel("many heads", **HALF, group_size=130),
        prefill_kernel("score_mod", **HALF, group_size=4, score_mod=own_parity, head_dim=80),
        prefill_kernel("score_mod on CUDA cores", group_size=3, score_mod=fade),
        prefill_kernel("512 dims", **BF16, group_size=3, head_dim=512),
        prefill_kernel("264 dims", group_size=3, kv_dtype="fp8_e4m3", head_dim=264),
        prefill_kernel("float32 over bfloat16", group_size=3, kv_dtype="bfloat16", head_dim=128),
        prefill_kernel("int8 as float16", q_dtype="float16", kv_dtype="int8", group_size=3, head_dim=128),
        prefill_kernel("int8 with options", **{**INT8, "group_size": 5, "head_dim": 256}, alibi=True, block_size=3),
        prefill_kernel("int8 before 9.0", capability=(8, 0), **INT8, group_size=2, head_dim=72),
        prefill_kernel("int8 under float32", group_size=3, kv_dtype="int8", head_dim=40),
        prefill_kernel("vllm of int8", q_dtype="float16", kv_dtype="int8", group_size=2, layout="vllm", head_dim=48),
        prefill_kernel("vllm of float32", group_size=2, layout="vllm", head_dim=24),
        prefill_kernel("vllm of float16", **{**VLLM, "kv_dtype": "float16", "kv_scales": None}, head_dim=128),
    )
}
# Those whose few rows over a long context have a kernel of their own.
FEW_ROW_KERNELS = (
    FEW_ROWS,
    *(
        replace(kernel, name=f"few rows, {kernel.name}", spec=kernel.spec.replace(**FEW), capability=(9, 0))
        for kernel in (
            *(OPTIONS, ONE_STAGE),
            replace(MORE_PREFILLS["fp8 of 40 dims"], name="fp8"),
            PREFILL_INT8,
            MORE_PREFILLS["int8 as float16"],
            *(MORE_PREFILLS[name] for name in ("128 dims", "8 dims", "256 dims with options")),
            *(MORE_PREFILLS[name] for name in ("fp8 as float16", "e5m2", "score_mod")),
        )
    ),
)
WITH_OPTIONS = {**BF16, "block_size": 3}
WGMMAS = (
    WGMMA,
    prefill_kernel("bfloat16", "wgmma", **BF16, head_dim=128, group_size=8),
    prefill_kernel("256 dims", "wgmma", **HALF, head_dim=256, group_size=1, block_size=7),
    prefill_kernel("128 dims with options", "wgmma", **WITH_OPTIONS, head_dim=128, group_size=130, softcap=3.0),
    prefill_kernel("256 dims with options", "wgmma", **WITH_OPTIONS, head_dim=256, group_size=3, alibi=True),
)
STRETCH_KERNELS = (
    *(STRETCHES, WGMMA_STRETCHES),
    *(
        replace(kernel, name=f"stretches, {kernel.name}", stretch=160 if kernel.name == "256 dims" else 128)
        for kernel in (OPTIONS, ONE_STAGE, PREFILL_FP8, PREFILL_INT8, *WGMMAS[1:])
    ),
    *(
        replace(MORE_PREFILLS[name], name=f"stretches, {name}", stretch=64)
        for name in ("8 dims", "128 dims", "fp8 as float16", "int8 with options", "score_mod")
    ),
)


@st.composite
def decodes(draw: st.DrawFn, kernel: Kernel) -> Spec:
    """Problems for v1, v2 or split: every option that is an argument of the launch."""
    form, size, is_split = kernel.spec, kernel.edge, kernel.kernel == "split"
    p, num_kv_heads = form.block_size, draw(st.integers(1, 2 if is_split else 3))
    near = [
        size + 1,
        0,
        1,
        p - 1,
        p,
        p + 1,
        size - 1,
        size,
        *((15, 16, 17, 31, 33, 63, 65) if is_split else [2 * size + 1]),
    ]
    longest = 300 if is_split and form.head_dim > 256 else 700 if is_split or form.score_mod else 1100
    longest = 300 if is_split and form.score_mod else longest
    lengths = st.sampled_from([n for n in near if n <= longest]) | st.integers(0, longest)
    fields: dict[str, Any] = {}
    if is_split:  # whose loop has options or not; gaps of 8 bytes are for rows without whole vectors
        is_coded = form.kv_format.coded
        strides = ["own", "halves"] if is_coded and form.head_dim % 16 == 0 else ["own", "halves", "strided"]
        softcap = draw(st.sampled_from([None, 0.7, 30.0])) if form.softcap else None
        alibi = form.softcap is not None and (softcap is None or draw(st.booleans()))
        fields["layout"] = draw(st.sampled_from(["NHD", "HND"]))
    else:  # at least 64 numbers per row: the error bound compares the largest of many errors
        most, each = 6 if form.score_mod else 16, num_kv_heads * form.head_dim
        groups = [g for g in (1, 2, 3, 4, 5, 7, 8) if g * each >= 64 and g * num_kv_heads <= most]
        fields["group_size"] = draw(st.sampled_from(groups or [8]))
        strides = ["strided"] if form.strides == "strided" else ["own", "halves"]
        softcap, alibi = draw(st.sampled_from([None, None, 0.7, 30.0])), draw(st.booleans())
    return form.replace(
        seq_lens=tuple(draw(st.lists(lengths, min_size=1, max_size=3))),
        num_kv_heads=num_kv_heads,
        strides=draw(st.sampled_from(strides)),
        kv_scales=draw(st.sampled_from([None, "scalar", "per head"])) if form.is_fp8 else None,
        scale=draw(st.sampled_from([None, None, 0.0, -0.1, 0.25])),
        softcap=softcap,
        alibi=alibi,
        window=draw(st.none() | st.sampled_from([1, 2, 17, p, p + 1, size, size + 1, 10**6])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        **fields,
    )


@st.composite
def prefills(draw: st.DrawFn, kernel: Kernel) -> Spec:
    """Problems for prefill: every option that is an argument of the launch; on warpgroups stages take turns."""
    form, size = kernel.spec, kernel.spec.block_size
    near = [0, 1, 2, size, size + 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 150]
    lengths = draw(st.lists(st.sampled_from(near) | st.integers(0, 150), min_size=1, max_size=3))
    query_lens = [min(n, draw(st.sampled_from([0, 1, 2, 17, 33, 150]) | st.integers(0, 150))) for n in lengths]
    if kernel.kernel == "wgmma":
        lengths = [n + draw(st.sampled_from([0, 0, 128, 256])) for n in lengths]
    layouts, strides = [form.layout] if form.layout == "vllm" else ["NHD", "HND"], ["own", "halves", "strided"]
    if form.kv_format.coded and (form.layout == "vllm" or form.head_dim % 16 == 0):
        strides.remove("strided")  # gaps of 8 bytes, which whole vectors cannot have
    cores = form.layout == "vllm" or "float32" in (form.q_dtype, form.kv_dtype)
    fields: dict[str, Any] = {}
    if form.softcap or form.alibi or cores:
        fields["softcap"] = draw(st.sampled_from([None, 0.7, 30.0]))
        fields["alibi"] = (fields["softcap"] is None and not cores) or draw(st.booleans())
    if cores:
        fields["block_size"] = draw(st.sampled_from([8, 16, 32] if form.layout == "vllm" else [1, 3, 16, 64]))
        fields["group_size"] = draw(st.integers(1, 5))
        fields["leftpad"], fields["mask"] = draw(st.booleans()), draw(st.sampled_from([None, "bool", "bits"]))
        fields["seq_slopes"] = draw(st.booleans())
    causal = draw(st.booleans())
    return form.replace(
        seq_lens=tuple(lengths),
        query_lens=tuple(query_lens),
        padding_rows=draw(st.integers(0, 2)),
        num_kv_heads=draw(st.integers(1, 2)) if form.num_heads < 100 else 1,
        layout=draw(st.sampled_from(layouts)),
        strides=draw(st.sampled_from(strides)),
        scale=draw(st.sampled_from([None, None, 0.0, -0.1, 0.25])),
        window=draw(st.none() | st.sampled_from([1, 2, 17, 33, 64, 65, 10**6])),
        sinks=draw(st.booleans()),
        causal=causal,
        window_right=None if causal else draw(st.sampled_from([None, 0, 1, 40, 64])),
        seed=draw(st.integers(0, 2**16)),
        **fields,
    )


@st.composite
def few_rows(draw: st.DrawFn, kernel: Kernel) -> Spec:
    """Few rows of long sequences among others, near the ends of tiles, parts and splits."""
    form, split = kernel.spec, FEW_ROWS_SPLIT
    near = [513, 575, 576, 577, 700, 1023, 1024, 1025, 1500, split, split + 1, split + 70]
    most = MOST_FEW_ROWS // form.group_size
    lengths, queries = [draw(st.sampled_from(near))], [draw(st.integers(1, most))]
    for _ in range(draw(st.integers(0, 2))):
        lengths.append(draw(st.sampled_from([0, 3, 130, 512, 513, 600])))
        queries.append(min(lengths[-1], draw(st.sampled_from([0, 1, most, most + 1, 40]))))
    fields: dict[str, Any] = {}
    if form.softcap or form.alibi:
        fields = {"softcap": draw(st.sampled_from([None, 0.7])), "alibi": True}
    causal = draw(st.booleans())
    return form.replace(
        seq_lens=tuple(lengths),
        query_lens=tuple(queries),
        padding_rows=draw(st.integers(0, 1)),
        num_kv_heads=draw(st.sampled_from([2, 1])),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        scale=draw(st.sampled_from([None, None, 0.0, -0.1])),
        window=draw(st.sampled_from([None, None, 513, 600, 1100])),
        sinks=draw(st.booleans()),
        causal=causal,
        window_right=None if causal else draw(st.sampled_from([None, 0, 3])),
        seed=draw(st.integers(0, 2**16)),
        **fields,
    )


class Source(NamedTuple):
    """A kernel, the problems that are drawn for it, how many of them, and whether CI has time for it."""

    kernel: Kernel
    specs: st.SearchStrategy[Spec]
    num_problems: int
    is_long: bool


def on_devices() -> Iterator[Source]:
    """Every kernel on a device that tests compile."""

    def each(draw: Callable[[Kernel], Any], count: int, kernels: Any, short: Any) -> Iterator[Source]:
        return (Source(kernel, draw(kernel), count, kernel not in short) for kernel in kernels)

    yield from each(decodes, 3, [*SPLITS, *MORE_SPLITS], SPLITS)
    yield from each(decodes, 3, [*PAGED, *MORE_PAGED], PAGED)
    yield from each(prefills, 4, [*PREFILLS, *MORE_PREFILLS.values()], PREFILLS)
    yield from each(few_rows, 2, FEW_ROW_KERNELS, [FEW_ROWS, FEW_ROW_KERNELS[3]])
    yield from each(prefills, 5, WGMMAS, [WGMMA])
    yield from each(prefills, 4, STRETCH_KERNELS, [STRETCHES])


def on_the_cpu() -> Iterator[Source]:
    """Every kernel of the CPU backend that tests compile."""
    for is_prefill, kernels, more in (
        (False, cpu.DECODE_KERNELS, cpu.MORE_DECODE_KERNELS),
        (True, cpu.PREFILL_KERNELS, cpu.MORE_PREFILL_KERNELS),
    ):
        for kernel in (*kernels, *more):
            name = f"{'prefill' if is_prefill else 'decode'}-{kernel}"
            yield Source(Kernel("cpu", name, Spec()), cpu.specs(kernel, is_prefill), 20, kernel in more)
