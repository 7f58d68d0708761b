"""write_kv with tables on the emulator: the bits of apply_rotary and then write_kv on the CPU."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import pagedkv
from pagedkv.compiler.compile import compile_kernel
from pagedkv.cuda.bad_entries import raise_if_failed
from pagedkv.cuda.plans import blocks
from pagedkv.emulator import MemoryFault
from pagedkv.kernels.blocks.write_kv import WriteConfig, make_write_kv
from pagedkv.layouts import FORMATS
from pagedkv.validation.caches import write_call

from ...machine_code.sass import code_of
from ...support.bits import assert_same_bits_but_of_nan, bits
from ...support.devices import emulator
from ...support.problems import FLOATS
from ...support.rotary_cases import tables_of
from ..block_cases import SparseDevice, assert_links, pair_of, with_gaps

# Halves and neighbours, rotated dims that end within a vector, parts of every size, tables of both dtypes, keys that
# are rounded once, twice and to fp8: one compile each.
CONFIGS = [
    WriteConfig("float32", "float32", "float32", 24, 3, rotary_dim=16),
    WriteConfig("float16", "float16", "float16", 64, 8, is_vllm=True, rotary_dim=12, table_kind="float16"),
    WriteConfig("bfloat16", "float32", "float32", 48, 3, rotary_dim=26, interleaved=True, checked=True),
    WriteConfig("fp8_e4m3", "bfloat16", "float32", 48, 8, k_per_head=True, rotary_dim=48, interleaved=True),
]
OF_A_MODEL = WriteConfig("bfloat16", "bfloat16", "bfloat16", 128, 16, rotary_dim=128)
MAX_POSITIONS = 40


def arguments_of(config, rng, num_tokens=6, num_kv_heads=2, layout="NHD", strides="own"):
    """The arguments of a call but for its slots, some of which are skipped, and its tables."""
    num_blocks = -(-num_tokens // config.block_size) + 2
    parts = FORMATS[config.kind].parts(layout, num_blocks, config.block_size, num_kv_heads, config.head_dim)
    shape = num_tokens, num_kv_heads, config.head_dim
    k, v = (rng.standard_normal(shape, np.float32).astype(FLOATS[kind]) for kind in (config.k_kind, config.v_kind))
    k_cache, v_cache = pair_of(parts, strides, rng)
    slots = rng.permutation(num_blocks * config.block_size)[:num_tokens]
    options = {"layout": layout, "kv_dtype": None, "k_scale": None, "v_scale": None}
    if config.kind.startswith("fp8"):
        options |= {"kv_dtype": config.kind, "k_scale": rng.uniform(0.01, 3, num_kv_heads).astype(np.float32)}
    return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots, **options}


def rotation_of(config, rng, num_tokens=6):
    cos, sin = tables_of(rng, MAX_POSITIONS, config.rotary_dim // 2, FLOATS[config.table_kind])
    positions = rng.integers(0, MAX_POSITIONS, num_tokens)
    return {"cos": cos, "sin": sin, "positions": positions, "interleaved": config.interleaved}


def expected_of(arguments, rotation):
    """The caches after apply_rotary and write_kv, on the CPU."""
    caches = [arguments[name].copy() for name in ("k_cache", "v_cache")]
    rotated = pagedkv.apply_rotary(arguments["k"], None, **rotation)[0]
    pagedkv.write_kv(**arguments | dict(zip(("k", "k_cache", "v_cache"), (rotated, *caches), strict=True)))
    return caches


def call_of(arguments, rotation, check=False):
    return write_call(**arguments, **rotation, backend="emulator", check=check)


@settings(max_examples=30)
@given(
    config=st.sampled_from(CONFIGS),
    layout=st.sampled_from(["NHD", "HND"]),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 3)),
    strides=st.sampled_from(["own", "padded"]),
    wide=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_bits_of_both_operations(config, layout, shape, strides, wide, seed, open_device):
    rng = np.random.default_rng(seed)
    arguments = arguments_of(config, rng, *shape, "vllm" if config.is_vllm else layout, strides)
    rotation = rotation_of(config, rng, shape[0])
    rotation["positions"] = rotation["positions"].astype(np.int64 if wide else np.int32)
    k = arguments["k"]
    # Infinities, subnormals and what overflows, but no NaN: its bits are each machine's own.
    k[rng.random(k.shape) < 0.1] = rng.choice([np.inf, -np.inf, 1e-7, 6e4, -0.0])
    if strides == "padded":
        arguments["k"] = with_gaps(k, 1)[::-1, ::-1]
    skipped = rng.random(shape[0]) < 0.2
    arguments["slots"][skipped] = -1 - rng.integers(2**40)
    expected = expected_of(arguments, rotation)
    rotation["positions"][skipped] = 10**9
    call = call_of(arguments, rotation, check=config.checked)
    with open_device(global_race=True, footprint=True, seed=seed) as device:
        blocks.write_kv(device, call)
        raise_if_failed([device])
    for name, wanted in zip(("k_cache", "v_cache"), expected, strict=True):
        assert_same_bits_but_of_nan(arguments[name], wanted, config.kind)
    footprint = device.launches[-1].footprint
    if footprint is not None:
        for name in ("k", "v", "cos", "sin"):
            footprint.expect(name, written=False)


@pytest.mark.parametrize("config", [*CONFIGS, OF_A_MODEL], ids=str)
def test_configs_link_without_spills(config):
    config = replace(config, hardware_fp8=config.kind.startswith("fp8"))
    assert_links(make_write_kv, config, (9, 0), max_registers=72)


def test_a_kernel_without_tables_is_as_short_as_ever():
    """The parameters of the tables come last, and it reads none of them."""
    ptx = compile_kernel(make_write_kv, WriteConfig("float16", "float16", "float16", 24, 3, checked=True)).ptx
    read = [i for i in range(32) if f"[pagedkv_write_kv_param_{i}]" in ptx]
    assert read
    assert max(read) < 25


def test_rows_and_tables_move_in_vectors_of_16_bytes():
    ptx = compile_kernel(make_write_kv, OF_A_MODEL).ptx
    assert "ld.global.nc.v4.f32" in ptx
    assert "ld.global.nc.v4.u32" in ptx
    assert "ld.global.nc.u16" not in ptx
    assert "st.global.v4.u32" in ptx


def test_no_product_is_fused_with_a_sum_in_machine_code():
    """As in apply_rotary, whose bits these are."""
    kernel = compile_kernel(make_write_kv, OF_A_MODEL)
    code = code_of(kernel.linked.cubin, kernel.entry)
    multiply, multiply_add = 0x20, 0x23  # FMUL, FFMA: the low 9 of an instruction's 128 bits
    operations = [int.from_bytes(code[i : i + 2], "little") & 0x1FF for i in range(0, len(code), 16)]
    assert operations.count(multiply) >= 2 * 8
    assert multiply_add not in operations


def test_a_position_without_a_row_is_skipped_and_reported_once(open_device):
    rng, config = np.random.default_rng(1), CONFIGS[2]
    arguments, rotation = arguments_of(config, rng), rotation_of(config, rng)
    good = rotation["positions"] = np.array([39, 0, 7, 7, 0, 1])
    call = call_of(arguments, rotation, check=True)
    bad = np.array([39, 40, 7, -1, 2**40, 1])
    kept = np.where(bad == good, arguments["slots"], -1)
    expected = expected_of(arguments | {"slots": kept}, rotation)
    with open_device(global_race=True, seed=3) as device:
        blocks.write_kv(device, call._replace(rotation=call.rotation._replace(positions=bad)))
        text = rf"^positions must be in 0..max_positions-1, got (40 for token 1|-1 for token 3|{2**40} for token 4)$"
        with pytest.raises(IndexError, match=text):
            raise_if_failed([device])
        raise_if_failed([device])
    for name, wanted in zip(("k_cache", "v_cache"), expected, strict=True):
        np.testing.assert_array_equal(bits(arguments[name]), bits(wanted))


def test_unchecked_a_position_without_a_row_is_a_fault_on_the_emulator():
    rng, config = np.random.default_rng(2), CONFIGS[0]
    arguments, rotation = arguments_of(config, rng), rotation_of(config, rng)
    call = call_of(arguments, rotation)
    beyond = call.rotation._replace(positions=call.rotation.positions + 2**31)
    with emulator() as device, pytest.raises(MemoryFault, match="out of bounds"):
        blocks.write_kv(device, call._replace(rotation=beyond))


def test_rows_of_tables_past_2_31_elements():
    """Row 0 is at the front of each table, and two others are 8 GiB from it."""
    rng, config = np.random.default_rng(5), CONFIGS[0]
    arguments, rotation = arguments_of(config, rng), rotation_of(config, rng)
    near = rotation["positions"] = np.array([0, 1, 2, 2, 1, 0])
    expected, call = expected_of(arguments, rotation), call_of(arguments, rotation)
    max_positions = 2**31 // 8 + 3
    tables = {name: np.empty((max_positions, 8), np.float32) for name in ("cos", "sin")}
    rows, device = np.array([0, max_positions - 2, max_positions - 1]), SparseDevice()
    for name, large in tables.items():
        device.address(name, large)
        device.large[name].view()[rows] = rotation[name][:3]
        device.large[name].mark(True, rows)
    with device:
        blocks.write_kv(device, call._replace(rotation=call.rotation._replace(positions=rows[near], **tables)))
    for name, wanted in zip(("k_cache", "v_cache"), expected, strict=True):
        np.testing.assert_array_equal(bits(arguments[name]), bits(wanted))
