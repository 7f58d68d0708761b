"""The kernel of write_kv on the emulator, bit by bit against the oracle."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import pagedkv
from pagedkv import reference
from pagedkv.calls import CACHES
from pagedkv.compiler.compile import compile_kernel
from pagedkv.cuda.bad_entries import raise_if_failed
from pagedkv.cuda.device import FIRST_WITH_FP8
from pagedkv.cuda.plans import blocks
from pagedkv.emulator import EmulatorDevice, MemoryFault
from pagedkv.kernels.blocks.tokens import NUM_THREADS
from pagedkv.kernels.blocks.write_kv import WriteConfig, make_write_kv
from pagedkv.layouts import FORMATS, as_given
from pagedkv.validation.caches import write_call

from ...support.bits import assert_same_bits_but_of_nan, bits
from ...support.devices import with_capability
from ...support.problems import FLOATS
from ..block_cases import (
    STRIDES,
    SparseDevice,
    assert_links,
    every_third_for_all,
    pair_of,
    random_bits,
    with_gaps,
    without_device,
)

FLOAT16 = FORMATS["float16"]
# Every layout, kind and dtype of tokens, head_dim and block_size with several of the others: one compile each.
CONFIGS = [
    WriteConfig("float32", "float32", "float32", 8, 1),
    WriteConfig("float32", "float32", "float32", 48, 8, is_vllm=True),
    WriteConfig("float16", "float16", "float16", 128, 16),
    WriteConfig("float16", "float16", "float32", 24, 3, checked=True),
    WriteConfig("float16", "float32", "float16", 64, 32, is_vllm=True),
    WriteConfig("bfloat16", "bfloat16", "bfloat16", 8, 256, is_vllm=True, checked=True),
    WriteConfig("bfloat16", "float32", "float32", 512, 24),
    WriteConfig("fp8_e4m3", "float32", "float16", 8, 1, v_per_head=True),
    WriteConfig("fp8_e4m3", "bfloat16", "float32", 48, 8, is_vllm=True, k_per_head=True, v_per_head=True),
    WriteConfig("fp8_e5m2", "float16", "bfloat16", 40, 7, k_per_head=True, checked=True),
    WriteConfig("fp8_e5m2", "float32", "float32", 16, 16, is_vllm=True),
]


def wild(rng, shape, dtype):
    """Values that need rounding, are too large or too small, infinite or NaN (quiet: NumPy may make them so)."""
    x = rng.standard_normal(shape, np.float32) * 10.0 ** rng.uniform(-9, 6, shape).astype(np.float32)
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 448.0, 464.0, 61440.0, 2.0**-10, 3 * 2.0**-18], np.float32)
    where = rng.random(shape) < 0.1
    x[where] = rng.choice(odd, where.sum())
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def options_of(config, num_kv_heads, rng, layout):
    options = {"layout": layout, "kv_dtype": None, "k_scale": None, "v_scale": None}
    if config.kind.startswith("fp8"):
        options["kv_dtype"] = config.kind
        for name, per_head in (("k_scale", config.k_per_head), ("v_scale", config.v_per_head)):
            options[name] = rng.uniform(0.01, 3, num_kv_heads).astype(np.float32) if per_head else 0.3
    return options


def call_of(k, v, k_cache, v_cache, slots, options, check=False):
    return write_call(k, v, k_cache, v_cache, slots, backend="emulator", check=check, **options)


def run(call, open_device=EmulatorDevice, **options):
    """Run the kernel with every check on; its footprint, which a GPU has not."""
    with open_device(global_race=True, footprint=True, **options) as device:
        blocks.write_kv(device, call)
    return device.launches[-1].footprint


@st.composite
def writes(draw):
    config = draw(st.sampled_from(CONFIGS))
    layout = "vllm" if config.is_vllm else draw(st.sampled_from(["NHD", "HND"]))
    shape = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    return config, layout, shape, draw(st.sampled_from(STRIDES)), draw(st.integers(0, 2**16))


@settings(max_examples=60)
@given(write=writes())
def test_exactly_the_named_slots_get_the_oracle_s_bits(write, open_device):
    config, layout, (num_tokens, num_kv_heads), strides, seed = write
    rng = np.random.default_rng(seed)
    num_blocks = -(-num_tokens // config.block_size) + 2
    parts = FORMATS[config.kind].parts(layout, num_blocks, config.block_size, num_kv_heads, config.head_dim)
    k_cache, v_cache = pair_of(parts, strides, rng)
    shape = num_tokens, num_kv_heads, config.head_dim
    k, v = wild(rng, shape, FLOATS[config.k_kind]), wild(rng, shape, FLOATS[config.v_kind])
    k, v = (k[::-1, ::-1], with_gaps(v, 1)) if strides == "padded" else (k, np.broadcast_to(v[:1], shape))
    slots = rng.permutation(num_blocks * config.block_size)[:num_tokens]
    slots[rng.random(num_tokens) < 0.2] = -1 - rng.integers(2**40)
    options = options_of(config, num_kv_heads, rng, layout)
    call = call_of(k, v, k_cache, v_cache, slots, options, check=config.checked)
    expected = [k_cache.copy(), v_cache.copy()]
    reference.write_kv(k, v, *expected, slots, **options)

    footprint = run(call, open_device, seed=seed)

    for cache, wanted in zip((k_cache, v_cache), expected, strict=True):
        assert_same_bits_but_of_nan(cache, wanted, config.kind)
    if footprint is None:
        return
    masks = [np.zeros(shape, bool) for shape, _ in parts]
    reference.write_kv(np.ones(k.shape), np.ones(v.shape), *masks, slots, layout=layout)
    for name, mask in zip(("k_cache", "v_cache"), masks, strict=True):
        footprint.expect(name, read=False, written=mask)
    for name in ("k", "v"):
        footprint.expect(name, written=False)
    footprint.expect("slots", read=True, written=False)


@pytest.mark.parametrize(("config", "capability"), every_third_for_all(CONFIGS), ids=str)
def test_configs_link_without_spills(config, capability):
    assert_links(make_write_kv, config, capability)
    if config.kind.startswith("fp8") and capability >= FIRST_WITH_FP8:
        assert_links(make_write_kv, replace(config, hardware_fp8=True), capability)


@pytest.mark.parametrize(
    ("kind", "token_kind", "capability"),
    [
        # Half of them have every pair of two.
        pytest.param(*case, id="{}-{}-cc{}.{}".format(*case[:2], *case[2]), marks=pytest.mark.long if odd % 2 else [])
        for i, kind in enumerate(reference.FP8_DTYPES)
        for j, token_kind in enumerate(FLOATS)
        for odd, case in ((i + j, (kind, token_kind, (8, 0))), (i + j + 1, (kind, token_kind, (9, 0))))
    ],
)
def test_fp8_codes_of_every_16_bit_pattern(kind, token_kind, capability, open_device):
    """The CPU's own codes; for float32 also those of values just beside, and halfway to, what 16 bits can say."""
    patterns = np.arange(2**16, dtype=np.uint16)
    x = patterns.view(FLOATS[token_kind]) if token_kind != "float32" else None
    if x is None:
        low = np.random.default_rng(0).choice(np.array([0, 1, 0x8000, 0xFFFF], np.uint32), 2**16)
        x = (patterns.astype(np.uint32) << 16 | low).view(np.float32)
    x = x.reshape(-1, 1, 8)
    caches, expected = np.zeros((2, 2, len(x), 1, 1, 8), np.uint8)
    slots, options = np.arange(len(x)), {"kv_dtype": kind, "v_scale": np.array([3.0], np.float32)}
    pagedkv.write_kv(x, x, *expected, slots, **options)
    call = call_of(x, x, *caches, slots, {"layout": "NHD", "k_scale": None, **options})
    with with_capability(open_device(race=False), capability) as device:
        blocks.write_kv(device, call)
    assert_same_bits_but_of_nan(caches, expected, kind)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_float32_is_rounded_to_nearest_even(kind, open_device):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**32, 8 * 4000, dtype=np.uint32)
    halfway = np.uint32(0x1000 if kind == "float16" else 0x8000)
    codes[::2] = codes[::2] & ~(2 * halfway - np.uint32(1)) | halfway
    codes[1::7] = codes[1::7] & np.uint32(0x807FFFFF) | np.uint32(102 + 8 * (kind == "bfloat16") << 23)  # subnormal
    x = codes.view(np.float32).reshape(-1, 1, 8)
    caches, expected = np.zeros((2, 2, len(x), 1, 1, 8), FLOATS[kind])
    slots = np.arange(len(x))
    with np.errstate(over="ignore", invalid="ignore"):
        expected[...] = x.reshape(expected[0].shape).astype(FLOATS[kind])
    call = call_of(x, x, *caches, slots, {"layout": "NHD", "kv_dtype": None, "k_scale": None, "v_scale": None})
    with open_device(race=False) as device:
        blocks.write_kv(device, call)
    assert_same_bits_but_of_nan(caches, expected)


