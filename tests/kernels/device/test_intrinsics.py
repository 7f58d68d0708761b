"""Each intrinsic of one thread, against NumPy."""

import numpy as np
import pytest
from numba import boolean, cuda, float32, types, uint32
from numba.core.errors import TypingError as CpuTypingError
from numba.cuda.core.errors import TypingError

from pagedkv.kernels.device.intrinsics import thread as device
from pagedkv.kernels.device.intrinsics import warp
from pagedkv.kernels.device.source import KernelSource, Steps

from ...support.devices import emulator
from .function_cases import BYTES, all_floats
from .function_cases import run as run_on


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("read", ["load", "load_written"])
def test_loads_and_stores_move_bytes(nbytes, read, run):
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


def test_arguments_of_a_launch(launch):
    """A pointer, int64 and float64 are all that kernels take: 8 bytes each."""

    def kernel(result, number, negative, x):
        device.store_4(device.address(result), float_bits(float32(x)))
        for i in range(2):
            part = 32 * i
            device.store_4(device.address(result) + 4 + 4 * i, uint32(number >> part))
            device.store_4(device.address(result) + 12 + 4 * i, uint32(negative >> part))

    float_bits, result = device.float_bits, np.zeros(5, np.uint32)
    source = KernelSource(kernel, types.void(BYTES, types.int64, types.int64, types.float64), 1)
    launch(source, (1, 1, 1), [result, 0x0123456789ABCDEF, -2, -1.5])
    assert result[0] == np.float32(-1.5).view(np.uint32)
    np.testing.assert_array_equal(result[1:], [0x89ABCDEF, 0x01234567, 0xFFFFFFFE, 0xFFFFFFFF])


def test_shared_memory_holds_what_was_stored(run):
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


def test_exp2_of_every_kind_of_number(run):
    def exp2(source, result, i):
        device.store_4(result + i * 4, device.float_bits(device.exp2(device.bits_float(device.load_4(source + i * 4)))))

    x = np.concatenate([np.linspace(-125, 127, 1000), [0, np.inf, -np.inf, np.nan, 200, -200]]).astype(np.float32)
    result = run(exp2, x, np.zeros_like(x))
    np.testing.assert_allclose(result[:1001], np.exp2(x[:1001].astype(np.float64)), rtol=3e-7)
    np.testing.assert_array_equal(result[1001:], np.array([np.inf, 0, np.nan, np.inf, 0], np.float32))


def test_divide_is_within_two_units_of_the_quotient(run):
    def divide(source, result, i):
        if i % 2 == 0:
            a, b = device.load_8(source + i * 4)
            quotient = device.divide(device.bits_float(a), device.bits_float(b))
            device.store_4(result + i * 2, device.float_bits(quotient))

    pairs = np.random.default_rng(2).normal(size=(500, 2)).astype(np.float32)
    pairs[:100, 1] *= np.float32(1e38)  # quotients below 2**-126 are not 0
    quotients = run(divide, pairs, np.zeros(500, np.float32))
    np.testing.assert_allclose(quotients, pairs[:, 0] / pairs[:, 1], rtol=2.5e-7, atol=3e-45)


