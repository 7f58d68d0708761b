"""Each conversion between float32 and a cache's elements, against NumPy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from numba import float32

from pagedkv.cuda.device import FIRST_WITH_FP8
from pagedkv.kernels.device import conversions, halves
from pagedkv.kernels.device.intrinsics import thread as device
from pagedkv.kernels.device.intrinsics import warp
from pagedkv.kernels.device.intrinsics.masks import bit_masks, masked

from .function_cases import all_floats

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
# By bits for 8.0, or for the GPU that is there; by hardware where it has the instructions.
BY_BITS = [(kind, False, {"capability": (8, 0)}) for kind in DTYPES if kind != "int8"]
INT8 = [("int8", False, {"capability": (8, 0)})]  # to which nothing is rounded by one of these functions
BY_HARDWARE = [(kind, True, {"least": FIRST_WITH_FP8}) for kind in ("fp8_e4m3", "fp8_e5m2")]


def each_of(cases):
    ids = [f"{kind} by {'hardware' if hardware else 'bits'}" for kind, hardware, _ in cases]
    return pytest.mark.parametrize(("kind", "hardware", "compiled"), cases, ids=ids)


def assert_equal_or_nan(actual, expected):
    is_nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), is_nan)
    bits = f"u{expected.itemsize}"
    np.testing.assert_array_equal(actual.view(bits)[~is_nan], expected.view(bits)[~is_nan])


@each_of(BY_BITS + BY_HARDWARE + INT8)
def test_unpack_is_exact(kind, hardware, compiled, run):
    widen, per_word = conversions.unpack(kind, hardware), 4 // DTYPES[kind].itemsize

    def unpack(source, result, i):
        values = widen(device.load_4(source + i * 4))
        for e in range(per_word):
            device.store_4(result + (i * per_word + e) * 4, device.float_bits(values[e]))

    size = DTYPES[kind].itemsize
    codes = all_floats() if size == 4 else np.arange(2 ** (8 * size)).astype(f"u{size}")
    values = run(unpack, codes.view(np.uint32), np.zeros(len(codes), np.float32), **compiled)
    assert_equal_or_nan(values, codes.view(DTYPES[kind]).astype(np.float32))


@each_of(BY_BITS + BY_HARDWARE)
def test_narrow_rounds_to_nearest_even_and_saturates_fp8(kind, hardware, compiled, run):
    round_to = conversions.narrow(kind, hardware)

    def narrow(source, result, i):
        device.store_4(result + i * 4, round_to(device.bits_float(device.load_4(source + i * 4))))

    source = all_floats()
    bits = run(narrow, source, np.zeros(len(source), np.uint32), **compiled)
    x, dtype = source.view(np.float32), DTYPES[kind]
    assert (bits.astype(np.uint64) < 2 ** (8 * dtype.itemsize)).all()
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.itemsize == 1:
            largest = float(ml_dtypes.finfo(dtype).max)
            x = np.clip(x, -largest, largest)
        expected = x.astype(dtype)
    assert_equal_or_nan(bits.astype(f"u{dtype.itemsize}").view(dtype), expected)
    if dtype.itemsize == 1:
        np.testing.assert_array_equal(bits & 0x7F, expected.view(np.uint8) & 0x7F)


@each_of(BY_BITS[3:] + BY_HARDWARE + INT8)
def test_halves_of_codes_are_exact(kind, hardware, compiled, run):
    lower, upper = halves.make_halves(kind, hardware)

    def widen(source, result, i):
        word = device.load_4(source + i * 4)
        device.store_8(result + i * 8, lower(word), upper(word))

    codes = np.arange(256, dtype=np.uint8)
    values = run(widen, codes.view(np.uint32), np.zeros(256, np.float16), **compiled)
    factor = halves.software_factor(kind, hardware)
    assert_equal_or_nan(values, (codes.view(DTYPES[kind]).astype(np.float32) / factor).astype(np.float16))


def test_pairs_are_rounded_to_nearest_even(run):
    def pack(source, result, i):
        a, b = device.bits_float(device.load_4(source + i * 4)), float32(0.3)
        device.store_8(result + i * 8, warp.pack_float16(a, b), warp.pack_bfloat16(b, a))

    source = all_floats()
    pairs = run(pack, source, np.zeros((len(source), 4), np.uint16)).T
    x = source.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for bits, dtype in ((pairs[0], "float16"), (pairs[3], "bfloat16")):
            assert_equal_or_nan(np.ascontiguousarray(bits).view(DTYPES[dtype]), x.astype(DTYPES[dtype]))
    for bits, dtype in ((pairs[1], "float16"), (pairs[2], "bfloat16")):
        assert (bits == np.array(0.3, DTYPES[dtype]).view(np.uint16)).all()


def test_vectors_of_elements(run):
    """unpack_words, and multiply_add of masked words, add what NumPy adds."""
    rng = np.random.default_rng(1)
    for kind in DTYPES:
        for num_words, load in ((2, device.load_8), (4, device.load_16)):
            count, bits = num_words * 4 // DTYPES[kind].itemsize, 8 * DTYPES[kind].itemsize
            widen, add = conversions.unpack_words(kind, num_words), conversions.multiply_add(kind, num_words)
            select, masks = masked(num_words), bit_masks(num_words)

            def sums(source, result, i, load=load, widen=widen, add=add, select=select, masks=masks, bits=bits):
                if i < 8:
                    words = load(source)
                    kept = select(words, masks((i - 2) * bits, (2 * i - 3) * bits))
                    device.store_4(result + i * 4, device.float_bits(add(float32(0.5), kept, widen(words))))

            values = rng.integers(-4, 5, count).astype(DTYPES[kind])
            source = np.resize(values.view(np.uint32), 16)
            result = run(sums, source, np.zeros(8, np.float32))
            position, x = np.arange(count), values.astype(np.float32)
            expected = [0.5 + (x * x)[(position >= i - 2) & (position < 2 * i - 3)].sum() for i in range(8)]
            np.testing.assert_array_equal(result, np.array(expected, np.float32))
