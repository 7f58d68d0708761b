"""What kernel split alone does: splits that grow, partial results that are merged, pivots of heads side by side."""

import re
from dataclasses import replace

import numpy as np
import pytest

from pagedkv.compiler.compile import CompiledKernel
from pagedkv.cuda.plans import attention
from pagedkv.cuda.plans.plan import run_plan
from pagedkv.cuda.plans.split import split_config
from pagedkv.emulator.state.order import Order
from pagedkv.kernels.split.config import FEW_SPLITS, FULL_GRID, SHORTEST_SPLIT

from ...attention.kernels import (
    CUDA_CORES,
    LOOPS,
    MANY_HEADS,
    SPLIT,
    SPLIT_FP8,
    SPLIT_INT8,
    assert_same_bits,
    decode_kernel,
    each_kernel,
    new_results,
)
from ...support.devices import emulator, few_at_once
from ...support.problems import assert_close, expect
from ...support.strategies import long


def config_of(kernel, problem=None):
    """What the kernel is compiled for in a call."""
    return split_config(kernel.call(problem or kernel.build(seq_lens=(1,))), capability=kernel.capability)


LONG = SHORTEST_SPLIT * FULL_GRID  # tokens of one KV head, from which on its splits grow
G12 = decode_kernel("split", 64, 16, "bfloat16", "bfloat16", group_size=12)
# Partial results of many heads are larger.
LONG_OF_MANY_HEADS = config_of(MANY_HEADS).short_split * FEW_SPLITS + 1


