"""What the split kernel is compiled for and how it is launched, from metadata alone."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.buckets import bucket
from pagedkv.compiler.compile import compile_kernel
from pagedkv.cuda.plans import split
from pagedkv.kernels.split.config import (
    FEW_SPLITS,
    FULL_GRID,
    MOST_SPLITS,
    SHORTEST_SPLIT,
    SPLIT_UNIT,
    VECTOR_BYTES,
    SplitConfig,
)
from pagedkv.kernels.split.cuda_cores import LaneShape
from pagedkv.kernels.split.kernel import dynamic_bytes, make_split
from pagedkv.kernels.split.lanes import slots_bytes
from pagedkv.kernels.split.tensor_cores.stages import StageShape

from ...attention.kernels import CUDA_CORES, MANY_HEADS, SPLIT, decode_kernel
from ...machine_code.sass import code_of, loop_of
from ...support.device_fakes import RecordingDevice, without_code
from ...support.strategies import long

MOST_SHARED = 99 * 1024  # of a thread block on GPUs of compute capability 8.6, 8.9 and 12.0


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_rows_and_queries_of_many_heads_fit_into_the_shared_memory_of_every_gpu(head_dim):
    for group_size, q_kind, kv_kind, architecture in product(
        (17, 32, 33, 64, 71), ("float16", "bfloat16"), ("float16", "bfloat16", "fp8_e4m3"), (8, 9)
    ):
        config = SplitConfig(head_dim, group_size, 16, q_kind, kv_kind, architecture=architecture)
        states = 2 * 4 * config.num_warp_groups * config.num_heads
        assert dynamic_bytes(config) + slots_bytes(config) + states + 128 <= MOST_SHARED
        assert SPLIT_UNIT % StageShape(config).tokens == 0


def test_loops_on_cuda_cores_have_no_code_for_lanes_that_diverge():
    kernel = compile_kernel(make_split, SplitConfig(8, 4, 16, "float32", "float32"))
    loop = loop_of(code_of(kernel.cubin, kernel.entry), (9, 0), 8)
    assert loop.instructions <= 44 * 32 * loop.bytes_loaded / 512  # 46 with such code


@pytest.mark.parametrize(
    ("group_size", "q_kind", "kv_kind"),
    [(33, "bfloat16", "bfloat16"), *long([(17, "bfloat16", "fp8_e5m2")])],
)
def test_rows_that_are_no_power_of_two_compile_with_lines_too(group_size, q_kind, kv_kind):
    """NVVM has left jumps to a block that it had removed, for 9 pieces of a row and kernels with lines."""
    compile_kernel(make_split, SplitConfig(72, group_size, 17, q_kind, kv_kind), (9, 0), lineinfo=True)


@pytest.mark.parametrize("architecture", [8, 9, 10])
@pytest.mark.parametrize(
    ("q_kind", "kv_kind"),
    [("float32", "float32"), ("float32", "fp8_e4m3"), ("float16", "float16"), ("float16", "fp8_e4m3")],
)
def test_wide_offsets_change_no_order_of_additions(architecture, q_kind, kv_kind):
    """Who has which tokens, heads and dims: for up to 8 heads of 136 to 256 dims they once changed it before 9.0."""
    for head_dim, group_size, modified in product(range(8, 513, 8), (1, 8, 16, 48), (False, True)):
        plain = SplitConfig(*(head_dim, group_size, 16, q_kind, kv_kind), modified=modified, architecture=architecture)
        wide = replace(plain, wide=True)
        for name in ("num_tiles", "warps_for_heads", "warps_for_dims", "num_warp_groups", "threads_per_quad", "staged"):
            assert getattr(wide, name) == getattr(plain, name), (name, wide)
        if not plain.on_tensor_cores:
            assert LaneShape(wide).requests == LaneShape(plain).requests


@pytest.mark.parametrize(
    ("head_dim", "group_size", "q_kind", "num_tiles"),
    [
        *((128, 16, "float16", 1), (136, 8, "float16", 1), (136, 9, "float16", 2), (512, 16, "float16", 2)),
        *((256, 17, "float16", 1), (256, 64, "float16", 1), (256, 65, "float16", 2), (264, 17, "float16", 3)),
        *((128, 4, "float32", 1), (128, 5, "float32", 2), (136, 4, "float32", 2)),
    ],
)
def test_query_heads_share_a_thread_block_if_registers_are_enough(head_dim, group_size, q_kind, num_tiles):
    for architecture in (8, 9, 10):
        config = SplitConfig(head_dim, group_size, 16, q_kind, "float16", architecture=architecture)
        assert config.num_tiles == num_tiles


EDGES = sorted({n + e for i in range(7, 21) for n in (2**i, 3 * 2**i) for e in (-1, 0, 1)})


@pytest.mark.parametrize("group_size", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("kind", ["float32", "float16", "fp8_e4m3"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 32, 200])
def test_splits_cover_a_sequence_and_never_outnumber_the_grid(group_size, kind, num_kv_heads):
    config = SplitConfig(128, group_size, 16, "float32", kind)
    most = 0
    for n in sorted([*range(1, 10000, 37), *EDGES, 10**5, 2**31 - 1]):
        size = config.split_size(n, num_kv_heads)
        assert size % SPLIT_UNIT == 0
        most = max(most, -(-n // size))
        assert most <= config.most_splits(n, num_kv_heads) <= MOST_SPLITS


def test_splits_keep_half_of_a_large_gpu_busy_where_there_is_work():
    """Work is enough tokens: in splits of the shortest length they would be on half of 132 multiprocessors."""
    lengths = [length + more for length in (512, 2048, 4096, 8192, 32768, 131071) for more in (-1, 0, 1)]
    for kind, group_size in product(("float16", "fp8_e4m3"), (1, 4, 8)):
        config = SplitConfig(128, group_size, 16, "float16", kind)
        for num_kv_heads, num_seqs, seq_len in product((1, 2, 4, 8), (1, 2, 8, 64), lengths):
            heads = num_kv_heads * num_seqs
            if 2 * heads * -(-seq_len // SHORTEST_SPLIT) >= 132:
                assert 2 * heads * -(-seq_len // config.split_size(seq_len, num_kv_heads)) >= 132


@pytest.mark.parametrize("group_size", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("kind", ["float32", "float16", "fp8_e4m3"])
def test_partial_results_stay_small_beside_keys_and_values(group_size, kind):
    config = SplitConfig(128, group_size, 16, "float32", kind)
    traffic, row_traffic = 2 * 4 * group_size * (config.head_dim + 2), 2 * config.row_bytes
    for num_kv_heads in (1, 2, 8, 32):
        for n in EDGES:
            size = config.split_size(n, num_kv_heads)
            if n >= FEW_SPLITS * config.short_split:
                assert traffic <= 0.13 * size * row_traffic
            if n * num_kv_heads >= FULL_GRID * config.long_split:
                assert traffic <= 0.04 * size * row_traffic


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 5, 8])
def test_a_sequence_alone_makes_a_full_grid_before_its_splits_grow(num_kv_heads):
    """Then 256 tokens become 384, and one KV head that had 128 splits of 32,768 tokens has 86 of 32,769."""
    config = SplitConfig(128, 8, 16, "float16", "float16")
    for n in EDGES:
        count = -(-n // config.split_size(n, num_kv_heads))
        if n * num_kv_heads <= FULL_GRID * SHORTEST_SPLIT:
            assert count == -(-n // SHORTEST_SPLIT)
        else:
            assert count * num_kv_heads >= 86
    assert [-(-n // config.split_size(n, 1)) for n in (32_768, 32_769)] == [128, 86]


def plan_of(kernel, **fields):
    problem = kernel.build(**fields)
    call = kernel.call(problem)
    return split.plan(RecordingDevice(), call), call


@without_code()
def test_the_grid_follows_from_capacity_and_window():
    kernel = SPLIT
    plan, call = plan_of(kernel, seq_lens=(1000, 3), num_kv_heads=3)
    capacity = call.block_tables.shape[1] * 16
    assert plan.launches[0].grid == (6 * -(-capacity // SHORTEST_SPLIT), 1, 1)
    assert plan_of(kernel, seq_lens=(1000, 3), num_kv_heads=3, window=300)[0].launches[0].grid == (6 * 2, 1, 1)
    assert plan_of(kernel, seq_lens=(9, 3), num_kv_heads=3)[0].launches[0].grid == (6, 1, 1)
    two_tiles = decode_kernel("split", 64, 1, "float16", "fp8_e4m3", group_size=71)
    for kernel, softcap, num_tiles in ((MANY_HEADS, None, 1), (two_tiles, 2.0, 2)):
        tiles = plan_of(kernel, seq_lens=(9, 3), num_kv_heads=3, softcap=softcap)[0]
        assert tiles.launches[0].grid == (6 * num_tiles, 1, 1)
    assert plan_of(CUDA_CORES, seq_lens=(1000, 3), num_kv_heads=3, window=300)[0].launches[0].grid == (6, 2, 1)


@without_code()
def test_a_bound_leaves_few_units_without_work():
    """128 sequences of 512 tokens in tables of 131,072, as a CUDA graph has them."""
    kernel = decode_kernel("split", 128, 16, "float16", "float16", group_size=8)
    call = kernel.call(kernel.build(seq_lens=(1,), num_kv_heads=8))
    call = call._replace(
        q=np.broadcast_to(call.q, (128, *call.q.shape[1:])),
        block_tables=np.broadcast_to(call.block_tables[:, :1], (128, 131_072 // 16)),
    )
    splits = {}
    for bound in (512, 131_072):
        plan = split.plan(RecordingDevice(), call._replace(max_seq_len=bound))
        (launch,) = plan.launches
        splits[bound], num_columns = launch.scalars[3:5]
        assert num_columns == 128 * 8
        assert dict(plan.workspaces)["split_sums"] == 128 * 64 * splits[bound] * 128 * 4
        assert launch.grid == (RecordingDevice.num_blocks_at_once, 1, 1)
    assert splits == {512: 2, 131_072: 32}


@given(n=st.integers(1, 10**6))
def test_a_bound_that_is_rounded_up_covers_every_length_up_to_it(n):
    config = SplitConfig(128, 4, 16, "float16", "float16")
    assert n <= bucket(n) <= max(2 * n, 256)
    for num_kv_heads in (1, 8):
        assert -(-n // config.split_size(n, num_kv_heads)) <= config.most_splits(bucket(n), num_kv_heads)


@pytest.mark.parametrize(("head_dim", "kind", "vector"), [(64, "float16", 16), (8, "fp8_e4m3", 8)])
def test_offsets_are_wide_where_32_bits_do_not_count_the_vectors(head_dim, kind, vector):
    assert SplitConfig(head_dim, 1, 16, "float32", kind).vector_bytes == vector <= VECTOR_BYTES
    kernel = decode_kernel("split", head_dim, 16, "float32", kind, group_size=1)
    call = kernel.call(kernel.build(seq_lens=(5,), num_kv_heads=1))
    row = call.k_cache.strides[0]
    for num_blocks, is_wide in ((2**32 * vector // row, False), (2**32 * vector // row + 1, True)):
        shape = (num_blocks, *call.k_cache.shape[1:])
        large = np.lib.stride_tricks.as_strided(call.k_cache, shape, call.k_cache.strides)
        spec = replace(call.spec, num_blocks=num_blocks)
        wide = call._replace(k_cache=large, v_cache=large, spec=spec)
        assert split.split_config(wide, capability=(9, 0)).wide == is_wide


def test_more_thread_blocks_than_a_grid_has():
    call = SPLIT.call(SPLIT.build(seq_lens=(5,)))
    many = call._replace(q=np.broadcast_to(call.q, (2**30, *call.q.shape[1:])))
    with pytest.raises(ValueError, match=r"must be below 2\*\*31 on a device, got 2147483648"):
        split.plan(RecordingDevice(), many)
