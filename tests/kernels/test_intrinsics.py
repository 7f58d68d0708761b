"""Each intrinsic in the emulator, against NumPy."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, float32, types, uint32
from numba.core.errors import TypingError as CpuTypingError
from numba.cuda.core.errors import TypingError

from pagedkv.cuda.compile import compile_kernel
from pagedkv.emulator import EmulatorDevice
from pagedkv.kernels import intrinsics as device
from pagedkv.kernels.source import KernelSource

BYTES = types.CPointer(types.uint8)
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
BY_BITS = [(kind, False, (8, 0)) for kind in DTYPES]
BY_HARDWARE = [(kind, True, (9, 0)) for kind in ("fp8_e4m3", "fp8_e5m2")]


class Case(NamedTuple):
    """A config that holds a function, so that its kernel is not kept on disk."""

    function: Any


def run(function, source, result, capability=(9, 0)):
    """`result` after one thread for each word of `source` has run ``function(source, result, i)``."""
    each = cuda.jit(device=True)(function)

    def kernel(source, result, count):
        i = cuda.blockIdx.x * 128 + cuda.threadIdx.x
        if i < count:
            each(device.address(source), device.address(result), i)

    def make_one(config):
        return KernelSource(kernel, types.void(BYTES, BYTES, types.int64), 128)

    count = source.nbytes // 4
    with EmulatorDevice() as emulator:
        compiled = compile_kernel(make_one, Case(function), capability)
        addresses = [emulator.address("source", source), emulator.address("result", result)]
        emulator.launch(compiled, (-(-count // 128), 1, 1), [*addresses, count])
    return result


def all_floats():
    """float32 of every sign, exponent and upper mantissa, at and beside the middles between shorter formats."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    anything = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32)
    return np.concatenate([upper, upper + 1, upper + 0x7FFF, upper + 0x8000, upper + 0x8001, anything])


def assert_equal_or_nan(actual, expected):
    is_nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), is_nan)
    bits = f"u{expected.itemsize}"
    np.testing.assert_array_equal(actual.view(bits)[~is_nan], expected.view(bits)[~is_nan])


@pytest.mark.parametrize(("kind", "hardware", "capability"), BY_BITS + BY_HARDWARE)
def test_unpack_is_exact(kind, hardware, capability):
    widen, per_word = device.unpack(kind, hardware), 4 // DTYPES[kind].itemsize

    def unpack(source, result, i):
        values = widen(device.load_4(source + i * 4))
        for e in range(per_word):
            device.store_4(result + (i * per_word + e) * 4, device.float_bits(values[e]))

    size = DTYPES[kind].itemsize
    codes = all_floats() if size == 4 else np.arange(2 ** (8 * size)).astype(f"u{size}")
    values = run(unpack, codes.view(np.uint32), np.zeros(len(codes), np.float32), capability)
    assert_equal_or_nan(values, codes.view(DTYPES[kind]).astype(np.float32))


@pytest.mark.parametrize(("kind", "hardware", "capability"), BY_BITS + BY_HARDWARE)
def test_narrow_rounds_to_nearest_even_and_saturates_fp8(kind, hardware, capability):
    round_to = device.narrow(kind, hardware)

    def narrow(source, result, i):
        device.store_4(result + i * 4, round_to(device.bits_float(device.load_4(source + i * 4))))

    source = all_floats()
    bits = run(narrow, source, np.zeros(len(source), np.uint32), capability)
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


