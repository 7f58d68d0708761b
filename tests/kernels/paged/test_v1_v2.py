"""v1 and v2 in the emulator, with all of its checks on, against the oracle."""

import math
import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.compiler.compile import compile_kernel
from pagedkv.cuda.plans import attention
from pagedkv.kernels.paged.attention import make_v1, make_v2, static_shared_bytes
from pagedkv.kernels.paged.reduction import ReductionConfig, make_v2_reduce

from ...support.device_fakes import RecordingDevice, without_code
from ...support.devices import emulator
from ...support.problems import assert_close, build, expect
from ...support.strategies import long
from ..decode_cases import V1, V2, Variant, after_changing_lengths, assert_same_bits, checked_call, decode
from .variants import MORE_VARIANTS, PARTITION, VARIANTS, specs

BOTH = pytest.mark.parametrize("variant", [V1, V2], ids=str)
CAPABILITIES = [(8, 0), (9, 0), (10, 0)]


@pytest.mark.parametrize("variant", [*VARIANTS, *long(MORE_VARIANTS)], ids=str)
@settings(max_examples=3)
@given(data=st.data())
def test_every_variant_meets_the_error_bound(variant, data, open_device):
    problem = build(data.draw(specs(variant)))
    assert_close(problem, *decode(problem, variant, open_device))


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_every_variant_meets_the_error_bound_more_often(variant, data, open_device):
    problem = build(data.draw(specs(variant)))
    assert_close(problem, *decode(problem, variant, open_device))


@BOTH
def test_lengths_at_the_boundaries(variant, open_device):
    p = variant.block_size
    lengths = (0, 1, p - 1, p, p + 1, PARTITION - 1, PARTITION, PARTITION + 1, 2 * PARTITION, 2 * PARTITION + p + 3)
    problem = build(variant.spec(seq_lens=lengths, num_kv_heads=1, group_size=3))
    assert_close(problem, *decode(problem, variant, open_device))


@BOTH
def test_a_needle_is_found_wherever_it_lies(variant, open_device):
    length, p = 2 * PARTITION + 5, variant.block_size
    for needles in ((0, p - 1, p), (PARTITION - 1, PARTITION, length - 1), (PARTITION - p, 2 * PARTITION, 31)):
        spec = variant.spec(seq_lens=(length,), num_kv_heads=3, group_size=1, needles=needles, fingerprint=True)
        problem = build(spec)
        out, lse = decode(problem, variant, open_device)
        assert_close(problem, out, lse)
        np.testing.assert_array_equal(out.astype(np.float32), np.round(expect(problem)[0]))


@BOTH
def test_the_bits_depend_on_neither_batch_nor_placement_nor_schedule(variant, open_device):
    spec = variant.spec(seq_lens=(700, 3, 65), num_kv_heads=1, softcap=20.0)
    out, lse = decode(build(spec), variant, open_device)
    for placement, order in ((5, (2, 0)), (6, (1,)), (7, (0, 0, 1, 2))):
        other = spec.replace(
            seq_lens=tuple(spec.seq_lens[i] for i in order), ids=order, placement_seed=placement, strides="halves"
        )
        assert_same_bits(decode(build(other), variant, open_device), (out[list(order)], lse[list(order)]))
    for seed in range(3):
        device = open_device(seed=seed, global_race=True)
        assert_same_bits(decode(build(spec), variant, device=device), (out, lse))


@BOTH
def test_all_threads_agree_on_a_length_that_changes_under_a_running_call(variant):
    problem = build(variant.spec(seq_lens=(PARTITION + 50, 3 * PARTITION), num_kv_heads=1))
    problem.block_tables %= len(problem.k_cache)  # entries past the lengths are used, too
    expected = decode(problem, variant)
    lengths = [0, 1, PARTITION, PARTITION + 1, 2 * PARTITION + 5, 3 * PARTITION, -1, 2**30]
    with emulator(init_check=False) as device:  # partitions that no thread block has left may be read
        call = checked_call(problem, variant.kernel)
        result = after_changing_lengths(device, call, attention.decode_attention, None, lengths, 0)
    assert_same_bits(result, expected)


def test_v1_and_v2_agree_where_there_is_one_partition(open_device):
    spec = V1.spec(seq_lens=(0, 1, 200, PARTITION), sinks=True)
    v1, v2 = (decode(build(spec), V1._replace(kernel=kernel), open_device) for kernel in ("v1", "v2"))
    for x, y in zip(v1, v2, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.score_mod], ids=str)
def test_every_key_masked(variant, open_device):
    """Heads whose scores are all -inf: 0 and -inf, or the sink's logit."""
    for sinks in (False, True):
        problem = build(variant.spec(seq_lens=(1, 40, 600), num_kv_heads=2, group_size=1, sinks=sinks))
        out, lse = decode(problem, variant, open_device)
        assert_close(problem, out, lse)
        assert (out[:, 1] == 0).all()
        np.testing.assert_array_equal(lse[:, 1], problem.options["sinks"][1] if sinks else np.float32(-math.inf))


