"""What v1 and v2 alone do: partitions, shared memory for logits, whole sectors, registers."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pagedkv.compiler.compile import compile_kernel
from pagedkv.cuda.plans import paged
from pagedkv.kernels.paged.attention import make_v1, make_v2, static_shared_bytes
from pagedkv.kernels.paged.reduction import ReductionConfig, make_v2_reduce

from ...attention.drawn import MORE_PAGED, PAGED
from ...attention.kernels import PARTITION, V1, V2, assert_same_bits, each_emulated, each_kernel
from ...support.device_fakes import RecordingDevice, without_code
from ...support.devices import emulator
from ...support.problems import assert_close
from ...support.strategies import long

OF_8_DIMS = tuple(kernel for kernel in PAGED if kernel.spec.head_dim == 8)
CAPABILITIES = [(8, 0), (9, 0), (10, 0)]


def test_v1_and_v2_agree_where_there_is_one_partition(open_device):
    problem = V1.build(seq_lens=(0, 1, 200, PARTITION), sinks=True)
    v1, v2 = (replace(V1, kernel=kernel).attend(problem, open_device) for kernel in ("v1", "v2"))
    for x, y in zip(v1, v2, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6)


def on_a_sector(array):
    """A copy that begins at a multiple of 32 bytes, as what a device allocates does."""
    buffer = np.zeros(array.nbytes + 32, np.uint8)
    start = -buffer.__array_interface__["data"][0] % 32
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@each_emulated(*(k for k in PAGED if not k.spec.score_mod and k.spec.strides == "own"), long=tuple(MORE_PAGED))
def test_caches_are_read_in_whole_sectors(kernel):
    """Full blocks: K and V ask for at most 1.05 of the sectors that their bytes need."""
    length = 2 * max(128, kernel.spec.block_size)
    problem = kernel.build(seq_lens=(length,), num_kv_heads=1, group_size=1)
    problem.k_cache, problem.v_cache = on_a_sector(problem.k_cache), on_a_sector(problem.v_cache)
    device = emulator(stats=True)
    kernel.attend(problem, device=device)
    traffic = device.launches[0].buffers
    for name, cache in (("k_cache", problem.k_cache), ("v_cache", problem.v_cache)):
        nbytes = length * kernel.spec.head_dim * cache.itemsize
        assert traffic[name].bytes_read == nbytes
        assert traffic[name].sectors_read <= 1.05 * nbytes / 32


def test_more_logits_than_48_kib(open_device):
    problem = V1.build(seq_lens=(13_000, 7), num_kv_heads=1, group_size=1)
    assert_close(problem, *V1.attend(problem, open_device))


def test_more_partitions_than_the_grid_has_in_one_dimension(monkeypatch, open_device):
    monkeypatch.setattr(paged, "LARGEST_GRID_Y", 2)
    problem = V2.build(seq_lens=(5 * PARTITION + 9, 3))
    device = open_device(global_race=True)
    assert_close(problem, *V2.attend(problem, device=device))


@each_emulated(V1, V2)
@without_code()
def test_rows_of_many_sequences_are_in_x_of_the_grid(kernel):
    """Which has room for 2**31 thread blocks; y and z have room for 65,535."""
    problem = kernel.build(seq_lens=(5,), num_kv_heads=1, group_size=3)
    call = kernel.call(problem)
    many = call._replace(q=np.broadcast_to(call.q, (65_540, *call.q.shape[1:])))
    for launch in paged.plan(RecordingDevice(), many).launches:
        assert launch.grid == (65_540 * 3, 1, 1)


@each_kernel(long=OF_8_DIMS)
def test_more_sequences_than_a_grid_has_in_y_or_z(kernel, open_device):
    few, many = (kernel.build(seq_lens=(1, 3, 8, 5), num_kv_heads=1, group_size=1) for _ in range(2))
    where = np.array([0, 65_535, 65_536, 65_539])  # all others are empty
    for name in ("q", "block_tables", "seq_lens"):
        rows = np.zeros((where[-1] + 1, *getattr(few, name).shape[1:]), getattr(few, name).dtype)
        rows[where] = getattr(few, name)
        setattr(many, name, rows)
    many.out_buffer = many.out = np.empty_like(many.q)
    expected = [np.zeros(many.q.shape, many.q.dtype), np.full(many.q.shape[:2], -np.inf, np.float32)]
    for rows, values in zip(expected, kernel.attend(few, open_device), strict=True):
        rows[where] = values
    device = open_device(race=False, init_check=False)  # which the other tests look at, and which take their time
    assert_same_bits(kernel.attend(many, device=device), tuple(expected))


@pytest.mark.parametrize(
    ("kernel", "capability"),
    [
        *((kernel, kernel.capability) for kernel in PAGED),
        *long(case for case in product(PAGED, CAPABILITIES) if case[0].capability != case[1]),
        *long(product(MORE_PAGED, CAPABILITIES)),
    ],
    ids=str,
)
def test_every_variant_has_everything_in_registers(kernel, capability):
    problem = kernel.build(seq_lens=(1,))
    config = paged.attention_config(kernel.call(problem), capability=capability)
    compiled = compile_kernel(make_v1 if kernel.kernel == "v1" else make_v2, config, capability)
    assert ".extern .func" not in compiled.ptx
    resources = compiled.linked.resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
    assert resources.shared_bytes == static_shared_bytes(config)
    loads = re.findall(r"ld\.global\.nc\.(?:v(\d)\.)?[bfu](\d+)", compiled.ptx)
    widths = {int(count or 1) * int(bits) // 8 for count, bits in loads}
    of_scales = {4} if kernel.spec.has_scales else set()
    assert widths == ({16, 8} if config.block_size * config.kv_bytes == 8 else {16}) | of_scales


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_reduction_has_everything_in_registers(capability):
    kernel = compile_kernel(make_v2_reduce, ReductionConfig(512, "bfloat16"), capability)
    resources = kernel.linked.resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)


def test_more_partitions_than_the_reduction_has_threads(open_device):
    kernel = next(kernel for kernel in OF_8_DIMS if kernel.kernel == "v2")
    problem = kernel.build(seq_lens=(258 * PARTITION + 3, 7), num_kv_heads=1, group_size=2)
    assert_close(problem, *kernel.attend(problem, open_device))
