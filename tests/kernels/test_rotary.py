"""The kernel of apply_rotary on the emulator: the bits of the CPU."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import pagedkv
from pagedkv.compiler.compile import compile_kernel
from pagedkv.cuda.bad_entries import raise_if_failed
from pagedkv.cuda.plans import rotary
from pagedkv.emulator import MemoryFault
from pagedkv.kernels.rotary import RotaryConfig, make_apply_rotary
from pagedkv.validation.rotary import rotary_call

from ..machine_code.sass import code_of
from ..support.bits import bits
from ..support.devices import emulator
from ..support.problems import FLOATS
from ..support.rotary_cases import tables_of, tokens_of
from .block_cases import SparseDevice, assert_links, every_third_for_all, with_gaps, without_device

# Every dtype, of tables too, vectors of every size, all of a head and a part of it: one compile each.
CONFIGS = [
    RotaryConfig("float32", "float32", 24, 16),
    RotaryConfig("float16", "float32", 64, 64),
    RotaryConfig("bfloat16", "bfloat16", 64, 24, interleaved=True),
    RotaryConfig("bfloat16", "float32", 16, 2),
    RotaryConfig("float16", "float16", 8, 6, interleaved=True),
    RotaryConfig("float32", "float32", 48, 24, interleaved=True, checked=True),
]
OF_MODELS = [
    RotaryConfig("float16", "float32", 128, 128),
    RotaryConfig("bfloat16", "float32", 512, 512, interleaved=True),
]


def call_of(q, k, cos, sin, positions, *, out=None, interleaved=False, check=False):
    return rotary_call(q, k, cos, sin, positions, out=out, interleaved=interleaved, backend="emulator", check=check)


def arguments_of(config, rng, num_tokens=6, num_heads=(5, 2), max_positions=40):
    q, k = tokens_of(rng, num_tokens, num_heads, config.head_dim, FLOATS[config.kind])
    tables = tables_of(rng, max_positions, config.rotary_dim // 2, FLOATS[config.table_kind])
    return q, k, *tables, rng.integers(0, max_positions, num_tokens)


def run(call, q_out, k_out, open_device=emulator, **checks):
    """Run the kernel with every check on; its footprint, which a GPU has not."""
    with open_device(global_race=True, footprint=True, **checks) as device:
        rotary.apply_rotary(device, call, q_out, k_out)
    return device.launches[-1].footprint


@settings(max_examples=30)
@given(
    config=st.sampled_from(CONFIGS),
    num_tokens=st.integers(1, 30),
    num_heads=st.tuples(st.integers(0, 9), st.integers(1, 3)),
    where=st.sampled_from(["new", "gaps", "in place", "q in place"]),
    wide=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_bits_of_the_cpu(config, num_tokens, num_heads, where, wide, seed, open_device):
    rng = np.random.default_rng(seed)
    q, k, *tables, positions = arguments_of(config, rng, num_tokens, num_heads)
    positions = positions.astype(np.int64 if wide else np.int32)
    # Infinities, subnormals and what overflows, but no NaN: its bits are each machine's own.
    q[rng.random(q.shape) < 0.1] = rng.choice([np.inf, -np.inf, 1e-7, 6e4, -0.0])
    interleaved = config.interleaved
    expected = pagedkv.apply_rotary(q, k, *tables, positions, interleaved=interleaved)
    inputs = [bits(x).copy() for x in (q, k)]
    q_out, k_out = (np.full(x.shape, np.nan, x.dtype) for x in (q, k))
    if where == "gaps":
        q_out, k_out = with_gaps(q_out, 1), with_gaps(k_out, 2)
    elif where != "new":
        q_out, k_out = q, k_out if where == "q in place" else k
    call = call_of(q, k, *tables, positions, out=(q_out, k_out), interleaved=interleaved, check=config.checked)
    footprint = run(call, q_out, k_out, open_device, seed=seed)
    for x, wanted in zip((q_out, k_out), expected, strict=True):
        nan = np.isnan(wanted.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(x.astype(np.float32)), nan)
        np.testing.assert_array_equal(bits(x)[~nan], bits(wanted)[~nan])
    if where in ("new", "gaps"):
        for x, before in zip((q, k), inputs, strict=True):
            np.testing.assert_array_equal(bits(x), before)
        if footprint is not None:
            for name in ("q_out", "k_out"):
                footprint.expect(name, read=False, written=True)


@pytest.mark.parametrize(("config", "capability"), every_third_for_all([*CONFIGS, *OF_MODELS]), ids=str)
def test_configs_link_without_spills(config, capability):
    assert_links(make_apply_rotary, config, capability)


def test_rows_and_tables_move_in_vectors_of_16_bytes():
    for config in OF_MODELS:
        ptx = compile_kernel(make_apply_rotary, config).ptx
        assert "ld.global.v4." in ptx
        assert "ld.global.nc.v4.f32" in ptx
        assert "st.global.v4.u32" in ptx


@pytest.mark.parametrize(
    ("config", "capability"),
    [(OF_MODELS[0], (8, 0)), (OF_MODELS[0], (9, 0)), (OF_MODELS[1], (10, 0))],
    ids=["cc8.0", "cc9.0", "cc10.0"],
)
def test_no_product_is_fused_with_a_sum_in_machine_code(config, capability):
    """The emulator runs PTX, and ptxas is who would fuse them: its bits would not be those of a GPU."""
    multiply, add, multiply_add = 0x20, 0x21, 0x23  # FMUL, FADD, FFMA: the low 9 of an instruction's 128 bits
    kernel = compile_kernel(make_apply_rotary, config, capability)
    code = code_of(kernel.linked.cubin, kernel.entry)
    operations = Counter(int.from_bytes(code[i : i + 2], "little") & 0x1FF for i in range(0, len(code), 16))
    assert [operations[x] for x in (multiply, add, multiply_add)] == [4 * config.pairs, 2 * config.pairs, 0]


def test_a_position_without_a_row_is_skipped_and_reported_once(open_device):
    rng = np.random.default_rng(1)
    q, k, *tables, _ = arguments_of(CONFIGS[-1], rng)
    good = np.array([39, 0, 7, 7, 0, 1])
    expected = pagedkv.apply_rotary(q, k, *tables, good, interleaved=True)
    q_out, k_out = (np.full(x.shape, np.nan, x.dtype) for x in (q, k))
    call = call_of(q, k, *tables, good, interleaved=True, check=True)
    bad = np.array([39, 40, 7, -1, 2**40, 1])
    with open_device(global_race=True, seed=3) as device:
        rotary.apply_rotary(device, call._replace(positions=bad), q_out, k_out)
        text = rf"^positions must be in 0..max_positions-1, got (40 for token 1|-1 for token 3|{2**40} for token 4)$"
        with pytest.raises(IndexError, match=text):
            raise_if_failed([device])
        raise_if_failed([device])
    for x, wanted in zip((q_out, k_out), expected, strict=True):
        np.testing.assert_array_equal(x[[0, 2, 5]], wanted[[0, 2, 5]])
        assert np.isnan(x[[1, 3, 4]]).all()


def test_unchecked_a_position_without_a_row_is_a_fault_on_the_emulator():
    q, k, *tables, positions = arguments_of(CONFIGS[0], np.random.default_rng(2))
    call = call_of(q, k, *tables, positions)
    positions = positions + 2**31
    with pytest.raises(MemoryFault, match="out of bounds"):
        run(call._replace(positions=positions), q.copy(), k.copy())


def test_more_heads_than_a_grid_has_rows(monkeypatch, open_device):
    monkeypatch.setattr(rotary, "LARGEST_GRID_Y", 2)
    q, k, *tables, positions = arguments_of(CONFIGS[0], np.random.default_rng(3), num_heads=(11, 4))
    expected = pagedkv.apply_rotary(q, k, *tables, positions)
    call = call_of(q, k, *tables, positions)
    run(call, q, k, open_device)
    np.testing.assert_array_equal(q, expected[0])
    np.testing.assert_array_equal(k, expected[1])


def test_in_place_nothing_but_the_rotated_dims_is_touched(open_device):
    q, _, *tables, positions = arguments_of(CONFIGS[0], np.random.default_rng(4))
    footprint = run(call_of(q, None, *tables, positions), q, None, open_device)
    if footprint is not None:
        rotated = np.broadcast_to(np.arange(24) < 16, q.shape)
        footprint.expect("q", read=rotated, written=rotated)


def test_nothing_is_launched_for_no_tokens_and_no_heads():
    for shape in ((0, 2, 24), (2, 0, 24)):
        q = np.empty(shape, np.float32)
        tables = np.ones((2, 3, 8), np.float32)
        call = call_of(q, None, *tables, np.zeros(len(q), np.int64))
        without_device().apply_rotary(call, q, None)


def test_rows_of_tables_past_2_31_elements():
    """Row 0 is at the front of each table, and two others are 8 GiB from it."""
    q, k, *small, _ = arguments_of(CONFIGS[0], np.random.default_rng(5), max_positions=3)
    near = np.array([0, 1, 2, 2, 1, 0])
    expected = pagedkv.apply_rotary(q, k, *small, near)
    max_positions = 2**31 // 8 + 3
    tables = [np.empty((max_positions, 8), np.float32) for _ in small]
    rows = np.array([0, max_positions - 2, max_positions - 1])
    device = SparseDevice()
    for name, large, table in zip(("cos", "sin"), tables, small, strict=True):
        device.address(name, large)
        device.large[name].view()[rows] = table
        device.large[name].mark(True, rows)
    call = call_of(q, k, *small, near)._replace(cos=tables[0], sin=tables[1], positions=rows[near])
    with device:
        rotary.apply_rotary(device, call, q, k)
    for x, wanted in zip((q, k), expected, strict=True):
        np.testing.assert_array_equal(x, wanted)
