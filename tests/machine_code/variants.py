"""Calls that use every CUDA kernel, and the least that each has to move.

They go through public operations, so that kernels are compiled as they are for users; those of prefill for 9.0 by the
kernel that a variant names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np

from pagedkv.cuda.plans import prefill
from pagedkv.kernels.prefill.config import TensorConfig
from pagedkv.kernels.prefill.tensor_cores.parts.shape import PartShape
from pagedkv.kernels.prefill.tensor_cores.tile import TileShape
from pagedkv.kernels.prefill.tensor_cores.wgmma.shape import WgmmaShape
from pagedkv.kernels.split.config import FEW_SPLITS, SplitConfig, filling_splits
from pagedkv.layouts import FORMATS, INT8_MAX, as_given
from pagedkv.operations import attention, caches
from pagedkv.typing import Layout

# Sizes of the runs on the emulator.
NUM_SEQS, NUM_HEADS, SEQ_LEN, CAPACITY = 2, 2, 1024, 2048  # NUM_HEADS counts KV heads
SHORT = "short splits"
LOGITS = "ALiBi, softcap, window, sinks"
WGMMA = "prefill_wgmma"  # for 9.0 alone
STRETCHES = ("prefill_stretches", "prefill_stretches_wgmma")  # from 9.0 on, and for 9.0 alone
PREFILL_TOKENS = 512
FEW_TOKENS, LONG_CONTEXT = 8, 4096  # of prefill_split
NUM_TOKENS = 256  # in operations on caches
NUM_STATES, NUM_ROWS = 8, 64

CACHES = ("float16", "fp8_e4m3", "int8")
KINDS = (("float16", "float16"), ("float16", "fp8_e4m3"), ("float32", "float32"))
PREFILL_SHAPES = {
    **{"prefill": TileShape, "prefill_split": PartShape, WGMMA: WgmmaShape},
    **{"prefill_stretches": TileShape, "prefill_stretches_wgmma": WgmmaShape},
}


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    LOGITS: {
        "alibi_slopes": np.full(NUM_HEADS, 0.05, np.float32),
        "softcap": 30.0,
        "window": 512,
        "sinks": np.zeros(NUM_HEADS, np.float32),
    },
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
        if self.kernel == "prefill_stretches":
            return capability >= (9, 0)
        return self.kernel not in (WGMMA, *STRETCHES) or capability == (9, 0)


def variants() -> list[Variant]:
    """Usual shapes and options of each kernel."""
    result = _split_variants() + _prefill_variants()
    for kernel in ("v1", "v2"):
        result += [Variant(kernel, kind, kv_kind, 128, 16) for kind, kv_kind in KINDS]
    result += [Variant("write_kv", "float16", kv_kind, 128, 16, "NHD") for kv_kind in CACHES]
    result += [Variant("gather_kv", kv_kind, kv_kind, 128, 16, "NHD") for kv_kind in CACHES]
    result += [
        Variant("copy_blocks", "float16", "float16", 128, 16, "NHD"),
        Variant("v2_reduce", "float16", "", 128, 0),
    ]
    return [*result, Variant("merge_states", "float16", "", 128, 0, "2 states")]


def _split_variants() -> list[Variant]:
    shapes = [(d, g) for d in (64, 128, 256) for g in (8, 16)]
    result = [Variant("split", "float16", "float16", d, 16, "", g) for d, g in ((128, 1), *shapes)]
    result += [Variant("split", "bfloat16", "fp8_e4m3", d, 16, "", g) for d, g in ((64, 16), (128, 8), (256, 8))]
    result += [Variant("split", kind, "int8", 128, 16, "", g) for kind, g in (("float16", 4), ("bfloat16", 8))]
    usual = Variant("split", "float16", "float16", 128, 16, "", 8)
    result += [replace(usual, options=options) for options in (LOGITS, SHORT)]
    return [*result, Variant("split", "float32", "float32", 128, 16, "", 4)]


def _prefill_variants() -> list[Variant]:
    usual = Variant("prefill", "float16", "float16", 128, 16, "", 4)
    result = [replace(usual, head_dim=head_dim) for head_dim in (64, 128, 256)]
    result += [*(replace(usual, kv_kind=kind) for kind in ("fp8_e4m3", "int8")), replace(usual, options=LOGITS)]
    few = [replace(each, kernel="prefill_split") for each in result if each.options == ""]  # others see too few keys
    result += few
    for kernel in (WGMMA, *STRETCHES):
        result += [replace(usual, kernel=kernel, head_dim=head_dim) for head_dim in (128, 256)]
    return result


def quick_variants() -> list[Variant]:
    """One variant of each kernel."""
    wanted = [Variant("split", "float16", "float16", 128, 16, options, 8) for options in ("", SHORT)]
    wanted += [Variant(kernel, "float16", "float16", 64, 16, "", 4) for kernel in ("prefill", "prefill_split")]
    wanted += [Variant(kernel, "float16", "float16", 128, 16, "", 4) for kernel in (WGMMA, *STRETCHES)]
    wanted += [Variant("v1", "float32", "fp8_e4m3", 64, 8), Variant("v2", "float32", "float32", 64, 16)]
    wanted += [Variant("v2_reduce", "float32", "", 64, 0), Variant("write_kv", "float16", "float16", 64, 16, "vllm")]
    wanted += [Variant("gather_kv", "float16", "float16", 64, 16, "vllm")]
    wanted += [Variant("copy_blocks", "float16", "float16", 128, 16, "vllm")]
    return [*wanted, Variant("merge_states", "float32", "", 64, 0, "2 states")]


class Work(NamedTuple):
    """A call, and the bytes that it has to move: by column, names of arrays and how many of their bytes."""

    call: Callable[[], Any]
    read: dict[str, tuple[tuple[str, ...], int]]
    written: tuple[tuple[str, ...], int] | None = None


def _normal(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    rng = np.random.default_rng(0)
    if dtype == np.uint8:
        return rng.integers(0, 0x60, shape, np.uint8)
    if dtype == np.int8:
        return rng.integers(-INT8_MAX, INT8_MAX + 1, shape, np.int8)
    return rng.standard_normal(shape, np.float32).astype(dtype)


def _split(variant: Variant) -> Work:
    """Decode of one sequence with long splits, or with the shortest that are promised a share; Hkv = 2, NHD."""
    capacity = _split_tokens(variant)
    num_blocks, num_heads = -(-capacity // variant.block_size), NUM_HEADS * variant.group_size
    k_cache, v_cache, coded = _caches(variant, "NHD", num_blocks)
    q = _normal((1, num_heads, variant.head_dim), FORMATS[variant.kind].stored)
    tables = np.random.default_rng(1).permutation(num_blocks).astype(np.int32).reshape(1, -1)
    options = dict(OPTIONS[variant.options])
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = np.repeat(options[name], variant.group_size)
    visible = 2 * NUM_HEADS * min(capacity, options.get("window", capacity)) * variant.head_dim * k_cache.itemsize
    call = partial(
        attention.decode_attention,
        *(q, k_cache, v_cache, tables, np.array([capacity], np.int32)),
        **{"backend": "emulator", **coded, **options},
    )
    return Work(call, {"KV": (("k_cache", "v_cache"), visible)})


def _prefill(variant: Variant) -> Work:
    """A whole tile of query rows over whole tiles of keys, about 512 tokens; or few rows over many; Hkv = 2, NHD."""
    sizes = (variant.head_dim, variant.group_size, variant.block_size)
    is_modified = bool(OPTIONS[variant.options].keys() & {"softcap", "alibi_slopes"})
    shape = PREFILL_SHAPES[variant.kernel](TensorConfig(*sizes, variant.kind, variant.kv_kind, modified=is_modified))
    num_tiles = -(-PREFILL_TOKENS // shape.keys)
    num_tokens, seq_len = 128 // variant.group_size, num_tiles * shape.keys
    if variant.kernel == "prefill_split":
        num_tokens, seq_len = FEW_TOKENS, LONG_CONTEXT
    num_blocks, num_heads = -(-seq_len // variant.block_size), NUM_HEADS * variant.group_size
    k_cache, v_cache, coded = _caches(variant, "NHD", num_blocks)
    q = _normal((num_tokens, num_heads, variant.head_dim), FORMATS[variant.kind].stored)
    tables = np.random.default_rng(1).permutation(num_blocks).astype(np.int32).reshape(1, -1)
    options = dict(OPTIONS[variant.options])
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = np.repeat(options[name], variant.group_size)
    seen = min(seq_len, options.get("window", seq_len) + num_tokens - 1)
    times = -(-num_tokens * variant.group_size // shape.rows)  # that K and V are read
    visible = 2 * NUM_HEADS * seen * variant.head_dim * k_cache.itemsize * times

    def call() -> Any:
        on_warpgroups, stretch = variant.kernel in (WGMMA, STRETCHES[1]), num_tiles // 2 * shape.keys
        changes: dict[str, Any] = {"uses_wgmma": lambda config, capability: on_warpgroups}
        changes |= {"STRETCH": stretch} if variant.kernel in STRETCHES else {}
        with patch.multiple(prefill, **changes):
            return attention.prefill_attention(
                *(q, k_cache, v_cache, tables, np.array([seq_len], np.int32), np.array([0, num_tokens], np.int32)),
                **{"backend": "emulator", **coded, **options},
            )

    written = (("out",), q.nbytes) if variant.kernel == WGMMA else None
    return Work(call, {"KV": (("k_cache", "v_cache"), visible)}, written)


def _split_tokens(variant: Variant) -> int:
    """The fewest tokens whose splits have all `long_split` tokens; of the case SHORT, `short_split`."""
    config = SplitConfig(variant.head_dim, variant.group_size, variant.block_size, variant.kind, variant.kv_kind)
    if variant.options == SHORT:
        return FEW_SPLITS * config.short_split
    return filling_splits(NUM_HEADS) * config.long_split


def _caches(variant: Variant, layout: Layout, num_blocks: int) -> tuple[Any, Any, dict[str, Any]]:
    """K, V and what calls name besides: the format of codes, and the scales of rows that have them."""
    kv_format = FORMATS[variant.kv_kind]
    parts = kv_format.parts(layout, num_blocks, variant.block_size, NUM_HEADS, variant.head_dim)
    k_cache, v_cache, *scales = as_given(layout, [_normal(*part) for part in parts])
    options: dict[str, Any] = {"kv_dtype": kv_format.name} if kv_format.coded else {}
    options |= zip(("k_scales", "v_scales"), (np.abs(x) / 64 for x in scales), strict=False)
    return k_cache, v_cache, options


def _attention(variant: Variant) -> Work:
    """Decode of 2 sequences of 1024 tokens in tables of 2048, Hq = Hkv = 2."""
    kv_kind = variant.kv_kind or variant.kind
    variant = replace(variant, kv_kind=kv_kind, block_size=variant.block_size or 16)
    num_blocks = NUM_SEQS * CAPACITY // variant.block_size
    k_cache, v_cache, coded = _caches(variant, "vllm", num_blocks)
    q = _normal((NUM_SEQS, NUM_HEADS, variant.head_dim), FORMATS[variant.kind].stored)
    tables = np.random.default_rng(1).permutation(num_blocks).astype(np.int32).reshape(NUM_SEQS, -1)
    options = OPTIONS[variant.options]
    rows = NUM_SEQS * NUM_HEADS
    visible = rows * min(SEQ_LEN, options.get("window", SEQ_LEN)) * variant.head_dim * k_cache.itemsize
    partial_sums = rows * (SEQ_LEN // 512) * variant.head_dim * 4
    name = variant.kernel.removesuffix("_reduce")
    call = partial(
        attention.decode_attention,
        *(q, k_cache, v_cache, tables, np.full(NUM_SEQS, SEQ_LEN, np.int32)),
        **{"layout": "vllm", "kernel": name, "backend": "emulator", **coded, **options},
    )
    if name == variant.kernel:
        return Work(call, {"K": (("k_cache",), visible), "V": (("v_cache",), visible)})
    return Work(call, {"read": (("tmp_out",), partial_sums)}, (("out",), q.nbytes))


def _cache_work(variant: Variant) -> Work:
    """256 consecutive tokens of 2 KV heads in random blocks; for copy_blocks, half of the blocks."""
    layout, num_blocks = cast(Layout, variant.options), NUM_TOKENS // variant.block_size
    k_cache, v_cache, coded = _caches(variant, layout, num_blocks)
    blocks = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
    both = ("k_cache", "v_cache")
    call: Callable[[], Any]
    if variant.kernel == "copy_blocks":
        call = partial(caches.copy_blocks, k_cache, v_cache, blocks.reshape(-1, 2).astype(np.int64), backend="emulator")
        names, nbytes = ("source[0]", "source[1]"), k_cache.nbytes
        return Work(call, {"read": (names, nbytes)}, (names, nbytes))
    place: dict[str, Any] = {"layout": layout, "backend": "emulator", **coded}
    cache_bytes = 2 * k_cache.nbytes
    if variant.kernel == "gather_kv":
        call = partial(caches.gather_kv, k_cache, v_cache, blocks, NUM_TOKENS, **place)
        return Work(call, {"read": (both, cache_bytes)}, (("k", "v"), cache_bytes * (4 if coded else 1)))
    k = _normal((NUM_TOKENS, NUM_HEADS, variant.head_dim), FORMATS[variant.kind].stored)
    slots = (blocks[:, None] * np.int64(variant.block_size) + np.arange(variant.block_size)).reshape(-1)
    call = partial(caches.write_kv, k, k.copy(), k_cache, v_cache, slots, **place)
    return Work(call, {"read": (("k", "v"), 2 * k.nbytes)}, (both, cache_bytes))


def _merge(variant: Variant) -> Work:
    """A merge of states with 64 rows of 2 heads."""
    num_states = int(variant.options.split()[0])
    outs = [_normal((NUM_ROWS, NUM_HEADS, variant.head_dim), FORMATS[variant.kind].stored) for _ in range(num_states)]
    lses = [np.zeros((NUM_ROWS, NUM_HEADS), np.float32) for _ in outs]
    names = tuple(f"outs[{i}]" for i in range(num_states))
    call = partial(attention.merge_states, outs, lses, backend="emulator")
    return Work(call, {"read": (names, num_states * outs[0].nbytes)}, (("out",), outs[0].nbytes))


WORK: dict[str, Callable[[Variant], Work]] = {
    **{
        "split": _split,
        "prefill": _prefill,
        "prefill_split": _prefill,
        "v1": _attention,
        "v2": _attention,
        "v2_reduce": _attention,
        "merge_states": _merge,
    },
    **dict.fromkeys((WGMMA, *STRETCHES), _prefill),
    **{"write_kv": _cache_work, "gather_kv": _cache_work, "copy_blocks": _cache_work},
}
