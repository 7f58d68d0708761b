"""One product of each kind on tensor cores, with the operands that kernels give it, against NumPy.

The numbers are small and whole: float32 has their sums exactly, in any order and however a sum is rounded.
"""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, float32, types, uint32

from pagedkv.kernels.device.intrinsics import thread as device
from pagedkv.kernels.device.intrinsics import warp
from pagedkv.kernels.device.intrinsics.warpgroup import fence_proxy
from pagedkv.kernels.device.source import KernelSource, device_function
from pagedkv.kernels.prefill.config import TensorConfig
from pagedkv.kernels.prefill.tensor_cores.wgmma import products
from pagedkv.kernels.prefill.tensor_cores.wgmma.shape import WgmmaShape

from ...emulator.machine import wgmma_kernels
from ...support.strategies import long
from .function_cases import BYTES

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def whole(rng, shape, kind, most=8):
    return rng.integers(-most, most + 1, shape).astype(DTYPES[kind])


@pytest.mark.parametrize("kind", DTYPES)
def test_mma_of_matrices_that_ldmatrix_loads(kind, launch):
    """As kernels do: Q K^T of 16 rows and 16 keys, and Q V with V transposed on its way."""
    mma = warp.mma_of(kind)

    def kernel(source, result):
        tile = device.shared_address(cuda.shared.array(512, uint32, alignment=16))
        lane = uint32(cuda.threadIdx.x)
        for i in range(3):
            at = uint32(16 * lane + 512 * i)
            warp.copy_vector(uint32(tile + at), device.address(source) + at)
        warp.end_group()
        wait_all()
        warp.sync_warp()
        low = uint32(uint32(uint32(lane & 15) << 5) + uint32(uint32(lane >> 4) << 4))  # rows, then chunks
        high = uint32(uint32(uint32(uint32(lane & 7) + uint32(uint32(lane >> 4) << 3)) << 5) + (uint32(lane & 8) << 1))
        q = warp.load_matrices(uint32(tile + low))
        k = warp.load_matrices(uint32(tile + uint32(512 + high)))
        v = warp.load_transposed(uint32(tile + uint32(1024 + low)))
        c = device.local_array(16, float32)
        for i in range(16):
            c[i] = float32(100 * i)
        mma(c, 0, q, k[0], k[1])
        mma(c, 4, q, k[2], k[3])
        mma(c, 8, q, v[0], v[1])
        mma(c, 12, q, v[2], v[3])
        for i in range(16):
            device.store_4(device.address(result) + int(lane) * 64 + 4 * i, device.float_bits(c[i]))

    wait_all = warp.wait_but(0)
    q, k, v = matrices = whole(np.random.default_rng(8), (3, 16, 16), kind)
    result = np.zeros((8, 4, 4, 2, 2), np.float32)  # g, t, product, row, column
    launch(KernelSource(kernel, types.void(BYTES, BYTES), 32), (1, 1, 1), [matrices, result])
    sums = np.concatenate([q.astype(float) @ k.astype(float).T, q.astype(float) @ v.astype(float)], axis=1)
    # Rows g and g + 8, columns 2t and 2t + 1 of each product.
    expected = sums.reshape(2, 8, 4, 4, 2).transpose(1, 3, 2, 0, 4) + 100 * np.arange(16).reshape(4, 2, 2)
    np.testing.assert_array_equal(result, expected)


FORMS = [("bfloat16", 128), ("float16", 256)]
OTHERS = [("float16", 128), ("bfloat16", 256)]


