"""The kernel of merge_states on the emulator against the float64 oracle."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pagedkv import reference
from pagedkv.calls import MergeCall
from pagedkv.cuda.plans import merge
from pagedkv.emulator import EmulatorDevice
from pagedkv.kernels.merge_states import MergeConfig, make_merge_states

from ..support.bits import bits
from ..support.problems import FLOATS, error_bound
from ..support.strategies import long
from .block_cases import ON_HOST, SparseDevice, assert_links, every_third_for_all, with_gaps, without_device

# kind, head_dim and number of states: a compile for each, or a few for more than 8 states.
CASES = [
    ("float32", 64, 1),
    ("float32", 64, 8),
    ("float32", 6, 17),
    ("float16", 48, 2),
    ("float16", 3, 2),
    ("bfloat16", 8, 15),
    ("bfloat16", 2, 3),
]
# What they compile, and in a long run others.
CONFIGS = [
    *(MergeConfig("float32", "float32", "float32", count, 64, 4) for count in (1, 8)),
    MergeConfig("bfloat16", "bfloat16", "float32", 8, 8, 8),
    MergeConfig("float32", "bfloat16", "bfloat16", 8, 8, 8),
    MergeConfig("float32", "float32", "float32", 8, 6, 2),
    MergeConfig("float16", "float16", "float16", 2, 48, 8),
    MergeConfig("float16", "float16", "float16", 2, 3, 1),
    MergeConfig("bfloat16", "bfloat16", "bfloat16", 3, 2, 2),
]
MORE_CONFIGS = [
    *(MergeConfig("float16", "float16", "float16", count, 128, 8) for count in (1, 2, 8)),
    MergeConfig("float32", "float32", "float32", 8, 512, 4),
    MergeConfig("float16", "float16", "float32", 8, 3, 1),
    MergeConfig("float32", "float16", "float16", 2, 3, 1),
    MergeConfig("float32", "bfloat16", "bfloat16", 8, 2, 2),
]


def run(outs, lses, open_device=EmulatorDevice, **options):
    """The result, with every check on, in memory that was NaN."""
    out, lse = np.full(outs[0].shape, np.nan, outs[0].dtype), np.full(lses[0].shape, np.nan, np.float32)
    with open_device(global_race=True, footprint=True, **options) as device:
        merge.merge_states(device, MergeCall(ON_HOST, outs, lses), out, lse)
    assert len(device.launches) == max(1, -(-(len(outs) - 1) // 7))
    return out, lse


def states_of(num_states, shape, dtype, rng, *, spread=5.0):
    """Outputs and LSEs; some states have no keys, and their outputs are NaN."""
    outs = [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(num_states)]
    lses = [(spread * rng.standard_normal(shape[:2], np.float32)).astype(np.float32) for _ in range(num_states)]
    for out, lse in zip(outs, lses, strict=True):
        lse[rng.random(shape[:2]) < 0.25] = -np.inf
        out[lse == -np.inf] = np.nan
    return outs, lses


def assert_merged(outs, lses, out, lse):
    exact, exact_lse = reference.merge_states(outs, lses)
    rounded = exact.astype(outs[0].dtype).astype(np.float64)
    assert np.abs(out.astype(np.float64) - exact).max() <= error_bound(exact, rounded)
    empty = exact_lse == -np.inf
    np.testing.assert_array_equal(lse == -np.inf, empty)
    assert not bits(out[empty]).any()
    np.testing.assert_allclose(lse[~empty], exact_lse[~empty], rtol=1e-6, atol=1e-6)


@settings(max_examples=60)
@given(
    case=st.sampled_from(CASES),
    num_rows=st.integers(1, 20),
    num_heads=st.integers(1, 5),
    strides=st.sampled_from(["list", "stacked", "gaps", "repeated"]),
    spread=st.sampled_from([0.1, 5.0, 80.0]),
    seed=st.integers(0, 2**16),
)
def test_merged_states_agree_with_the_oracle(case, num_rows, num_heads, strides, spread, seed, open_device):
    kind, head_dim, num_states = case
    rng = np.random.default_rng(seed)
    outs, lses = states_of(num_states, (num_rows, num_heads, head_dim), FLOATS[kind], rng, spread=spread)
    if strides == "stacked":
        outs, lses = list(np.stack(outs)[::-1]), list(np.stack(lses)[::-1])
    elif strides == "gaps":
        outs, lses = [with_gaps(out, 1) for out in outs], [with_gaps(lse, 2) for lse in lses]
    elif strides == "repeated":
        outs = [np.broadcast_to(out[:1], out.shape) for out in outs]
        lses = [np.broadcast_to(lse[:1], lse.shape) for lse in lses]
    assert_merged(outs, lses, *run(outs, lses, open_device, seed=seed))


@pytest.mark.parametrize(
    ("config", "capability"),
    [*every_third_for_all(CONFIGS), *long((config, (9, 0)) for config in MORE_CONFIGS)],
    ids=str,
)
def test_configs_link_without_spills(config, capability):
    assert_links(make_merge_states, config, capability, max_registers=128)


@pytest.mark.parametrize("num_states", [2, 8, 9])
def test_states_without_keys(num_states, open_device):
    """They change no bit wherever they stand, and nothing but them gives 0 and -inf."""
    rng = np.random.default_rng(0)
    shape, dtype = (3, 2, 64), FLOATS["float32"]
    real, real_lse = rng.standard_normal(shape, np.float32), rng.standard_normal(shape[:2], np.float32)
    nan, none = np.full(shape, np.nan, dtype), np.full(shape[:2], -np.inf, np.float32)
    for place in {0, 1, num_states - 1}:
        outs, lses = [nan] * num_states, [none] * num_states
        outs[place], lses[place] = real, real_lse
        out, lse = run(outs, lses, open_device)
        np.testing.assert_array_equal(bits(out), bits(real))
        np.testing.assert_array_equal(lse, real_lse)
    out, lse = run([nan] * num_states, [none] * num_states, open_device)
    assert not bits(out).any()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_lse_that_is_none_makes_nan_of_its_row_alone(bad, open_device):
    rng = np.random.default_rng(0)
    outs, lses = states_of(9, (2, 2, 64), FLOATS["float32"], rng)
    clean = run(outs, lses, open_device)
    for place in (0, 4, 8):
        dirty = [lse.copy() for lse in lses]
        dirty[place][1, 0] = bad
        outs[place][1, 0] = 1
        out, lse = run(outs, dirty, open_device)
        assert np.isnan(out[1, 0]).all()
        assert np.isnan(lse[1, 0])
        for result, expected in zip((out, lse), clean, strict=True):
            np.testing.assert_array_equal(bits(result[[0, 0, 1], [0, 1, 1]]), bits(expected[[0, 0, 1], [0, 1, 1]]))


@pytest.mark.parametrize(("first", "gap"), [(1, 0), (0, 1)])
def test_rows_that_are_not_aligned(first, gap, open_device):
    """The widest vectors that one odd address, or one odd stride, leaves."""
    outs, lses = states_of(2, (3, 2, 64), FLOATS["float16"], np.random.default_rng(0))
    memory = np.zeros(3 * 2 * (64 + gap) + first + 8, np.float16)
    start = -memory.ctypes.data % 16 // 2 + first
    odd = memory[start : start + 3 * 2 * (64 + gap)].reshape(3, 2, 64 + gap)[..., :64]
    odd[...] = outs[1]
    assert_merged(outs, lses, *run([outs[0], odd], lses, open_device))


def test_nothing_is_launched_for_no_rows_and_no_heads():
    for shape in ((0, 2, 64), (2, 0, 64)):
        state, lse = np.empty(shape, np.float16), np.empty(shape[:2], np.float32)
        without_device().merge_states(MergeCall(ON_HOST, [state], [lse]), state.copy(), lse.copy())


def test_more_heads_than_a_grid_has_rows(monkeypatch, open_device):
    monkeypatch.setattr(merge, "LARGEST_GRID_Y", 2)
    outs, lses = states_of(9, (2, 5, 64), FLOATS["float32"], np.random.default_rng(0))
    assert_merged(outs, lses, *run(outs, lses, open_device))


def test_states_past_2_31_elements():
    """One head dimension of each row in memory of its own: rows are 8 GiB apart."""
    rng = np.random.default_rng(0)
    outs, lses = states_of(2, (2, 2, 64), FLOATS["float32"], rng)
    pool = np.empty((2, 2**31 + 128), np.float32)
    large = pool[:, -128:].reshape(2, 2, 64)
    device = SparseDevice()
    out, lse = np.empty(outs[0].shape, np.float32), np.empty(lses[0].shape, np.float32)
    device.address("pool", pool)
    buffer = device.large["pool"]
    buffer.view()[:, -128:] = outs[1].reshape(2, 128)
    buffer.mark(True, np.s_[:, -128:])
    offset = 2**31 * 4
    address = device.address
    device.address = lambda name, x: buffer.address + offset if name == "outs[1]" else address(name, x)
    with device:
        merge.merge_states(device, MergeCall(ON_HOST, [outs[0], large], lses), out, lse)
    assert_merged(outs, lses, out, lse)
