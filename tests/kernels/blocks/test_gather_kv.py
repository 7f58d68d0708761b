"""The kernel of gather_kv on the emulator, bit by bit against the CPU's."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import pagedkv
from pagedkv import reference
from pagedkv.cuda.bad_entries import raise_if_failed
from pagedkv.cuda.device import FIRST_WITH_FP8
from pagedkv.cuda.plans import blocks
from pagedkv.emulator import EmulatorDevice, MemoryFault
from pagedkv.kernels.blocks.gather_kv import GatherConfig, make_gather_kv
from pagedkv.layouts import FORMATS
from pagedkv.validation.caches import gather_call

from ...support.bits import assert_same_bits_but_of_nan, bits
from ...support.devices import with_capability
from ...support.problems import POISONS
from ..block_cases import (
    BOTH_FP8,
    STRIDES,
    SparseDevice,
    assert_links,
    every_third_for_all,
    pair_of,
    without_device,
)

CONFIGS = [
    GatherConfig("float32", 8, 1),
    GatherConfig("float32", 48, 8, is_vllm=True, checked=True),
    GatherConfig("float16", 128, 16, checked=True),
    GatherConfig("float16", 24, 8, is_vllm=True),
    GatherConfig("bfloat16", 512, 3),
    GatherConfig("bfloat16", 64, 256, is_vllm=True),
    GatherConfig("fp8_e4m3", 8, 24, k_per_head=True, v_per_head=True),
    GatherConfig("fp8_e4m3", 48, 16, is_vllm=True),
    GatherConfig("fp8_e5m2", 40, 7, v_per_head=True, checked=True),
    GatherConfig("fp8_e5m2", 16, 32, is_vllm=True, k_per_head=True),
]


def arguments_of(config, layout, num_kv_heads, num_blocks, strides, rng):
    """Caches of any bits, and the options of the call."""
    parts = FORMATS[config.kind].parts(layout, num_blocks, config.block_size, num_kv_heads, config.head_dim)
    options = {"layout": layout, "kv_dtype": None, "k_scale": None, "v_scale": None}
    if config.kind.startswith("fp8"):
        options["kv_dtype"] = config.kind
        for name, per_head in (("k_scale", config.k_per_head), ("v_scale", config.v_per_head)):
            options[name] = rng.uniform(0.01, 3, num_kv_heads).astype(np.float32) if per_head else 1e-39
    return pair_of(parts, strides, rng), options


def new_results(call):
    dtype = call.spec.format.dense
    return np.full((2, call.seq_len, call.spec.num_kv_heads, call.spec.head_dim), 7, dtype)


def assert_same(result, expected):
    """The same bits, but for those of a NaN that has been multiplied."""
    if result.dtype == np.float32:
        assert_same_bits_but_of_nan(result, expected)
    else:
        np.testing.assert_array_equal(bits(result), bits(expected))


def call_of(k_cache, v_cache, block_table, seq_len, options):
    return gather_call(k_cache, v_cache, block_table, seq_len, backend="emulator", **options)


@st.composite
def gathers(draw):
    config = draw(st.sampled_from(CONFIGS))
    layout = "vllm" if config.is_vllm else draw(st.sampled_from(["NHD", "HND"]))
    size = config.block_size
    seq_len = draw(st.sampled_from([1, size, size + 1, 2 * size - 1]) | st.integers(1, 3 * size))
    return config, layout, seq_len, draw(st.integers(1, 3)), draw(st.sampled_from(STRIDES)), draw(st.integers(0, 2**16))


@settings(max_examples=60)
@given(gather=gathers())
def test_dense_rows_have_the_bits_of_the_cpu(gather, open_device):
    config, layout, seq_len, num_kv_heads, strides, seed = gather
    rng = np.random.default_rng(seed)
    num_used = -(-seq_len // config.block_size)
    caches, options = arguments_of(config, layout, num_kv_heads, num_used + 2, strides, rng)
    block_table = np.resize(np.array(POISONS["nan"][2], np.int32), num_used + 3)
    block_table[:num_used] = rng.permutation(num_used + 2)[:num_used]
    call = call_of(*caches, block_table, seq_len, options)._replace(checked=config.checked)
    results = new_results(call)

    with open_device(global_race=True, footprint=True, seed=seed) as device:
        blocks.gather_kv(device, call, *results)

    for result, expected in zip(results, pagedkv.gather_kv(*caches, block_table, seq_len, **options), strict=True):
        assert_same(result, expected)
    footprint = device.launches[-1].footprint
    if footprint is None:  # on a GPU
        return
    footprint.expect("block_table", read=np.arange(len(block_table)) < num_used, written=False)
    masks = [np.zeros(cache.shape, bool) for cache in caches]
    position = np.arange(seq_len)
    slots = block_table[position // config.block_size].astype(np.int64) * config.block_size
    ones = np.ones((seq_len, num_kv_heads, config.head_dim))
    reference.write_kv(ones, ones, *masks, slots + position % config.block_size, layout=layout)
    for name, mask in zip(("k_cache", "v_cache"), masks, strict=True):
        footprint.expect(name, read=mask, written=False)
    for name in ("k", "v"):
        footprint.expect(name, read=False, written=True)


@pytest.mark.parametrize(("config", "capability"), every_third_for_all(CONFIGS), ids=str)
def test_configs_link_without_spills(config, capability):
    assert_links(make_gather_kv, config, capability)
    if config.kind == "fp8_e4m3" and capability >= FIRST_WITH_FP8:
        assert_links(make_gather_kv, replace(config, hardware_fp8=True), capability)


@BOTH_FP8
@pytest.mark.parametrize("kind", reference.FP8_DTYPES)
def test_every_fp8_code(kind, capability, open_device):
    codes = np.arange(256, dtype=np.uint8).reshape(1, 32, 1, 8)
    block_table, scale = np.zeros(1, np.int32), np.array([0.3], np.float32)
    options = {"layout": "NHD", "kv_dtype": kind, "k_scale": scale, "v_scale": 1.0}
    call = call_of(codes, codes, block_table, 32, options)
    results = new_results(call)
    with with_capability(open_device(), capability) as device:
        blocks.gather_kv(device, call, *results)
    exact = codes.view(reference.FP8_DTYPES[kind]).astype(np.float32).reshape(results[0].shape)
    assert_same(results[0], exact * np.float32(0.3))
    assert_same(results[1], exact)


def small_call(seq_len=20, **changes):
    rng = np.random.default_rng(1)
    caches, options = arguments_of(CONFIGS[2], "NHD", 3, 4, "own", rng)
    call = call_of(*caches, np.array([2, 0], np.int32), seq_len, options)
    return call._replace(**changes)


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_a_block_that_is_not_there_is_skipped_and_reported(bad, open_device):
    call = small_call(block_table=np.array([2, bad], np.int32), checked=True)
    results, expected = new_results(call), new_results(call)
    pieces = reference.gather_kv(call.k_cache, call.v_cache, call.block_table, 16)
    for wanted, piece in zip(expected, pieces, strict=True):
        wanted[:16] = piece
    with open_device(global_race=True) as device:
        blocks.gather_kv(device, call, *results)
        with pytest.raises(
            IndexError, match=rf"^block_table must hold block ids in 0..num_blocks-1, got {bad} at column 1$"
        ):
            raise_if_failed([device])
        raise_if_failed([device])
    np.testing.assert_array_equal(bits(results), bits(expected))


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_unchecked_a_block_that_is_not_there_is_a_fault_on_the_emulator(bad):
    call = small_call(block_table=np.array([2, bad], np.int32))
    with pytest.raises(MemoryFault), EmulatorDevice() as device:
        blocks.gather_kv(device, call, *new_results(call))


def test_no_tokens_launch_nothing():
    call = small_call(seq_len=0)
    without_device().gather_kv(call, *new_results(call))


def test_more_heads_than_a_grid_has_rows(monkeypatch, open_device):
    monkeypatch.setattr(blocks, "LARGEST_GRID_Y", 2)
    call = small_call()
    results = new_results(call)
    with open_device(global_race=True) as device:
        blocks.gather_kv(device, call, *results)
    expected = pagedkv.gather_kv(call.k_cache, call.v_cache, call.block_table, call.seq_len)
    np.testing.assert_array_equal(bits(results), bits(np.stack(expected)))


def test_blocks_past_2_31_elements():
    small = small_call()
    num_blocks = 2**31 // small.k_cache[0].size + 4
    first = num_blocks - 4
    large = np.empty((num_blocks, *small.k_cache.shape[1:]), np.float16)
    call = small._replace(k_cache=large, v_cache=large, block_table=small.block_table + np.int32(first))
    results = new_results(small)
    device = SparseDevice()
    device.address("k_cache", large)
    device.address("v_cache", large)
    for name, cache in (("k_cache", small.k_cache), ("v_cache", small.v_cache)):
        device.large[name].view()[first:] = cache
        device.large[name].mark(True, np.s_[first:])
    with device:
        blocks.gather_kv(device, call, *results)
    expected = pagedkv.gather_kv(small.k_cache, small.v_cache, small.block_table, small.seq_len)
    np.testing.assert_array_equal(bits(results), bits(np.stack(expected)))
