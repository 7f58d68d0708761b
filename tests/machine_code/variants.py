"""Calls that use every CUDA kernel, and the least that each has to move.

They go through public operations, so that kernels are compiled as they are for users.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np

from pagedkv.cuda.plans.plan import WGMMA as PAGEDKV_WGMMA
from pagedkv.kernels.prefill.config import TensorConfig
from pagedkv.kernels.prefill.tensor_cores.split.shape import SplitShape
from pagedkv.kernels.prefill.tensor_cores.tile import TileShape
from pagedkv.kernels.prefill.tensor_cores.wgmma.shape import WgmmaShape
from pagedkv.kernels.split.config import FEW_SPLITS, SplitConfig, filling_splits
from pagedkv.layouts import FP8_KINDS, cache_shapes, storage_dtype
from pagedkv.operations import attention, caches
from pagedkv.typing import KvDtype, Layout

# Sizes of the runs on the emulator.
NUM_SEQS, NUM_HEADS, SEQ_LEN, CAPACITY = 2, 2, 1024, 2048  # NUM_HEADS counts KV heads
SHORT = "short splits"
WGMMA = "prefill_wgmma"  # for 9.0 alone
PREFILL_TOKENS = 512
FEW_TOKENS, LONG_CONTEXT = 8, 4096  # of prefill_split
NUM_TOKENS = 256  # in operations on caches
NUM_STATES, NUM_ROWS = 8, 64

PREFILL_SHAPES = {"prefill": TileShape, "prefill_split": SplitShape, WGMMA: WgmmaShape}
DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")


def _distance_bias(score: float, q_pos: int, k_pos: int, head: int, seq: int) -> float:
    return score - 0.01 * (q_pos - k_pos)


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "ALiBi, softcap, window, sinks": {
        "alibi_slopes": np.full(NUM_HEADS, 0.05, np.float32),
        "softcap": 30.0,
        "window": 512,
        "sinks": np.zeros(NUM_HEADS, np.float32),
    },
    "score_mod": {"score_mod": _distance_bias},
    "check": {"check": True},
    "strided": {},
    "L=999": {},
    SHORT: {},
}


@dataclass(frozen=True, slots=True)
class Variant:
    """What one row of the report counts, for each compute capability.

    Attributes
    ----------
    kernel : str
    kind : str
        Elements of q or of rows to write or merge; for gather_kv and copy_blocks, of the cache.
    kv_kind : str
        Elements of the cache; "" without one.
    head_dim, block_size : int
        block_size is 0 without a cache.
    options : str
        One of OPTIONS, a layout, or a number of states.
    group_size : int
        Query heads of a KV head; 1 except for split, prefill and prefill_split.
    """

    kernel: str
    kind: str
    kv_kind: str
    head_dim: int
    block_size: int
    options: str = ""
    group_size: int = 1

    def suits(self, capability: tuple[int, int]) -> bool:
        """Whether there is a kernel for a compute capability."""
        if self.kernel == "prefill_split":
            sizes = (self.head_dim, self.group_size, self.block_size)
            return TensorConfig(*sizes, self.kind, self.kv_kind, architecture=capability[0]).can_split
        return self.kernel != WGMMA or capability == (9, 0)


def variants() -> list[Variant]:
    """For attention a grid of dtypes, D, and P or G, and cases beside it; for the others the usual cases."""
    result = _split_variants() + _prefill_variants()
    for kernel in ("v1", "v2"):
        grid = [(dtype, head_dim, size) for dtype in DTYPES for head_dim in (64, 128, 256) for size in (8, 16, 32)]
        result += [Variant(kernel, _q_kind(dtype), dtype, head_dim, size) for dtype, head_dim, size in grid]
        usual = Variant(kernel, "float16", "float16", 128, 16)
        result += [replace(usual, options=options) for options in OPTIONS if options not in ("", SHORT)]
        result += [replace(usual, block_size=size) for size in (64, 128, 256)]
        result += [replace(usual, head_dim=head_dim) for head_dim in (8, 72, 120, 512)]
        result += [Variant(kernel, "float32", kv_kind, 128, 16) for kv_kind in ("bfloat16", "fp8_e4m3")]
        result += [Variant(kernel, "float32", "float32", 512, 16), Variant(kernel, "float16", "fp8_e4m3", 512, 16)]
    result += [Variant("v2_reduce", kind, "", head_dim, 0) for kind in DTYPES[:3] for head_dim in (64, 128, 256)]
    for layout in ("vllm", "NHD"):
        for kind, kv_kind in (("float16", "float16"), ("float32", "bfloat16"), ("float16", "fp8_e4m3")):
            result.append(Variant("write_kv", kind, kv_kind, 128, 16, layout))
            result.append(Variant("gather_kv", kv_kind, kv_kind, 128, 16, layout))
    result += [Variant("copy_blocks", "float16", "float16", 128, 16, layout) for layout in ("vllm", "NHD")]
    return result + [Variant("merge_states", kind, "", 128, 0, f"{n} states") for kind in DTYPES[:3] for n in (2, 8)]


def _split_variants() -> list[Variant]:
    def split(q: str, kv: str, head_dim: int, group_size: int, block_size: int = 16, options: str = "") -> Variant:
        return Variant("split", q, kv, head_dim, block_size, options, group_size)

    dims, cases = (64, 128, 256), [options for options in OPTIONS if options not in ("", SHORT)]
    result = [split(_q_kind(kv), kv, d, g) for kv in DTYPES[1:4] for d in dims for g in (1, 8, 16)]
    result += [split("float16", "fp8_e5m2", 128, g) for g in (1, 8, 16)]
    result += [split("float32", "float32", d, g) for d in dims for g in (1, 4)]
    result += [split("float32", kv, d, g) for kv in DTYPES[1:4] for d in dims for g in (8, 16)]
    result += [split("float16", kv, d, 48) for kv in ("float16", "fp8_e4m3") for d in dims]
    result += [replace(each, options=SHORT) for each in result]
    result += [split("float16", "float16", 128, 8, p) for p in (1, 3, 256)]
    result += [split("float16", kv, 128, 8, 16, options) for kv in ("float16", "fp8_e4m3") for options in cases]
    result += [split("float32", "float32", 128, 4, 16, options) for options in cases]
    result += [split("float16", "float16", 128, g) for g in (5, 7, 12, 24)]
    result += [split(_q_kind(kv), kv, d, 8) for kv in ("float16", "fp8_e4m3") for d in (8, 24, 40, 72, 192, 384, 512)]
    return result + [split("float32", "float32", d, 4) for d in (8, 24, 40, 72, 192, 384, 512)]


def _prefill_variants() -> list[Variant]:
    def prefill(q: str, kv: str, head_dim: int, group_size: int = 4, options: str = "") -> Variant:
        return Variant("prefill", q, kv, head_dim, 16, options, group_size)

    result = [prefill(kind, kind, d) for kind in ("float16", "bfloat16") for d in (64, 128, 256)]
    result += [prefill("float16", kind, d) for kind in FP8_KINDS for d in (64, 128, 256)]
    result += [prefill("float16", "float16", 128, g) for g in (1, 5, 8)]
    cases = [options for options in OPTIONS if options not in ("", SHORT, "L=999")]
    result += [prefill("float16", "float16", 128, 4, options) for options in cases]
    plain = [each for each in result if each.kv_kind == each.kind and each.options != "score_mod"]
    few = [each for each in result if each.group_size == 4 and each.options in ("", "score_mod", "strided")]
    result += [replace(each, kernel="prefill_split") for each in few]
    return result + [replace(each, kernel=WGMMA) for each in plain]


def quick_variants() -> list[Variant]:
    """One variant of each kernel."""
    wanted = [Variant("split", "float16", "float16", 128, 16, options, 8) for options in ("", SHORT)]
    wanted += [Variant(kernel, "float16", "float16", 64, 16, "", 4) for kernel in ("prefill", "prefill_split")]
    wanted += [Variant(WGMMA, "float16", "float16", 128, 16, "", 4)]
    wanted += [Variant("v1", "float32", "fp8_e4m3", 64, 8), Variant("v2", "float32", "float32", 64, 16)]
    wanted += [Variant("v2_reduce", "float32", "", 64, 0), Variant("write_kv", "float16", "float16", 64, 16, "vllm")]
    wanted += [Variant("gather_kv", "float16", "float16", 64, 16, "vllm")]
    wanted += [Variant("copy_blocks", "float16", "float16", 128, 16, "vllm")]
    return [*wanted, Variant("merge_states", "float32", "", 64, 0, "2 states")]


def _q_kind(kv_kind: str) -> str:
    return "float16" if kv_kind in FP8_KINDS else kv_kind


class Work(NamedTuple):
    """A call, and the bytes that it has to move: by column, names of arrays and how many of their bytes."""

    call: Callable[[], Any]
    read: dict[str, tuple[tuple[str, ...], int]]
    written: tuple[tuple[str, ...], int] | None = None


def _dtype(kind: str) -> tuple[np.dtype[Any], KvDtype | None]:
    kv_kind = next((name for name in FP8_KINDS if name == kind), None)
    return storage_dtype("float32" if kv_kind else kind, kv_kind), kv_kind


def _normal(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    rng = np.random.default_rng(0)
    if dtype == np.uint8:
        return rng.integers(0, 0x60, shape, np.uint8)
    return rng.standard_normal(shape, np.float32).astype(dtype)


def _split(variant: Variant) -> Work:
    """Decode of one sequence with long splits, or with the shortest that are promised a share; Hkv = 2, NHD."""
    capacity = _split_tokens(variant)
    num_blocks, num_heads = -(-capacity // variant.block_size), NUM_HEADS * variant.group_size
    k_cache, v_cache, fp8 = _caches(variant, "NHD", num_blocks)
    if variant.options == "strided":  # k_cache and v_cache are halves of one array
        k_cache, v_cache = np.stack([k_cache, v_cache], 1).swapaxes(0, 1)
    q = _normal((1, num_heads, variant.head_dim), _dtype(variant.kind)[0])
    tables = np.random.default_rng(1).permutation(num_blocks).astype(np.int32).reshape(1, -1)
    seq_len = 999 if variant.options == "L=999" else capacity
    options = dict(OPTIONS[variant.options])
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = np.repeat(options[name], variant.group_size)
    visible = 2 * NUM_HEADS * min(seq_len, options.get("window", seq_len)) * variant.head_dim * k_cache.itemsize
    call = partial(
        attention.decode_attention,
        *(q, k_cache, v_cache, tables, np.array([seq_len], np.int32)),
        **{"kv_dtype": fp8, "backend": "emulator", **options},
    )
    return Work(call, {"KV": (("k_cache", "v_cache"), visible)})


def _prefill(variant: Variant) -> Work:
    """A whole tile of query rows at the end of a sequence of 512 tokens, or few of a long one; Hkv = 2, NHD."""
    is_few = variant.kernel == "prefill_split"
    num_tokens, seq_len = (FEW_TOKENS, LONG_CONTEXT) if is_few else (128 // variant.group_size, PREFILL_TOKENS)
    num_blocks, num_heads = -(-seq_len // variant.block_size), NUM_HEADS * variant.group_size
    k_cache, v_cache, fp8 = _caches(variant, "NHD", num_blocks)
    if variant.options == "strided":  # k_cache and v_cache are halves of one array
        k_cache, v_cache = np.stack([k_cache, v_cache], 1).swapaxes(0, 1)
    q = _normal((num_tokens, num_heads, variant.head_dim), _dtype(variant.kind)[0])
    tables = np.random.default_rng(1).permutation(num_blocks).astype(np.int32).reshape(1, -1)
    options = dict(OPTIONS[variant.options])
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = np.repeat(options[name], variant.group_size)
    sizes = (variant.head_dim, variant.group_size, variant.block_size)
    is_modified = bool(options.keys() & {"softcap", "alibi_slopes", "score_mod"})
    config = TensorConfig(*sizes, variant.kind, variant.kv_kind, modified=is_modified)
    rows = PREFILL_SHAPES[variant.kernel](config).rows
    seen = min(seq_len, options.get("window", seq_len) + num_tokens - 1)
    visible = 2 * NUM_HEADS * seen * variant.head_dim * k_cache.itemsize * -(-num_tokens * variant.group_size // rows)
    call = partial(
        attention.prefill_attention,
        *(q, k_cache, v_cache, tables, np.array([seq_len], np.int32), np.array([0, num_tokens], np.int32)),
        **{"kv_dtype": fp8, "backend": "emulator", **options},
    )
    return Work(call, {"KV": (("k_cache", "v_cache"), visible)})


def _prefill_wgmma(variant: Variant) -> Work:
    """As `_prefill`, where the environment asks for warpgroups."""
    work = _prefill(variant)

    def call() -> Any:
        with patch.dict(os.environ, {PAGEDKV_WGMMA: "1"}):
            return work.call()

    return work._replace(call=call)


def _split_tokens(variant: Variant) -> int:
    """The fewest tokens whose splits have all `long_split` tokens; of the case SHORT, `short_split`."""
    config = SplitConfig(variant.head_dim, variant.group_size, variant.block_size, variant.kind, variant.kv_kind)
    if variant.options == SHORT:
        return FEW_SPLITS * config.short_split
    return filling_splits(NUM_HEADS) * config.long_split


def _caches(
    variant: Variant, layout: Layout, num_blocks: int, *, strided: bool = False
) -> tuple[Any, Any, KvDtype | None]:
    dtype, kv_kind = _dtype(variant.kv_kind)
    size = variant.block_size
    shapes = cache_shapes(layout, num_blocks, size * (1 + strided), NUM_HEADS, variant.head_dim, dtype.itemsize)
    k_cache, v_cache = (_normal(shape, dtype) for shape in shapes)
    return (k_cache[:, :, :, :size], v_cache[..., :size], kv_kind) if strided else (k_cache, v_cache, kv_kind)


def _attention(variant: Variant) -> Work:
    """Decode of 2 sequences of 1024 tokens in tables of 2048, Hq = Hkv = 2."""
    kv_kind = variant.kv_kind or variant.kind
    variant = replace(variant, kv_kind=kv_kind, block_size=variant.block_size or 16)
    num_blocks = NUM_SEQS * CAPACITY // variant.block_size
    k_cache, v_cache, fp8 = _caches(variant, "vllm", num_blocks, strided=variant.options == "strided")
    q = _normal((NUM_SEQS, NUM_HEADS, variant.head_dim), _dtype(variant.kind)[0])
    tables = np.random.default_rng(1).permutation(num_blocks).astype(np.int32).reshape(NUM_SEQS, -1)
    seq_len = 999 if variant.options == "L=999" else SEQ_LEN
    options = OPTIONS[variant.options]
    rows = NUM_SEQS * NUM_HEADS
    visible = rows * min(seq_len, options.get("window", seq_len)) * variant.head_dim * k_cache.itemsize
    partial_sums = rows * (SEQ_LEN // 512) * variant.head_dim * 4
    name = variant.kernel.removesuffix("_reduce")
    call = partial(
        attention.decode_attention,
        *(q, k_cache, v_cache, tables, np.full(NUM_SEQS, seq_len, np.int32)),
        **{"layout": "vllm", "kv_dtype": fp8, "kernel": name, "backend": "emulator", **options},
    )
    if name == variant.kernel:
        return Work(call, {"K": (("k_cache",), visible), "V": (("v_cache",), visible)})
    return Work(call, {"read": (("tmp_out",), partial_sums)}, (("out",), q.nbytes))


def _cache_work(variant: Variant) -> Work:
    """256 consecutive tokens of 2 KV heads in random blocks; for copy_blocks, half of the blocks."""
    layout, num_blocks = cast(Layout, variant.options), NUM_TOKENS // variant.block_size
    k_cache, v_cache, fp8 = _caches(variant, layout, num_blocks)
    blocks = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
    both = ("k_cache", "v_cache")
    call: Callable[[], Any]
    if variant.kernel == "copy_blocks":
        call = partial(caches.copy_blocks, k_cache, v_cache, blocks.reshape(-1, 2).astype(np.int64), backend="emulator")
        names, nbytes = ("source[0]", "source[1]"), k_cache.nbytes
        return Work(call, {"read": (names, nbytes)}, (names, nbytes))
    place: dict[str, Any] = {"layout": layout, "kv_dtype": fp8, "backend": "emulator"}
    cache_bytes = 2 * k_cache.nbytes
    if variant.kernel == "gather_kv":
        call = partial(caches.gather_kv, k_cache, v_cache, blocks, NUM_TOKENS, **place)
        return Work(call, {"read": (both, cache_bytes)}, (("k", "v"), cache_bytes * (4 if fp8 else 1)))
    k = _normal((NUM_TOKENS, NUM_HEADS, variant.head_dim), _dtype(variant.kind)[0])
    slots = (blocks[:, None] * np.int64(variant.block_size) + np.arange(variant.block_size)).reshape(-1)
    call = partial(caches.write_kv, k, k.copy(), k_cache, v_cache, slots, **place)
    return Work(call, {"read": (("k", "v"), 2 * k.nbytes)}, (both, cache_bytes))


def _merge(variant: Variant) -> Work:
    """A merge of states with 64 rows of 2 heads."""
    num_states = int(variant.options.split()[0])
    outs = [_normal((NUM_ROWS, NUM_HEADS, variant.head_dim), _dtype(variant.kind)[0]) for _ in range(num_states)]
    lses = [np.zeros((NUM_ROWS, NUM_HEADS), np.float32) for _ in outs]
    names = tuple(f"outs[{i}]" for i in range(num_states))
    call = partial(attention.merge_states, outs, lses, backend="emulator")
    return Work(call, {"read": (names, num_states * outs[0].nbytes)}, (("out",), outs[0].nbytes))


WORK: dict[str, Callable[[Variant], Work]] = {
    **{
        "split": _split,
        "prefill": _prefill,
        WGMMA: _prefill_wgmma,
        "prefill_split": _prefill,
        "v1": _attention,
        "v2": _attention,
        "v2_reduce": _attention,
        "merge_states": _merge,
    },
    **{"write_kv": _cache_work, "gather_kv": _cache_work, "copy_blocks": _cache_work},
}