def small_call(layout="NHD", num_tokens=6, num_kv_heads=3, num_blocks=4, **changes):
    rng = np.random.default_rng(5)
    k_cache, v_cache = pair_of(FLOAT16.parts(layout, num_blocks, 8, num_kv_heads, 16), "own", rng)
    k, v = random_bits(rng, (2, num_tokens, num_kv_heads, 16), FLOATS["float16"])
    slots = np.arange(num_tokens)[::-1].copy()
    options = {"layout": layout, "kv_dtype": None, "k_scale": None, "v_scale": None}
    call = call_of(k, v, k_cache, v_cache, slots, options)
    return call._replace(**changes), options


def test_a_slot_that_is_not_there_is_skipped_and_reported_once(open_device):
    slots = np.array([7, 32, 3, 2**62, -9, 31])
    call, options = small_call(slots=slots, checked=True)
    expected = [call.k_cache.copy(), call.v_cache.copy()]
    reference.write_kv(call.k, call.v, *expected, np.where(slots < 32, slots, -1), **options)
    with open_device(global_race=True, seed=3) as device:
        blocks.write_kv(device, call)
        text = r"^slots must be below num_blocks \* block_size, got (32 for token 1|4611686018427387904 for token 3)$"
        with pytest.raises(IndexError, match=text):
            raise_if_failed([device])
        raise_if_failed([device])
        blocks.write_kv(device, call._replace(slots=np.array([7, -1, 3, 2, 0, 31])))
        raise_if_failed([device])
    reference.write_kv(call.k, call.v, *expected, np.array([7, -1, 3, 2, 0, 31]), **options)
    for cache, wanted in zip((call.k_cache, call.v_cache), expected, strict=True):
        np.testing.assert_array_equal(bits(cache), bits(wanted))