@BOTH
def test_only_visible_keys_are_read_and_only_their_vectors_of_values(variant):
    p, window = variant.block_size, 70
    spec = variant.spec(seq_lens=(607, 40), window=window, num_kv_heads=1, group_size=1)
    problem = build(spec)
    device = emulator(footprint=True)
    decode(problem, variant, device=device)
    footprint = device.launches[0].footprint
    position = np.concatenate([np.arange(max(0, n - window), n) + 10**6 * i for i, n in enumerate(spec.seq_lens)])
    seq, position = position // 10**6, position % 10**6
    block, offset = problem.block_tables[seq, position // p], position % p
    keys = np.zeros(problem.k_cache.shape, bool)
    keys[block, :, :, offset] = True
    footprint.expect("k_cache", read=keys)
    values = np.zeros(problem.v_cache.shape, bool)
    per_vector = 16 // problem.v_cache.itemsize
    for i in range(per_vector):
        values[block, :, :, offset // per_vector * per_vector + i] = True
    footprint.expect("v_cache", read=values)
    footprint.expect("seq_lens", read=True)


def on_a_sector(array):
    """A copy that begins at a multiple of 32 bytes, as what a device allocates does."""
    buffer = np.zeros(array.nbytes + 32, np.uint8)
    start = -buffer.__array_interface__["data"][0] % 32
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize(
    "variant",
    [*(v for v in VARIANTS if not v.score_mod and v.strides == "own"), *long(MORE_VARIANTS)],
    ids=str,
)
def test_caches_are_read_in_whole_sectors(variant):
    """Full blocks: K and V ask for at most 1.05 of the sectors that their bytes need."""
    length = 2 * max(128, variant.block_size)
    problem = build(variant.spec(seq_lens=(length,), num_kv_heads=1, group_size=1))
    problem.k_cache, problem.v_cache = on_a_sector(problem.k_cache), on_a_sector(problem.v_cache)
    device = emulator(stats=True)
    decode(problem, variant, device=device)
    traffic = device.launches[0].buffers
    for name, cache in (("k_cache", problem.k_cache), ("v_cache", problem.v_cache)):
        nbytes = length * variant.head_dim * cache.itemsize
        assert traffic[name].bytes_read == nbytes
        assert traffic[name].sectors_read <= 1.05 * nbytes / 32


def test_more_logits_than_48_kib(open_device):
    problem = build(V1.spec(seq_lens=(13_000, 7), num_kv_heads=1, group_size=1))
    assert_close(problem, *decode(problem, V1, open_device))


def test_more_partitions_than_the_grid_has_in_one_dimension(monkeypatch, open_device):
    monkeypatch.setattr(attention, "LARGEST_GRID_Y", 2)
    problem = build(V2.spec(seq_lens=(5 * PARTITION + 9, 3)))
    device = open_device(global_race=True)
    assert_close(problem, *decode(problem, V2, device=device))


@BOTH
@without_code()
def test_rows_of_many_sequences_are_in_x_of_the_grid(variant):
    """Which has room for 2**31 thread blocks; y and z have room for 65,535."""
    problem = build(variant.spec(seq_lens=(5,), num_kv_heads=1, group_size=3))
    call = checked_call(problem, variant.kernel)
    many = call._replace(q=np.broadcast_to(call.q, (65_540, *call.q.shape[1:])))
    for launch in attention.plan(RecordingDevice(), many, many.q).launches:
        assert launch.grid == (65_540 * 3, 1, 1)


@pytest.mark.parametrize(
    "variant",
    long([Variant("v1", 8, 64, "bfloat16", "bfloat16"), Variant("v2", 8, 32, "float32", "float32")]),
    ids=str,
)
def test_more_sequences_than_a_grid_has_in_y_or_z(variant, open_device):
    spec = variant.spec(seq_lens=(1, 3, 8, 5), num_kv_heads=1, group_size=1)
    few, many = build(spec), build(spec)
    where = np.array([0, 65_535, 65_536, 65_539])  # all others are empty
    for name in ("q", "block_tables", "seq_lens"):
        rows = np.zeros((where[-1] + 1, *getattr(few, name).shape[1:]), getattr(few, name).dtype)
        rows[where] = getattr(few, name)
        setattr(many, name, rows)
    many.out_buffer = many.out = np.empty_like(many.q)
    expected = [np.zeros(many.q.shape, many.q.dtype), np.full(many.q.shape[:2], -np.inf, np.float32)]
    for rows, values in zip(expected, decode(few, variant, open_device), strict=True):
        rows[where] = values
    device = open_device(race=False, init_check=False)  # which the other tests look at, and which take their time
    assert_same_bits(decode(many, variant, device=device), tuple(expected))


@pytest.mark.parametrize(
    ("variant", "capability"),
    [
        *((variant, variant.capability) for variant in VARIANTS),
        *long(case for case in product(VARIANTS, CAPABILITIES) if case[0].capability != case[1]),
        *long(product(MORE_VARIANTS, CAPABILITIES)),
    ],
    ids=str,
)
def test_every_variant_has_everything_in_registers(variant, capability):
    problem = build(variant.spec(seq_lens=(1,)))
    config = attention.attention_config(checked_call(problem), capability=capability)
    kernel = compile_kernel(make_v1 if variant.kernel == "v1" else make_v2, config, capability)
    assert ".extern .func" not in kernel.ptx
    resources = kernel.linked.resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
    assert resources.shared_bytes == static_shared_bytes(config)
    loads = re.findall(r"ld\.global\.nc\.(?:v(\d)\.)?[bfu](\d+)", kernel.ptx)
    widths = {int(count or 1) * int(bits) // 8 for count, bits in loads}
    assert widths == ({16, 8} if config.block_size * config.kv_bytes == 8 else {16})


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_reduction_has_everything_in_registers(capability):
    kernel = compile_kernel(make_v2_reduce, ReductionConfig(512, "bfloat16"), capability)
    resources = kernel.linked.resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