def test_arithmetic_that_is_rounded_once(run):
    def compute(source, result, i):
        if i % 4 == 0:
            a, b, c, d = device.load_16(source + i * 4)
            x, y, z = device.bits_float(a), device.bits_float(b), device.bits_float(c)
            device.store_16(
                result + i * 4,
                device.float_bits(device.multiply_and_add(x, y, z)),
                device.float_bits(device.multiply_and_add_down(x, y, z)),
                device.float_bits(float32(device.multiply(x, y) + z)),
                d,
            )

    source = np.random.default_rng(5).normal(size=(200, 4)).astype(np.float32)
    source[:, 2] = np.round(source[:, 2] * 2**10) / 2**10  # sums are exact in float64
    x, y, z = source.T[:3].astype(np.float64)
    x, y = (np.round(a * 2**16) / 2**16 for a in (x, y))
    source[:, 0], source[:, 1] = x, y
    result = run(compute, source, np.zeros_like(source))
    nearest = (x * y + z).astype(np.float32)
    down = np.where(nearest > x * y + z, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    twice = (x * y).astype(np.float32) + source[:, 2]
    assert (nearest != down).any()
    assert (nearest != twice).any()
    np.testing.assert_array_equal(result, np.stack([nearest, down, twice, source[:, 3]], 1))


def test_reciprocal_and_log2_are_as_near_as_ptx_promises(run):
    def compute(source, result, i):
        x = device.bits_float(device.load_4(source + i * 4))
        device.store_8(result + i * 8, device.float_bits(warp.reciprocal(x)), device.float_bits(warp.log2(x)))

    x = np.exp2(np.random.default_rng(6).uniform(-120, 120, 500)).astype(np.float32)
    x[:100] = np.random.default_rng(7).uniform(0.5, 2, 100)
    x[-3:] = 0, np.inf, np.nan
    inverse, logarithm = run(compute, x, np.zeros((500, 2), np.float32)).T
    exact = x[:-3].astype(np.float64)
    np.testing.assert_allclose(inverse[:-3], 1 / exact, rtol=2**-23)
    errors = np.abs(logarithm[:-3] - np.log2(exact))
    assert (errors <= 2**-22 * np.where((exact > 0.5) & (exact < 2), 1, np.abs(np.log2(exact)))).all()
    np.testing.assert_array_equal(inverse[-3:], [np.inf, 0, np.nan])
    np.testing.assert_array_equal(logarithm[-3:], [-np.inf, np.inf, np.nan])


def test_bits(run):
    def compute(source, result, i):
        x = device.load_4(source + i * 4)
        quotient, rest = device.divmod_32(x, uint32(i + 1))
        words = warp.permute(x, uint32(0xAABBCCDD), uint32(0x7160)), warp.low_bits(uint32(i))
        device.store_16(result + i * 16, quotient, rest, words[0], words[1])

    x = all_floats()[-64:]
    result, i = run(compute, x, np.zeros((64, 4), np.uint32)), np.arange(64, dtype=np.uint32)
    picked = x & 0xFF | 0xBB00 | (x >> 8 & 0xFF) << 16 | 0xAA000000
    expected = [x // (i + 1), x % (i + 1), picked, np.where(i < 32, 2 ** i.astype(np.uint64) - 1, 2**32 - 1)]
    np.testing.assert_array_equal(result, np.stack(expected, 1))


def test_the_larger_number_wins_over_nan(run):
    def larger(source, result, i):
        a, b = device.load_8(source + i // 2 * 8)
        device.store_4(result + i * 4, device.float_bits(device.larger(device.bits_float(a), device.bits_float(b))))

    pairs = np.array([1, 2, np.nan, 3, 4, np.nan, -np.inf, np.nan, np.nan, np.nan, -1, -2], np.float32)
    result = run(larger, pairs, np.zeros_like(pairs))[::2]
    np.testing.assert_array_equal(result, np.array([2, 3, 4, -np.inf, np.nan, -1], np.float32))


def test_compare_and_swap_lets_one_thread_in(run):
    def enter(source, result, i):
        if device.compare_and_swap(result, 0, i + 1) == 0:
            device.store_4(result + 8, uint32(i + 1))

    result = run(enter, np.zeros(300, np.uint32), np.zeros(4, np.uint32))
    assert result[0] == result[2] > 0


def test_for_each_counts_and_opaque_changes_nothing(run):
    @cuda.jit(device=True, forceinline=True)
    def put(j, result, i):
        device.store_4(result + i * 4, uint32(j + i * i))

    def last(source, result, i):
        for _ in range(device.opaque(2)):
            device.for_each(put, 5, (result, i))

    result = run(last, np.zeros(10, np.uint32), np.zeros(10, np.uint32))
    np.testing.assert_array_equal(result, np.arange(10) ** 2 + 4)


def test_steps_unroll_themselves_and_are_called_by_name(run):
    @device.unrolled(4)
    def add(j, words, factor):
        words[0] = uint32(words[0] + factor * j)

    steps = Steps(add)

    def turn(source, result, i):
        words = device.local_array(1, uint32)
        words[0] = uint32(i)
        steps.add(words, uint32(10))
        device.store_4(result + i * 4, words[0])

    result = run(turn, np.zeros(10, np.uint32), np.zeros(10, np.uint32))
    np.testing.assert_array_equal(result, np.arange(10) + 10 * (0 + 1 + 2 + 3))


def test_a_local_array_holds_what_was_assigned(run):
    def turn(source, result, i):
        words = device.local_array(6, uint32)
        for j in range(6):
            words[j] = uint32(j)
        device.assign(words, i % 3, device.load_8(source + i % 3 * 8))
        for j in range(6):
            device.store_4(result + (i * 6 + j) * 4, words[j])

    source = np.array([[10, 11], [20, 21], [30, 31]], np.uint32)
    result = run(turn, source, np.zeros((6, 6), np.uint32))
    expected = np.tile(np.arange(6, dtype=np.uint32), (6, 1))
    for i in range(6):
        expected[i, i % 3 : i % 3 + 2] = source[i % 3]
    np.testing.assert_array_equal(result, expected)


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
        lambda source, result, i: device.divide(float32(1), 2),
        lambda source, result, i: device.for_each(device.exp2, i, (float32(1),)),
        lambda source, result, i: device.local_array(i, uint32),
        lambda source, result, i: device.local_array(4, boolean),
        lambda source, result, i: device.clear(device.local_array(4, uint32), i),
        lambda source, result, i: device.assign(device.local_array(4, uint32), 0, (i, i)),
        lambda source, result, i: device.assign(device.local_array(4, uint32), 0, uint32(i)),
        lambda source, result, i: device.assign(device.local_array(4, uint32), float32(i), (uint32(i), uint32(i))),
    ],
)
def test_a_wrong_type_is_a_typing_error(wrong):
    words = np.zeros(4, np.uint32)
    with pytest.raises((TypingError, CpuTypingError)):
        run_on(emulator, wrong, words, words.copy())