def test_unchecked_a_slot_that_is_not_there_is_a_fault_on_the_emulator():
    call, _ = small_call(slots=np.array([7, 32, 3, 2, -9, 31]))
    with pytest.raises(MemoryFault, match="out of bounds"):
        run(call)


def test_no_tokens_launch_nothing():
    call, _ = small_call(num_tokens=0)
    without_device().write_kv(call)


@pytest.mark.parametrize("layout", ["NHD", "vllm"])
def test_more_heads_than_a_grid_has_rows(layout, monkeypatch, open_device):
    monkeypatch.setattr(blocks, "LARGEST_GRID_Y", 2)
    call, options = small_call(layout, num_kv_heads=5)
    expected = [call.k_cache.copy(), call.v_cache.copy()]
    reference.write_kv(call.k, call.v, *expected, call.slots, **options)
    run(call, open_device)
    for cache, wanted in zip((call.k_cache, call.v_cache), expected, strict=True):
        np.testing.assert_array_equal(bits(cache), bits(wanted))


class Recorder:
    """A device that only takes launches down."""

    capability = (9, 0)
    lineinfo = False

    def __init__(self):
        self.grids = []

    def address(self, name, array):
        return 1 << 40

    def launch(self, kernel, grid, args, shared_bytes=0):
        self.grids.append(grid)


def test_the_grid_of_millions_of_tokens_and_many_heads_is_one_that_hardware_takes():
    call, _ = small_call()
    num_tokens, num_kv_heads = 50_000_000, 70_000
    many = np.broadcast_to(call.k[:1, :1], (num_tokens, num_kv_heads, 16))
    slots = np.broadcast_to(call.slots[:1], num_tokens)
    device = Recorder()
    for layout in ("NHD", "vllm"):
        call, _ = small_call(layout)
        blocks.write_kv(device, call._replace(k=many, v=many, slots=slots, spec=_wide(call.spec, num_kv_heads)))
    for x, y, z in device.grids:
        assert num_tokens * 2 <= x * NUM_THREADS
        assert x < 2**31
        assert (y, z) == (65535, 2)


