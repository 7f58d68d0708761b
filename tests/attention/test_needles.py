"""One key takes all the weight: the output is its value, which says in which block, offset and head it lies."""

import numpy as np

from ..support.problems import assert_close, expect
from ..support.strategies import SPLIT
from .kernels import (
    CPU_DECODE,
    CPU_PREFILL,
    CUDA_CORES,
    FEW_ROWS,
    FEW_ROWS_SPLIT,
    LONG,
    MANY_HEADS,
    PART,
    PREFILL_CORES,
    PREFILL_VLLM,
    PREFILLS,
    SPLIT_FP8,
    STAGES_OF_16,
    STRETCHES,
    V1,
    V2,
    WGMMA,
    each_kernel,
)
from .kernels import SPLIT as SPLIT_KERNEL

NEAR = (0, 1, 15, 16, 17, 31, 32, 63, 64, 127, 128, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT - 1, 2 * SPLIT)


def needles_of(kernel):
    """(length, query_len, positions of the needles), each position in a KV head of its own."""
    size, p = kernel.edge, kernel.spec.block_size
    if kernel in CPU_DECODE:
        for length in (2 * SPLIT + 77, 2 * SPLIT, 31):
            yield length, None, tuple(sorted({n for n in (*NEAR, length - 2, length - 1) if n < length}))
    elif kernel in CPU_PREFILL:
        yield 200, 200, (0, 1, 15, 16, 31, 32, 63, 64, 71, 72, 127, 128, 136, 167, 198, 199)
    elif kernel in (V1, V2):
        length = 2 * size + 5
        for needles in ((0, p - 1, p), (size - 1, size, length - 1), (size - p, 2 * size, 31)):
            yield length, None, needles
    elif kernel in (MANY_HEADS, STAGES_OF_16):  # every position of a stage
        for first in range(0, 32 if kernel is MANY_HEADS else 16, 8):
            yield size, None, tuple(range(first, first + 8))
    elif kernel.kernel == "split":  # every position of a step
        for first in (0, 8, 16, 24, size - 4):
            for length in (32, 2 * size) if first < 32 else (2 * size, size + 4):
                yield length, None, tuple(range(first, first + 8))
    elif kernel is FEW_ROWS:  # the ends of tiles, parts and splits
        needles = (0, 63, 64, PART - 1, PART, 3 * PART + 5, FEW_ROWS_SPLIT - 1, FEW_ROWS_SPLIT, FEW_ROWS_SPLIT + 33)
        yield FEW_ROWS_SPLIT + 40, 2, needles
    else:  # positions of a tile, of the rows at and past it
        for first in range(0, size, 32):
            yield size + 5, 6, tuple(range(first, first + 32, 3))


@each_kernel(
    *(*CPU_DECODE, *CPU_PREFILL, V1, V2, SPLIT_KERNEL, SPLIT_FP8, CUDA_CORES, MANY_HEADS, STAGES_OF_16),
    *(kernel for kernel in PREFILLS if kernel not in LONG),
    *(FEW_ROWS, WGMMA, STRETCHES),
    long=LONG,
)
def test_a_needle_brings_exactly_its_own_value(kernel, open_device):
    for length, query_len, needles in needles_of(kernel):
        if kernel.spec.is_fp8:  # whose integers end at 16
            needles = needles[-16:]
        fields = {"seq_lens": (length,), "query_lens": query_len and (query_len,), "num_kv_heads": len(needles)}
        if kernel in (V1, V2, PREFILL_CORES, PREFILL_VLLM):  # to which the size of a group is an argument
            fields["group_size"] = 1
        problem = kernel.build(**fields, needles=needles, fingerprint=True, kv_scales=None)
        out, lse = kernel.attend(problem, open_device)
        assert_close(problem, out, lse)
        if kernel.spec.softcap:
            continue
        exact, position = np.round(expect(problem)[0]), length - len(out) + np.arange(len(out))
        for head in range(problem.spec.num_heads):
            seen = position >= needles[head // problem.spec.group_size]
            np.testing.assert_allclose(out[seen, head].astype(np.float64), exact[seen, head], atol=1e-6, rtol=0)
