"""A row has the same bits whatever else is in the batch, in every placement, layout, chunk and schedule."""

from itertools import pairwise

import numpy as np

from pagedkv.kernels.prefill.config import FEW_ROWS as MOST_FEW_ROWS

from ..support.problems import assert_close
from .drawn import FEW_ROW_KERNELS, STRETCH_KERNELS, WGMMAS
from .kernels import (
    ALL,
    BOTH_PREFILLS,
    CPU,
    CPU_PREFILL,
    CUDA_CORES,
    FEW_ROWS,
    FEW_ROWS_SPLIT,
    LONG,
    MANY_HEADS,
    PREFILL,
    PREFILL_INT8,
    SPLIT,
    STAGES_OF_16,
    STRETCHES,
    WGMMA,
    Kernel,
    assert_same_bits,
    each_kernel,
)

EVERYTHING = {"alibi": True, "sinks": True, "softcap": 5.0, "window": 600, "kv_scales": "per head"}
WITH_OPTIONS = tuple(kernel.replace("options", **EVERYTHING) for kernel in CPU if kernel.spec.layout != "vllm")


def batch_of(spec, order, **fields):
    """The sequences of a spec in another order, as fields, and which rows of the spec are theirs."""
    query_lens = spec.query_lens or (1,) * len(spec.seq_lens)
    starts = np.cumsum((0, *query_lens))
    rows = [np.arange(starts[i], starts[i + 1]) for i in order]
    fields |= {"seq_lens": tuple(spec.seq_lens[i] for i in order), "ids": tuple(order)}
    fields["query_lens"] = spec.query_lens and tuple(query_lens[i] for i in order)
    return fields, np.concatenate(rows)


def assert_same_elsewhere(kernel: Kernel, open_device, expected, **fields):
    """Sequences alone, in another order and twice, on other blocks, in other layouts and strides."""
    spec = kernel.spec
    last = len(spec.seq_lens) - 1
    layout = {"NHD": "HND", "HND": "NHD", "vllm": "vllm"}[spec.layout]
    strided = "halves" if spec.kv_format.coded or spec.layout == "vllm" else "strided"
    ways = [
        ([2, 0], {"placement_seed": 5, "layout": layout, "strides": strided}),
        ([last, 1, 0, *((2, 0) if kernel.kernel == "cpu" else ())], {"placement_seed": 6, "strides": "halves"}),
    ]
    for order, others in ways:
        other, rows = batch_of(spec, order, **others, **fields)
        result = kernel.attend(kernel.build(**other), open_device)
        assert_same_bits(result, tuple(x[rows] for x in expected))


@each_kernel(*ALL, *WITH_OPTIONS, STAGES_OF_16, long=LONG)
def test_the_bits_are_the_same_in_any_batch_placement_layout_and_schedule(kernel, open_device):
    if kernel.is_slow:
        kernel = kernel.replace("one KV head", num_kv_heads=1)
    expected = kernel.attend(kernel.build(), open_device)
    for i in (0, 2) if kernel.is_slow else range(len(kernel.spec.seq_lens)):
        alone, rows = batch_of(kernel.spec, [i])
        device = open_device(seed=1 + i, global_race=True) if open_device else None
        result = kernel.attend(kernel.build(**alone), device=device)
        assert_same_bits(result, tuple(x[rows] for x in expected))
    assert_same_elsewhere(kernel, open_device, expected)


def sized(kernels, *sizes):
    """The kernels for other block sizes, each of which is another compile on a device."""
    return tuple(kernel.replace(f"P{size}", block_size=size) for kernel in kernels for size in sizes)


ON_THE_CPU = sized((kernel for kernel in CPU if kernel.spec.layout != "vllm"), 1, 3, 256)
OF_OTHER_SIZES = sized((SPLIT, PREFILL, FEW_ROWS), 3)
MORE_SIZES = (
    *sized((SPLIT, PREFILL, FEW_ROWS), 1, 256),
    *sized((CUDA_CORES, MANY_HEADS), 1, 3, 256),
    *sized((STAGES_OF_16,), 1, 256),
    *sized((WGMMA,), 3, 1, 256),
)


@each_kernel(*ON_THE_CPU, *OF_OTHER_SIZES, long=MORE_SIZES)
def test_the_bits_are_the_same_for_any_block_size(kernel, open_device):
    usual = 16 if kernel.spec.group_size != 24 else 3
    expected = kernel.attend(kernel.build(block_size=usual), open_device)
    assert_same_elsewhere(kernel, open_device, expected, block_size=kernel.spec.block_size)


MORE_CHUNKS = (
    *(kernel for kernel in LONG if kernel not in (PREFILL_INT8, *STRETCH_KERNELS)),
    *(*WGMMAS[1:], *FEW_ROW_KERNELS[1:], *STRETCH_KERNELS[1:]),
)


@each_kernel(*CPU_PREFILL, *BOTH_PREFILLS, PREFILL_INT8, FEW_ROWS, WGMMA, STRETCHES, long=MORE_CHUNKS)
def test_a_row_has_the_same_bits_in_any_chunk(kernel, open_device):
    """With a scale of 4, pivots of some rows move in most tiles, and those of their neighbours do not."""
    length = query_len = 270 if kernel.kernel == "wgmma" else 150
    window = 20
    if kernel.name.startswith("few rows"):
        length, query_len, window = FEW_ROWS_SPLIT + 2, MOST_FEW_ROWS // kernel.spec.group_size, 600
    stops = sorted({0, 34, 77, query_len // 2, query_len - 1, query_len} & {*range(query_len + 1)})
    for fields in ({"scale": 4.0}, {"window": window, "sinks": True}):
        whole = kernel.build(seq_lens=(length,), query_lens=(query_len,), num_kv_heads=1, **fields)
        out, lse = kernel.attend(whole, open_device)
        assert_close(whole, out, lse)
        if kernel.spec.has_scales:  # of which the largest of a tile are those that rows see last
            scales, tokens, size = whole.options["v_scales"], np.arange(length), kernel.spec.block_size
            scales = scales if kernel.spec.layout == "NHD" else scales.swapaxes(1, 2)
            tokens = tokens[-query_len - (fields.get("window") or length) :]
            scales[whole.block_tables[0, tokens // size], tokens % size] *= 2.0 ** (tokens % 64 // 4)[:, None]
            out, lse = kernel.attend(whole, open_device)
        for seed, (start, stop) in enumerate(pairwise(stops if "scale" in fields else stops[::2])):
            part = kernel.attend_rows(whole, start, stop, open_device, seed=seed)
            assert_same_bits(part, (out[start:stop], lse[start:stop]))
