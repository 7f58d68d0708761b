"""A cache with windows gives the bits of one that keeps all blocks and is told the window in each call.

Blocks that nobody has hold NaN, so a kernel that reads one that was released says so.
"""

from itertools import pairwise

import numpy as np
import pytest

from pagedkv import PagedKVCache

from ...support.bits import bits
from ...support.strategies import each_of, fading_parity, long

WINDOWS = (None, 40, 9)
HEADS, DIM = 4, 64
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "ALiBi": {"alibi_slopes": np.geomspace(0.5, 0.01, HEADS, dtype=np.float32)},
    "sinks": {"sinks": np.linspace(-1, 2, HEADS, dtype=np.float32)},
    "score_mod": {"score_mod": fading_parity},
}
# Prompts that are shorter than a window, longer, and longer than a split of the CPU backend, in chunks; then steps.
LENS, CHUNKS, STEPS = (5, 70, 600), (0.0, 0.3, 0.8, 1.0), 12


def steps(lens, chunks, num_steps):
    """How many tokens each sequence gets in each step."""
    ends = [[int(length * part) for length in lens] for part in chunks]
    yield from (np.subtract(stop, start) for start, stop in pairwise(ends))
    yield from [np.ones(len(lens), np.int64)] * num_steps


def attended(has_windows, dtype, options, *, windows=WINDOWS, block_size=4, backend="auto", lens=LENS, num_steps=STEPS):
    """What all layers return in all steps, and how many blocks are in use at the end."""
    sizes = len(windows), 400 * len(windows), block_size, 1, DIM, dtype
    cache = PagedKVCache(*sizes, prefix_cache=False, **({"windows": windows} if has_windows else {}))
    rng, results = np.random.default_rng(0), []
    seqs = [cache.add(0).seq for _ in lens]
    for n in steps(lens, CHUNKS, num_steps):
        slots, batch = cache.append(seqs, n), None
        for array in (*cache.k_caches, *cache.v_caches):
            array[cache.pool.ref_counts == 0] = np.nan
        for layer, window in enumerate(windows):
            k, v = rng.standard_normal((2, n.sum(), 1, DIM)).astype(dtype)
            q = rng.standard_normal((n.sum(), HEADS, DIM)).astype(dtype)
            cache.write(layer, k, v, slots)
            batch = batch or cache.batch(seqs, 1 if (n == 1).all() else n)
            own = {} if has_windows else {"window": window}
            results += cache.attend(layer, q, batch, **options, **own, return_lse=True, backend=backend)
    return results, cache.stats().used


def assert_same(dtype, options, **how):
    results, used = attended(True, dtype, options, **how)
    expected, used_by_all = attended(False, dtype, options, **how)
    for x, y in zip(results, expected, strict=True):
        assert not np.isnan(x).any()
        np.testing.assert_array_equal(bits(x), bits(y))
    return used, used_by_all


@each_of("options", OPTIONS, "plain", "softcap", "ALiBi", "sinks")  # a score_mod is compiled for this alone
@pytest.mark.parametrize("dtype", ["float32", *long(["float16"])])
def test_windows_of_a_cache_change_no_bit(dtype, options):
    used, used_by_all = assert_same(dtype, options)
    assert used < 2 * used_by_all  # of blocks with one layer each, not three


@pytest.mark.usefixtures("without_lines")
def test_kernels_do_not_read_blocks_that_were_released():
    assert_same("float16", {}, windows=(None, 20), block_size=16, backend="emulator", lens=(3, 70), num_steps=2)
