"""Plans of v1 and v2: what is launched follows from metadata alone."""

from typing import ClassVar

import numpy as np
import pytest

from pagedkv.calls import AttentionArguments
from pagedkv.cuda.plans import attention, paged
from pagedkv.cuda.plans.plan import run_plan
from pagedkv.validation.attention import attention_call

from ...support.device_fakes import RecordingDevice, without_code


@pytest.fixture(scope="module", autouse=True)
def _without_code():
    with without_code():
        yield


def call_of(kernel="auto", num_seqs=2, num_heads=4, max_blocks=4, block_size=16, head_dim=64, layout="vllm", **options):
    """A checked call over empty sequences; block_tables repeat one row, so that wide ones take little memory."""
    shapes = {
        "vllm": ((3, 2, head_dim // 4, block_size, 4), (3, 2, head_dim, block_size)),
        "NHD": ((3, block_size, 2, head_dim),) * 2,
    }[layout]
    q = np.broadcast_to(np.zeros((1, num_heads, head_dim), np.float32), (num_seqs, num_heads, head_dim))
    k_cache, v_cache = (np.zeros(shape, np.float32) for shape in shapes)
    tables = np.broadcast_to(np.zeros(max_blocks, np.int32), (num_seqs, max_blocks))
    options |= {"layout": layout, "kernel": kernel, "backend": "emulator", "return_lse": True}
    lens = np.zeros(num_seqs, np.int32)
    call = attention_call(AttentionArguments(q, k_cache, v_cache, tables, lens, **options))
    return call, np.zeros(q.shape, np.float32)


def plan_of(kernel="auto", **sizes):
    call, _ = call_of(kernel, **sizes)
    return attention.plan(RecordingDevice(), call)


@pytest.mark.parametrize(
    ("capacity", "num_rows", "expected"),
    [
        (0, 1, "v1"),
        (512, 1, "v1"),
        (513, 512, "v2"),
        (513, 513, "v1"),
        (8192, 513, "v1"),
        (8193, 10**6, "v2"),
        (8193, 1, "v2"),
    ],
)
def test_auto_is_the_rule_of_vllm(capacity, num_rows, expected):
    assert paged.choose("auto", capacity, num_rows) == expected
    assert [paged.choose(name, capacity, num_rows) for name in ("v1", "v2")] == ["v1", "v2"]


def test_v1_is_one_launch_with_a_thread_block_for_each_head_of_each_sequence():
    (launch,) = plan_of("v1", num_seqs=70_000, num_heads=2, max_blocks=1).launches
    assert launch.grid == (140_000, 1, 1)


def test_v2_is_two_launches_and_its_workspaces():
    plan = plan_of("v2", num_seqs=3, num_heads=4, max_blocks=100, head_dim=64)
    partitions, reduction = plan.launches
    assert (partitions.grid, reduction.grid) == ((12, 4, 1), (12, 1, 1))
    assert dict(plan.workspaces) == {"tmp_out": 12 * 4 * 64 * 4, "exp_sums": 12 * 4 * 4, "max_logits": 12 * 4 * 4}


def test_partitions_beyond_the_grids_second_dimension_use_the_third():
    partitions, reduction = plan_of("v2", num_seqs=1, num_heads=2, max_blocks=70_000 * 32).launches
    assert partitions.grid == (2, 65_535, 2)
    assert reduction.scalars[4] == 2 * 65_535


def test_a_window_needs_few_logits_and_partitions():
    (launch,) = plan_of("v1", max_blocks=10**6, window=100).launches
    assert launch.shared_bytes == 4 * 128  # 100 tokens touch 8 blocks of 16 at most
    assert plan_of("v2", max_blocks=10**6, window=100).launches[0].grid[1:] == (2, 1)


def test_logits_that_exceed_shared_memory_are_an_error_with_v1_alone():
    sizes = {"max_blocks": 4096, "block_size": 16}
    message = r'kernel "v1" .* of 65536 tokens .* 232448 .* 262144: give a lower max_seq_len, or use kernel "v2"$'
    with pytest.raises(ValueError, match=message):
        plan_of("v1", **sizes)
    with pytest.raises(ValueError, match=message):
        plan_of("v1", max_blocks=10**6, max_seq_len=32769)
    assert len(plan_of("v1", max_blocks=10**6, max_seq_len=32768).launches) == 1
    assert len(plan_of("auto", num_seqs=200, **sizes).launches) == 2
    assert len(plan_of("v1", max_blocks=3600).launches) == 1


def test_null_pointers_and_numbers_stand_for_what_is_not_given():
    class Recorder(RecordingDevice):
        names: ClassVar[list[str]] = []
        args: ClassVar[list[list[int | float]]] = []

        def address(self, name, array):
            self.names.append(name)
            return 1000 + len(self.names)

        def scratch(self, name, nbytes):
            return self.address(name, None)

        def launch(self, kernel, grid, args, shared_bytes=0):
            self.args.append(args)

    call, out = call_of("v1", scale=0.5, softcap=30.0)
    device = Recorder()
    run_plan(device, attention.plan(device, call), call.q, call.caches, out, None)
    assert sorted(device.names) == ["block_tables", "k_cache", "out", "q", "seq_lens", "v_cache"]
    (args,) = device.args
    assert [x == 0 for x in args[:13]] == [False, *[True] * 3, *[False] * 5, *[True] * 4]
    assert args[-4:] == [0.5, 30.0, 1.0, 1.0]
    assert {type(x) for x in args} == {int, float}


def test_strides_inside_of_a_block_choose_the_config():
    call, _ = call_of()
    assert paged.attention_config(call, capability=(9, 0)).packed
    spread = np.zeros((3, 2, 16, 17, 4), np.float32)[:, :, :, 1:]
    assert not paged.attention_config(call._replace(k_cache=spread), capability=(9, 0)).packed
    halves = np.zeros((3, 2, 2, 16, 16, 4), np.float32)[:, 0]
    assert paged.attention_config(call._replace(k_cache=halves), capability=(9, 0)).packed


WIDE = {"num_seqs": 128, "num_heads": 8, "max_blocks": 131_072 // 16}


def test_a_bound_leaves_v1_little_shared_memory():
    assert plan_of("v1", **WIDE, max_seq_len=512).launches[0].shared_bytes == 4 * 512
    assert plan_of("v1", **WIDE, max_seq_len=513).launches[0].shared_bytes == 4 * 1024
    assert plan_of("v1", num_seqs=128, max_blocks=40, max_seq_len=513).launches[0].shared_bytes == 4 * 640


def test_a_bound_leaves_v2_few_partitions_and_small_workspaces():
    plan = plan_of("v2", **WIDE, max_seq_len=1025, head_dim=64)
    partitions, reduction = plan.launches
    assert partitions.grid == (1024, 4, 1)
    assert dict(plan.workspaces) == {"tmp_out": 1024 * 4 * 64 * 4, "exp_sums": 1024 * 4 * 4, "max_logits": 1024 * 4 * 4}
    assert partitions.scalars[2] == reduction.scalars[1] == 2048  # what lengths are compared with
    assert plan_of("v2", **WIDE).launches[0].grid == (1024, 256, 1)


@pytest.mark.parametrize(("max_seq_len", "launches"), [(0, 1), (512, 1), (513, 1), (8192, 1), (8193, 2), (None, 2)])
def test_auto_looks_at_the_bound(max_seq_len, launches):
    assert len(plan_of("auto", **WIDE, max_seq_len=max_seq_len).launches) == launches


@pytest.mark.parametrize("kernel", ["v1", "v2", "split"])
def test_a_bound_beyond_the_tables_is_none(kernel):
    sizes = {"layout": "NHD" if kernel == "split" else "vllm", "max_blocks": 100}
    for max_seq_len in (None, 1600, 1601, 10**30):
        plan = plan_of(kernel, **sizes, max_seq_len=max_seq_len)
        assert plan == plan_of(kernel, **sizes)
        assert plan.launches[0].scalars[2] == 1600  # what lengths are compared with


@pytest.mark.parametrize("kernel", ["auto", "split"])
def test_other_layouts_have_a_kernel_of_their_own(kernel):
    (launch,) = plan_of(kernel, layout="NHD").launches
    assert launch.kernel.entry == "pagedkv_split"