@pytest.mark.parametrize(
    ("length", "num_kv_heads", "kernel"),
    [
        pytest.param(
            *(length, num_kv_heads, kernel),
            id=f"{length}-{num_kv_heads}-{kernel}",
            # All loops get their tokens from the same split of the sequence.
            marks=[] if kernel is SPLIT or (kernel is CUDA_CORES and length == LONG + 1) else pytest.mark.long,
        )
        for kernel in LOOPS
        for length, num_kv_heads in ((LONG, 1), (LONG + 1, 1), (800, FULL_GRID // 2))
    ]
    + [pytest.param(LONG_OF_MANY_HEADS, 1, MANY_HEADS, id=f"{LONG_OF_MANY_HEADS}-1-many heads")],
)
def test_long_sequences_have_longer_splits_and_never_more_than_a_warp_merges(length, num_kv_heads, kernel, open_device):
    problem = kernel.build(seq_lens=(length, 7), num_kv_heads=num_kv_heads, sinks=True)
    assert_close(problem, *kernel.attend(problem, open_device))


@pytest.mark.parametrize(
    ("length", "num_kv_heads"), [(300, 1), (2047, 8), (2048, 8), (4500, 1), (800, 64), *long([(2300, 32)])]
)
def test_a_sequence_leaves_as_many_partial_results_as_the_host_says(length, num_kv_heads):
    problem = SPLIT.build(seq_lens=(length,), num_kv_heads=num_kv_heads)
    device = emulator(stats=True)
    SPLIT.attend(problem, device=device)
    config = config_of(SPLIT, problem)
    count = -(-length // config.split_size(length, num_kv_heads))
    written = device.launches[0].buffers["split_sums"].bytes_written
    assert written == count * problem.spec.num_heads * 64 * 4


@each_kernel(*LOOPS)
def test_counters_are_ready_for_the_next_launch(kernel, open_device):
    problem = kernel.build(seq_lens=(700, 3, 300), num_kv_heads=1, sinks=True)
    expected, call = kernel.attend(problem, open_device), kernel.call(problem)
    for seed in (1, 2):
        results = [new_results(problem) for _ in range(2)]
        with open_device(seed=seed, global_race=True) as device:
            for result in results:
                kernel.launch(device, call, *result)
        for result in results:
            assert_same_bits(result, expected)


@each_kernel(SPLIT, MANY_HEADS)
def test_the_thread_block_that_computes_a_unit_changes_no_bits(kernel, open_device):
    """All units to one, three that take turns, one for each; and thread blocks in another order.

    The two columns of 300 tokens have two splits of four: the others are only counted, one right after the other.
    """
    problem = kernel.build(seq_lens=(800, 3, 0, 300), num_kv_heads=2, sinks=True)
    expected = kernel.attend(problem, few_at_once(open_device, 1))
    assert_close(problem, *expected)
    for count, seed in ((3, 1), (3, 2), (1000, 3)):
        device = few_at_once(open_device, count)(seed=seed, global_race=True)
        assert_same_bits(kernel.attend(problem, device=device), expected)


def test_a_thread_block_reads_lengths_again_when_it_has_used_all():
    """One for all 130 units: it has read the lengths of 128."""
    problem = SPLIT.build(seq_lens=(*(1 + i % 3 for i in range(128)), 7, 5), num_kv_heads=1)
    assert_close(problem, *SPLIT.attend(problem, few_at_once(emulator, 1)))


def with_loads_for_prefetches(launch):
    """A launch whose prefetches are loads, which the emulator checks and records."""
    ptx = launch.kernel.ptx
    assert "prefetch.global.L2 [" in ptx
    ptx = re.sub(r"prefetch\.global\.L2 (\[.*?\]);", r"{ .reg .b32 unused; ld.global.u32 unused, \1; }", ptx)
    kernel = launch.kernel
    return replace(launch, kernel=CompiledKernel(kernel.name, kernel.entry, ptx, kernel.num_threads, kernel.capability))


def test_a_thread_block_prefetches_the_entries_of_its_split_beside_the_length():
    """Of a sequence as long as its table, whose splits have entries 0 .. 15, 16 .. 31 and 32 .. 39.

    Those of the units that it takes later have the lengths that these have.
    """
    problem = SPLIT.build(seq_lens=(600, 0), num_kv_heads=1)
    for count, entries in ((6, [0, 15, 16, 31, 32, 39]), (2, [0, 15])):
        read = prefetched(problem, count)
        assert np.flatnonzero(read[1]).tolist() == entries


def prefetched(problem, count):
    """Which entries of the block tables a launch of so many thread blocks reads or prefetches."""
    device, call, results = few_at_once(emulator, count)(footprint=True), SPLIT.call(problem), new_results(problem)
    plan = attention.plan(device, call._replace(out=results[0]))
    plan = replace(plan, launches=tuple(map(with_loads_for_prefetches, plan.launches)))
    run_plan(device, plan, call.q, call.caches, *results)
    return device.launches[0].footprint.read("block_tables")


def test_one_thread_of_a_block_fences_and_only_where_splits_are_merged(monkeypatch):
    """A fence waits for all that its multiprocessor has stored: once before a block counts a result that is merged."""
    fence, lanes = Order.fence, []

    def counted(order, what, m):
        lanes.append(order.frame.num_lanes if m is None else np.count_nonzero(m))
        fence(order, what, m)

    monkeypatch.setattr(Order, "fence", counted)
    problem = SPLIT.build(seq_lens=(3 * SHORTEST_SPLIT, SHORTEST_SPLIT, 2 * SHORTEST_SPLIT, 0), num_kv_heads=1)
    SPLIT.attend(problem)
    assert sum(lanes) == 3 + 2


MODIFIED = [kernel.replace("modified", alibi=True) for kernel in (SPLIT_FP8, SPLIT_INT8, G12)]


@each_kernel(*MODIFIED[:2], long=MODIFIED[2:])
def test_logits_that_rise_slowly_overflow_nothing_and_leave_other_heads_alone(kernel, open_device):
    """About two powers of two from one step of a warp to the next, for head 1; the others fall, head 3 by hundreds.

    Its P would overflow if its pivot moved with that of head 1.
    """
    problem = kernel.build(seq_lens=(2100,), num_kv_heads=1)
    slopes = problem.options["alibi_slopes"]
    slopes[...], slopes[1], slopes[3] = -0.012, 0.012, -2
    out, lse = kernel.attend(problem, open_device)
    assert_close(problem, out, lse)
    problem.q[:, 1] = np.nan  # whose maximum never grows
    others = np.arange(problem.spec.num_heads) != 1
    expected = out[:, others], lse[:, others]
    out, lse = kernel.attend(problem, open_device)
    assert_same_bits((out[:, others], lse[:, others]), expected)


@each_kernel(SPLIT, SPLIT_INT8, MANY_HEADS)
def test_logits_of_up_to_180_million_overflow_nothing_in_float16(kernel, open_device):
    for largest in (1.1e8, 1.8e8, -1.8e8):
        problem = kernel.build(seq_lens=(70,), num_kv_heads=1, scale=largest / 64)
        problem.k_cache[:] = 1
        if kernel.spec.has_scales:
            problem.options["k_scales"][:] = 1
        problem.q[:] = (np.arange(kernel.spec.group_size)[:, None] + 1) / kernel.spec.group_size
        out, _ = kernel.attend(problem, open_device)
        assert np.abs(out - expect(problem)[0]).max() <= 1e-3