def test_vectors_of_elements():
    """unpack_words, and multiply_add of masked words, add what NumPy adds."""
    rng = np.random.default_rng(1)
    for kind in ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"):
        for num_words, load in ((2, device.load_8), (4, device.load_16)):
            count, bits = num_words * 4 // DTYPES[kind].itemsize, 8 * DTYPES[kind].itemsize
            widen, add = device.unpack_words(kind, num_words), device.multiply_add(kind, num_words)
            select, masks = device.masked(num_words), device.bit_masks(num_words)

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


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("read", ["load", "load_written"])
def test_loads_and_stores_move_bytes(nbytes, read):
    load, store = getattr(device, f"{read}_{nbytes}"), getattr(device, f"store_{nbytes}")

    def copy_1(source, result, i):
        for part in range(4 // nbytes):
            where = i * 4 + part * nbytes
            store(result + where, load(source + where))

    def copy_8(source, result, i):
        if i % 2 == 0:
            a, b = load(source + i * 4)
            store(result + i * 4, a, b)

    def copy_16(source, result, i):
        if i % 4 == 0:
            a, b, c, d = load(source + i * 4)
            store(result + i * 4, a, b, c, d)

    source = all_floats()[-256:]
    copied = run({8: copy_8, 16: copy_16}.get(nbytes, copy_1), source, np.zeros_like(source))
    np.testing.assert_array_equal(copied, source)


def test_shared_memory_holds_what_was_stored():
    store, load = device.store_shared(4), device.load_shared(4)

    def turn(source, result, i):
        tile = device.shared_address(cuda.shared.array(512, float32, alignment=16))
        if i % 4 == 0:
            a, b, c, d = device.load_16(source + i * 4)
            values = (device.bits_float(d), device.bits_float(c), device.bits_float(b), device.bits_float(a))
            store(uint32(tile + uint32(4 * (i % 128))), values)
        cuda.syncwarp()
        values = load(uint32(tile + uint32(4 * (i % 128 // 4 * 4))))
        device.store_4(result + i * 4, device.float_bits(values[i % 4]))

    source = np.arange(128, dtype=np.uint32)
    np.testing.assert_array_equal(run(turn, source, np.zeros_like(source)), source.reshape(-1, 4)[:, ::-1].reshape(-1))


def test_exp2_of_every_kind_of_number():
    def exp2(source, result, i):
        device.store_4(result + i * 4, device.float_bits(device.exp2(device.bits_float(device.load_4(source + i * 4)))))

    x = np.concatenate([np.linspace(-125, 127, 1000), [0, np.inf, -np.inf, np.nan, 200, -200]]).astype(np.float32)
    result = run(exp2, x, np.zeros_like(x))
    np.testing.assert_allclose(result[:1001], np.exp2(x[:1001].astype(np.float64)), rtol=3e-7)
    np.testing.assert_array_equal(result[1001:], np.array([np.inf, 0, np.nan, np.inf, 0], np.float32))


def test_the_larger_number_wins_over_nan():
    def larger(source, result, i):
        a, b = device.load_8(source + i // 2 * 8)
        device.store_4(result + i * 4, device.float_bits(device.larger(device.bits_float(a), device.bits_float(b))))

    pairs = np.array([1, 2, np.nan, 3, 4, np.nan, -np.inf, np.nan, np.nan, np.nan, -1, -2], np.float32)
    result = run(larger, pairs, np.zeros_like(pairs))[::2]
    np.testing.assert_array_equal(result, np.array([2, 3, 4, -np.inf, np.nan, -1], np.float32))


def test_compare_and_swap_lets_one_thread_in():
    def enter(source, result, i):
        if device.compare_and_swap(result, 0, i + 1) == 0:
            device.store_4(result + 8, uint32(i + 1))

    result = run(enter, np.zeros(300, np.uint32), np.zeros(4, np.uint32))
    assert result[0] == result[2] > 0


def test_for_each_counts_and_opaque_changes_nothing():
    @cuda.jit(device=True, forceinline=True)
    def put(j, result, i):
        device.store_4(result + i * 4, uint32(j + i * i))

    def last(source, result, i):
        for _ in range(device.opaque(2)):
            device.for_each(put, 5, (result, i))

    result = run(last, np.zeros(10, np.uint32), np.zeros(10, np.uint32))
    np.testing.assert_array_equal(result, np.arange(10) ** 2 + 4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda source, result, i: device.load_4(float32(i)),
        lambda source, result, i: device.store_4(result, i),
        lambda source, result, i: device.store_2(result, uint32(1)),
        lambda source, result, i: device.exp2(1.0),
        lambda source, result, i: device.float_bits(i),
        lambda source, result, i: device.address(i),
        lambda source, result, i: device.shared_address(i),
        lambda source, result, i: device.load_shared(4)(result),
        lambda source, result, i: device.larger(float32(1), 2),
        lambda source, result, i: device.for_each(device.exp2, i, (float32(1),)),
    ],
)
def test_a_wrong_type_is_a_typing_error(wrong):
    words = np.zeros(4, np.uint32)
    with pytest.raises((TypingError, CpuTypingError)):
        run(wrong, words, words.copy())
