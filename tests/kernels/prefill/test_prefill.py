"""What the prefill kernels on tensor cores alone do: stages, warps, offsets, banks."""

from dataclasses import replace

import numpy as np
import pytest

from pagedkv.cuda.plans.prefill import suits_tensor_cores, tensor_config
from pagedkv.kernels.prefill.tensor_cores.tile import TileShape

from ...attention.drawn import MORE_PREFILLS
from ...attention.kernels import (
    ONE_STAGE,
    OPTIONS,
    PREFILL,
    PREFILL_CORES,
    PREFILL_FP8,
    PREFILLS,
    each_emulated,
    each_kernel,
)
from ...support.devices import emulator
from ...support.problems import assert_close, expect


def test_the_usual_kernels_differ_in_their_stages_and_tiles():
    calls = {kernel.name: kernel.call(kernel.build()) for kernel in PREFILLS}
    suited = {name: call for name, call in calls.items() if suits_tensor_cores(call)}
    shapes = {name: TileShape(tensor_config(call, capability=(9, 0))) for name, call in suited.items()}
    assert {name: (x.row_tiles, x.keys, x.stages, x.has_gap) for name, x in shapes.items()} == {
        "tensor cores": (2, 64, 2, False),
        "options": (1, 32, 2, True),
        "one stage": (1, 64, 1, False),
        "fp8": (2, 64, 1, False),
        "int8": (2, 64, 1, False),
    }


def test_eight_warps_have_the_bits_of_four():
    """With fp8 and more than 128 dims, shared memory has room for the queries of eight warps on 9.0, but not on 8.9."""
    kernel = MORE_PREFILLS["e5m2"]
    problem = kernel.build(seq_lens=(70,), query_lens=(20,), num_kv_heads=1)
    shapes = [TileShape(tensor_config(kernel.call(problem), capability=cc)) for cc in ((9, 0), (8, 9))]
    assert [(x.num_warps, x.rows) for x in shapes] == [(8, 128), (4, 64)]
    eight, four = (replace(kernel, capability=cc).attend(problem) for cc in ((9, 0), (8, 9)))
    assert_close(problem, *eight)
    for mine, other in zip(eight, four, strict=True):
        np.testing.assert_array_equal(mine, other)


@each_kernel(long=(PREFILL_CORES,))
def test_a_thousand_sequences_find_their_rows(kernel, open_device):
    lengths = tuple(np.random.default_rng(4).integers(0, 3, 1100).tolist())
    problem = kernel.build(seq_lens=lengths, query_lens=lengths, num_kv_heads=1, group_size=1)
    assert_close(problem, *kernel.attend(problem, open_device))


@each_kernel(OPTIONS)
def test_rows_whose_logits_are_all_far_below_zero_have_keys(kernel, open_device):
    problem = kernel.build(seq_lens=(50,), query_lens=(50,), softcap=1e36, scale=1e30)
    problem.q[...], problem.k_cache[...] = 10, -10
    out, lse = kernel.attend(problem, open_device)
    expected, expected_lse = expect(problem)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


@pytest.mark.parametrize(("kernel", "vector"), [(PREFILL, 16), (PREFILL_FP8, 8)], ids=str)
def test_offsets_are_wide_where_32_bits_do_not_count_the_vectors(kernel, vector):
    call = kernel.call(kernel.build(num_kv_heads=1, head_dim=64))
    block_bytes = call.k_cache.strides[0]
    for num_blocks, is_wide in ((2**32 * vector // block_bytes, False), (2**32 * vector // block_bytes + 1, True)):
        shape = (num_blocks, *call.k_cache.shape[1:])
        large = np.lib.stride_tricks.as_strided(call.k_cache, shape, call.k_cache.strides)
        wide = call._replace(k_cache=large, v_cache=large, spec=replace(call.spec, num_blocks=num_blocks))
        config = tensor_config(wide, capability=(9, 0))
        assert config.vector_bytes == vector
        assert config.wide == is_wide


@each_emulated(PREFILL, PREFILL_FP8, long=(ONE_STAGE, MORE_PREFILLS["fp8 as float16"]))
def test_lanes_that_store_and_load_together_meet_different_banks(kernel):
    device = emulator(stats=True)
    kernel.attend(kernel.build(seq_lens=(150,), query_lens=(40,)), device=device)
    (launch,) = device.launches
    most = 1.12 if kernel is PREFILL_FP8 else 1  # 5 of 8 lanes have a piece of 80 dims
    assert 0 < launch.shared_wavefronts <= most * launch.shared_wavefronts_min