@pytest.mark.parametrize(("kind", "head_dim"), [*FORMS, *long(OTHERS)])
def test_wgmma_of_every_descriptor_that_prefill_makes(kind, head_dim, launch):
    """S = Q K^T, rows of both along the dims, and O = O + P V with P in registers and V transposed.

    The steps are those of the kernel, through all panels of 64 dims, and so are the places in shared memory.
    """
    config = TensorConfig(head_dim, 1, 16, kind, kind)
    shape = WgmmaShape(config)
    rows_at, values_at = products.make_descriptors(shape)
    multiply_keys, multiply_values = products.make_products(config, shape)
    wait_keys, _, wait_values = products.make_waits(config, shape)
    K_START, V_START = shape.k_start, shape.k_start + shape.tile_bytes  # one stage
    NBYTES = V_START + shape.tile_bytes
    SCORES, WORDS, OUTPUTS = shape.keys // 2, shape.keys // 4, head_dim // 2
    THREADS = shape.num_threads

    # By constant indices: an array that is not in registers would be touched before the product has ended.
    @device_function
    def number(i, array):
        array[i] = float32(i)

    @device_function
    def fetch(i, array, where):
        array[i] = device.load_4(where + i * 4)

    @device_function
    def store(i, array, where):
        device.store_4(where + i * 4, device.float_bits(array[i]))

    def kernel(image, p_words, s_result, o_result):
        shared = device.shared_address(cuda.shared.array(0, uint32, alignment=1024))
        thread = cuda.threadIdx.x
        for at in range(16 * thread, NBYTES, 16 * THREADS):
            a, b, c, d = device.load_16(device.address(image) + at)
            warp.store_shared_words(uint32(shared + uint32(at)), a, b, c, d)
        fence_proxy()
        cuda.syncthreads()
        s, o = device.local_array(SCORES, float32), device.local_array(OUTPUTS, float32)
        p = device.local_array(WORDS, uint32)
        multiply_keys(s, rows_at(uint32(shared + uint32(thread // 128 * 64 * 128))), rows_at(uint32(shared + K_START)))
        wait_keys(s)
        device.for_each(store, SCORES, (s, device.address(s_result) + thread * SCORES * 4))
        device.for_each(fetch, WORDS, (p, device.address(p_words) + thread * WORDS * 4))
        device.for_each(number, OUTPUTS, (o,))
        multiply_values(o, p, values_at(uint32(shared + V_START)))
        wait_values(o)
        device.for_each(store, OUTPUTS, (o, device.address(o_result) + thread * OUTPUTS * 4))

    rng = np.random.default_rng(9)
    q, k, v = (whole(rng, (rows, head_dim), kind) for rows in (shape.rows, shape.keys, shape.keys))
    p = whole(rng, (shape.rows, shape.keys), kind)
    image = np.concatenate([wgmma_kernels.k_major(panel) for x in (q, k, v) for panel in panels(x)])
    s, o = np.zeros((THREADS, SCORES), np.float32), np.zeros((THREADS, OUTPUTS), np.float32)
    source = KernelSource(kernel, types.void(*[BYTES] * 4), THREADS, is_specific=True)
    launch(source, (1, 1, 1), [image, fragments(p), s, o], NBYTES, least=(9, 0))
    wide_q, wide_k, wide_v, wide_p = (x.astype(np.float64) for x in (q, k, v, p))
    np.testing.assert_array_equal(s, of_warpgroups(wide_q @ wide_k.T))
    np.testing.assert_array_equal(o, of_warpgroups(wide_p @ wide_v) + np.arange(OUTPUTS))


def panels(matrix):
    return [matrix[:, i : i + 64] for i in range(0, matrix.shape[1], 64)]


def of_warpgroups(matrix):
    """Accumulators of a matrix of 128 rows, 64 of each of two warpgroups."""
    return np.concatenate([wgmma_kernels.accumulators(rows) for rows in np.split(matrix, 2)])


def fragments(matrix):
    """A of 128 rows as four words for each 16 columns."""
    steps = np.split(matrix, matrix.shape[1] // 16, axis=1)
    return np.concatenate(
        [np.concatenate([wgmma_kernels.fragments(rows) for rows in np.split(step, 2)]) for step in steps], axis=1
    )
