"""Only the rows of K and V that some query sees are read: nothing left of the window, past the end, of other blocks."""

import numpy as np

from ..support.devices import emulator
from .kernels import DECODE, FEW_ROWS, FEW_ROWS_SPLIT, PREFILL, PREFILL_CORES, WGMMA, each_emulated


def rows_of(problem, sequences, positions):
    """Which elements of K hold these tokens, and which of V; v1 and v2 read V in vectors of 16 bytes along tokens."""
    p = problem.spec.block_size
    block, offset = problem.block_tables[sequences, positions // p], positions % p
    keys, values = np.zeros(problem.k_cache.shape, bool), np.zeros(problem.v_cache.shape, bool)
    if problem.spec.layout == "NHD":
        keys[block, offset] = values[block, offset] = True
        return keys, values
    keys[block, :, :, offset] = True
    per_vector = 16 // problem.v_cache.itemsize
    for i in range(per_vector):
        values[block, :, :, offset // per_vector * per_vector + i] = True
    return keys, values


@each_emulated(*DECODE)
def test_decode_reads_what_its_windows_see_once(kernel):
    window, lengths = 300 if kernel.kernel == "split" else 70, (607, 40)
    problem = kernel.build(seq_lens=lengths, window=window, num_kv_heads=1, group_size=kernel.spec.group_size)
    device = emulator(footprint=True)
    kernel.attend(problem, device=device)
    sequences = np.repeat(np.arange(len(lengths)), [min(window, n) for n in lengths])
    positions = np.concatenate([np.arange(max(0, n - window), n) for n in lengths])
    footprint = device.launches[0].footprint
    for name, rows in zip(("k_cache", "v_cache"), rows_of(problem, sequences, positions), strict=True):
        footprint.expect(name, read=rows, written=False)
    footprint.expect("seq_lens", read=True)


@each_emulated(PREFILL, PREFILL_CORES, FEW_ROWS, WGMMA)
def test_prefill_reads_what_its_chunk_sees_once(kernel):
    """Behind the chunk, the caches hold 150 tokens more; no tile of unseen keys is made of others."""
    length, window = (FEW_ROWS_SPLIT + 60, 600) if kernel is FEW_ROWS else (250, 40)
    whole = kernel.build(seq_lens=(length + 150,), query_lens=(1,))
    problem = kernel.build(seq_lens=(length,), query_lens=(5,), window=window)
    problem.block_tables, problem.k_cache, problem.v_cache = whole.block_tables, whole.k_cache, whole.v_cache
    device = emulator(footprint=True, stats=True)
    kernel.attend(problem, device=device)
    first, tile = length - 5 - window + 1, kernel.edge
    positions, launch = np.arange(first, length), device.launches[0]
    num_tiles = (length - 1) // tile - first // tile + 1
    for name, rows in zip(("k_cache", "v_cache"), rows_of(problem, 0 * positions, positions), strict=True):
        launch.footprint.expect(name, read=rows, written=False)
        assert launch.buffers[name].bytes_read <= num_tiles * tile * whole.k_cache[0, 0].nbytes