def _wide(spec, num_kv_heads):
    return replace(spec, num_blocks=10**7, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("layout", ["HND", "vllm"])
def test_slots_past_2_31_elements(layout):
    call, options = small_call(layout)
    num_blocks = 2**31 // call.k_cache[0].size + 3
    k_cache, v_cache = (np.empty(*part) for part in FLOAT16.parts(layout, num_blocks, 8, 3, 16))
    slots = np.array([num_blocks * 8 - 1, 3, -1, num_blocks * 8 - 20, num_blocks * 8 - 9, num_blocks * 8 - 16])
    device = SparseDevice()
    blocks.write_kv(device, call._replace(k_cache=k_cache, v_cache=v_cache, slots=slots, spec=_many(call, num_blocks)))
    written = [device.large[name] for name in ("k_cache", "v_cache")]
    expected = [np.zeros(*part) for part in FLOAT16.parts(layout, 4, 8, 3, 16)]
    near = np.where(slots > 8, slots - (num_blocks - 4) * 8, slots)
    reference.write_kv(call.k, call.v, *expected, near, **options)
    for buffer, wanted in zip(written, expected, strict=True):
        view = buffer.view()
        np.testing.assert_array_equal(bits(view[-3:]), bits(wanted[1:]))
        np.testing.assert_array_equal(bits(view[:1]), bits(wanted[:1]))


def _many(call, num_blocks):
    return replace(call.spec, num_blocks=num_blocks)


def test_rows_move_in_vectors_of_16_bytes():
    for config in CONFIGS[:4]:
        ptx = compile_kernel(make_write_kv, config).ptx
        assert "ld.global.nc.v4.u32" in ptx
        assert "st.global.v4.u32" in ptx


@pytest.mark.parametrize(
    ("layout", "head_dim", "block_size", "dtype", "is_rotated"),
    [("vllm", 64, 16, "float32", False), ("NHD", 264, 3, "bfloat16", True)],
)
def test_rows_of_int8_have_the_codes_and_scales_of_the_cpu(layout, head_dim, block_size, dtype, is_rotated):
    """Rows of zeros, of the smallest numbers, and rows that are not finite, among rows of all sizes; gathered, too."""
    rng, num_tokens, num_blocks = np.random.default_rng(0), 40, 16
    x = rng.standard_normal((2, num_tokens, 2, head_dim), np.float32) * 10 ** rng.uniform(-9, 6, (num_tokens, 2, 1))
    x[:, 3, 0], x[:, 4, 1, 5], x[:, 5, 0, head_dim - 1], x[:, 6, 1] = 0, np.inf, np.nan, x[:, 6, 1] / 1e44
    x[:, 7], x[:, 7, 0, 0], x[:, 7, 1, 0] = 0, 1e-44, 3e-43
    k, v = x.astype(FORMATS[dtype].stored)
    slots = rng.permutation(num_blocks * block_size)[:num_tokens]
    slots[2] = -1
    options = {"layout": layout, "kv_dtype": "int8"}
    rotation = {}
    if is_rotated:
        cos, sin = rng.standard_normal((2, 50, head_dim // 8), np.float32)
        rotation = {"cos": cos, "sin": sin, "positions": rng.integers(0, 50, num_tokens)}
    results = []
    for backend in ("cpu", "emulator"):
        parts = FORMATS["int8"].parts(layout, num_blocks, block_size, 2, head_dim)
        caches = dict(zip(CACHES, as_given(layout, [np.ones(*part) for part in parts]), strict=True))
        pagedkv.write_kv(k, v, slots=slots, **caches, **options, **rotation, backend=backend)
        table = np.arange(num_blocks, dtype=np.int32)
        gathered = pagedkv.gather_kv(**caches, block_table=table, seq_len=40, **options, backend=backend)
        results.append((*caches.values(), *gathered))
    for result, expected in zip(*reversed(results), strict=True):
        np.testing.assert_array_equal(result, expected)
