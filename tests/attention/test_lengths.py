"""Attention is right at every length and window where a kernel goes on in another block, tile, partition or split."""

import numpy as np

from ..support.problems import assert_close, expect
from .kernels import BOTH_PREFILLS, CPU, LONG, MANY_HEADS, ON_DEVICE, QUICK, SPLIT, SPLIT_FP8, V1, each_kernel

WITH_EMPTY = (V1, SPLIT, *BOTH_PREFILLS)
# Many heads and fp8 have the steps of the other loop on tensor cores for masks.
MASKED_ALIKE = (MANY_HEADS, SPLIT_FP8)


def lengths_of(kernel):
    """0, 1, 2, and the numbers around those after which the kernel does something else."""
    ends = {kernel.spec.block_size, *(() if kernel.kernel in ("v1", "v2") else (16, 32, 64, 128)), kernel.edge}
    near = {n + more for n in ends if n <= kernel.edge for more in (-1, 0, 1)}
    return *sorted({0, 1, 2, *near}), *(() if kernel.is_prefill else (2 * kernel.edge + kernel.spec.block_size + 3,))


@each_kernel(*QUICK, long=LONG)
def test_lengths_at_the_boundaries(kernel, open_device):
    lengths = lengths_of(kernel)
    for causal in (True, False) if kernel.is_prefill and kernel.kernel == "cpu" else (True,):
        query_lens = lengths if kernel.is_prefill else None
        problem = kernel.build(seq_lens=lengths, query_lens=query_lens, num_kv_heads=1, causal=causal)
        assert_close(problem, *kernel.attend(problem, open_device))


@each_kernel(*(kernel for kernel in QUICK if kernel not in MASKED_ALIKE), long=(*MASKED_ALIKE, *LONG))
def test_windows_at_the_boundaries(kernel, open_device):
    """What lies left of the window is NaN in decode; a window of one key gives its value; the last ones see all.

    A value of int8 is rounded twice, since its scale is divided by the largest int16 and multiplied by it.
    """
    size = kernel.edge
    lengths = (0, 1, 18, size + 1, size + 100)
    query_lens = tuple(min(n, 20) for n in lengths) if kernel.is_prefill else None
    windows = (1, 2, 17, size - 1, size, size + 1, 2**32, 2**40 + 1)
    for window in windows[::3] if kernel.is_slow else windows:
        problem = kernel.build(seq_lens=lengths, query_lens=query_lens, window=window, num_kv_heads=1)
        out, lse = kernel.attend(problem, open_device)
        assert_close(problem, out, lse)
        if window == 1 and not kernel.is_prefill:
            exact = expect(problem)[0].astype(out.dtype)
            np.testing.assert_allclose(out, exact, rtol=2.0**-22 if problem.spec.has_scales else 0, atol=0)


@each_kernel(*CPU, *WITH_EMPTY, long=tuple(kernel for kernel in (*ON_DEVICE, *LONG) if kernel not in WITH_EMPTY))
def test_empty_sequences_stand_between_others(kernel, open_device):
    """Of more than a warp searches at once; what lies behind the last row of a sequence in `out` is not written."""
    rng = np.random.default_rng(3)
    lengths = (0, *rng.integers(0, 4, 40).tolist(), 70, *rng.integers(0, 4, 5).tolist(), 0, 0)
    query_lens = lengths if kernel.is_prefill else None
    for sinks in (False, True) if kernel in CPU else (True,):
        problem = kernel.build(
            seq_lens=lengths, query_lens=query_lens, padding_rows=4 * kernel.is_prefill, num_kv_heads=1, sinks=sinks
        )
        out, lse = kernel.attend(problem, open_device)
        assert_close(problem, out, lse)
        if not kernel.is_prefill:
            empty = problem.seq_lens == 0
            assert (out[empty].astype(np.float32) == 0).all()
            assert (lse[empty] == -np.inf).all()
