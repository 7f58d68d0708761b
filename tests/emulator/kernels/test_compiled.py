"""Kernels compiled by numba-cuda from Python, run on three architectures, compared with NumPy."""

import math

import numpy as np
import pytest
from numba import cuda, types
from numba.cuda import libdevice

from pagedkv.emulator import UnsupportedInstructionError

from ...support.strategies import long
from ..ptx_harness import run_arrays

f32, i32, f16 = types.float32, types.int32, types.float16
N = 64
RNG = np.random.default_rng(1)
X = RNG.standard_normal(N).astype("f4")
Y = RNG.standard_normal(N).astype("f4")
XI = RNG.integers(-(2**31), 2**31, N).astype("i4")
YI = RNG.integers(1, 1000, N).astype("i4")
T = np.arange(N)
CONST = np.arange(64, dtype="f4") ** 2


def exp(a, o):
    t = cuda.threadIdx.x
    o[t] = math.exp(a[t])


def log_sqrt_sin(a, o):
    t = cuda.threadIdx.x
    o[t] = math.log(abs(a[t])) + math.sqrt(abs(a[t])) + math.sin(a[t])


def divide(a, b, o):
    t = cuda.threadIdx.x
    o[t] = a[t] / b[t]


def int_div_mod(a, b, o):
    t = cuda.threadIdx.x
    o[t] = a[t] // b[t] + a[t] % b[t]


def atomic_float(o):
    t = cuda.threadIdx.x
    cuda.atomic.add(o, t % 8, f32(1.5))
    cuda.atomic.max(o, 8 + t % 2, f32(t))


def atomic_int(o):
    t = cuda.threadIdx.x
    cuda.atomic.add(o, 0, i32(1))
    cuda.atomic.cas(o, 1, 0, 7)
    cuda.atomic.exch(o, 2, i32(5))
    cuda.atomic.or_(o, 3, 1 << (t % 31))
    cuda.atomic.min(o, 4, -t)


def local_array(a, o):
    t = cuda.threadIdx.x
    scratch = cuda.local.array(8, f32)
    for i in range(8):
        scratch[(i * 3) % 8] = a[(t + i) % 64]
    s = f32(0)
    for i in range(8):
        s += scratch[(i + t) % 8] * i
    o[t] = s


def const_array(o):
    c = cuda.const.array_like(CONST)
    t = cuda.threadIdx.x
    o[t] = c[63 - t]


def votes(a, o):
    t = cuda.threadIdx.x
    b = cuda.ballot_sync(0xFFFFFFFF, a[t] > 0)
    o[t] = cuda.popc(b) + 1000 * cuda.any_sync(0xFFFFFFFF, a[t] > 2.5) + 100 * cuda.all_sync(0xFFFFFFFF, a[t] > -9)


def bit_ops(a, o):
    t = cuda.threadIdx.x
    v = a[t]
    o[t] = cuda.clz(v) + cuda.popc(v) + cuda.brev(v) % 7 + cuda.ffs(v)


def half_to_float(a, o):
    t = cuda.threadIdx.x
    o[t] = f32(a[t]) * f32(2.0)


def float_to_half(a, o):
    t = cuda.threadIdx.x
    o[t] = f16(a[t] * f32(3.0))


def use_libdevice(a, o):
    t = cuda.threadIdx.x
    o[t] = libdevice.fast_expf(a[t]) + libdevice.fmaf(a[t], a[t], f32(1)) + libdevice.fmaxf(a[t], f32(0))


def double_math(a, o):
    t = cuda.threadIdx.x
    o[t] = math.tanh(a[t]) + math.exp(a[t]) + math.pow(abs(a[t]), 1.5)


def collatz(a, o):
    t = cuda.threadIdx.x
    c = 0
    v = a[t]
    while v != 1 and c < 200:
        if v & 1:
            v = 3 * v + 1
        else:
            v >>= 1
        c += 1
    o[t] = c


def collatz_ref(v):
    c = 0
    while v != 1 and c < 200:
        v = 3 * v + 1 if v & 1 else v >> 1
        c += 1
    return c


def dynamic_shared(a, o):
    t = cuda.threadIdx.x
    s = cuda.shared.array(0, f32)
    s2 = cuda.shared.array(0, i32)[64:]
    s[t] = a[t]
    s2[t] = t
    cuda.syncthreads()
    o[t] = s[63 - t] + s2[t]


def generic_pointer(a, o):
    t = cuda.threadIdx.x
    s = cuda.shared.array(64, f32)
    s[t] = -a[t]
    cuda.syncthreads()
    p = s if t % 2 == 0 else a
    o[t] = p[t]


@cuda.jit(device=True, inline="never")
def not_inlined(x, n):
    for i in range(n):
        x = x * f32(1.01) + f32(i)
    return x


def device_function(a, o):
    t = cuda.threadIdx.x
    o[t] = not_inlined(a[t], 5)


def device_function_ref():
    z = X.copy()
    for i in range(5):
        z = z * np.float32(1.01) + np.float32(i)
    return z


def shuffles(a, o):
    t = cuda.threadIdx.x
    o[t] = cuda.shfl_up_sync(-1, a[t], 2) + cuda.shfl_sync(-1, a[t], 5)


def shuffle_double(a, o):
    t = cuda.threadIdx.x
    o[t] = cuda.shfl_xor_sync(-1, a[t], 7)


def count(o):
    t = cuda.threadIdx.x
    o[t] = cuda.syncthreads_count(i32(1 if t % 3 == 0 else 0))


def match(a, o):
    t = cuda.threadIdx.x
    o[t] = cuda.match_any_sync(0xFFFFFFFF, a[t] % 4)


def guarded(a, o):
    g = cuda.grid(1)
    o[g] = a[g] if g < a.size else 0.0
    cuda.threadfence()


def transpose_2d(a, o):
    i, j = cuda.grid(2)
    if i < a.shape[0] and j < a.shape[1]:
        o[i, j] = a[i, j] * 2


Z32 = np.zeros(N, "f4")
ZI = np.zeros(N, "i4")
AF = np.zeros(N, "f4")
AF[:8] = 12
AF[8:10] = (62, 63)
AI = np.zeros(N, "i4")
AI[:5] = (64, 7, 5, 2**31 - 1, -63)
M2 = RNG.standard_normal((37, 21)).astype("f4")
LOC = np.zeros((64, 8))
for _i in range(8):
    LOC[:, (_i * 3) % 8] = X[(T + _i) % 64]
X8 = X.astype("f8")
XU = XI.view("u4")

CASES = {
    "exp": (exp, [X, Z32], np.exp(X8), 3e-6),
    "log_sqrt_sin": (log_sqrt_sin, [X, Z32], np.log(abs(X8)) + np.sqrt(abs(X8)) + np.sin(X8), 5e-6),
    "divide": (divide, [X, Y, Z32], X / Y, 1e-4),
    "int_div_mod": (int_div_mod, [XI, YI, ZI], XI // YI + XI % YI, 0),
    "atomic_float": (atomic_float, [Z32], AF, 0),
    "atomic_int": (atomic_int, [ZI], AI, 0),
    "local_array": (local_array, [X, Z32], sum(LOC[T, (_j + T) % 8] * _j for _j in range(8)), 1e-5),
    "const_array": (const_array, [Z32], CONST[::-1], 0),
    "votes": (
        votes,
        [X, ZI],
        np.repeat((X.reshape(2, 32) > 0).sum(1) + 1000 * (X.reshape(2, 32) > 2.5).any(1) + 100, 32),
        0,
    ),
    "bit_ops": (
        bit_ops,
        [XU, ZI],
        np.array(
            [
                32 - v.bit_length() + bin(v).count("1") + int(f"{v:032b}"[::-1], 2) % 7 + (v & -v).bit_length()
                for v in map(int, XU)
            ]
        ),
        0,
    ),
    "half_to_float": (half_to_float, [X.astype("f2"), Z32], X.astype("f2").astype("f4") * 2, 0),
    "float_to_half": (float_to_half, [X, np.zeros(N, "f2")], (X * np.float32(3)).astype("f2"), 0),
    "libdevice": (use_libdevice, [X, Z32], np.exp(X8) + X8 * X8 + 1 + np.maximum(X8, 0), 1e-5),
    "double_math": (double_math, [X8, np.zeros(N)], np.tanh(X8) + np.exp(X8) + np.abs(X8) ** 1.5, 1e-12),
    "collatz": (collatz, [YI, ZI], np.array([collatz_ref(int(v)) for v in YI]), 0),
    "dynamic_shared": (dynamic_shared, [X, Z32], X[::-1] + T, 1e-5),
    "generic_pointer": (generic_pointer, [X, Z32], np.where(T % 2 == 0, -X, X), 0),
    "device_function": (device_function, [X, Z32], device_function_ref(), 1e-5),
    "shuffles": (shuffles, [X, Z32], np.where(T % 32 >= 2, X[np.maximum(T - 2, 0)], X) + X[T - T % 32 + 5], 1e-6),
    "shuffle_double": (shuffle_double, [X8, np.zeros(N)], X8[T ^ 7], 0),
    "count": (count, [ZI], np.full(N, 22), 0),
    "match": (
        match,
        [YI, np.zeros(N, "u4")],
        np.array([sum(1 << k for k in range(32) if YI[i // 32 * 32 + k] % 4 == YI[i] % 4) for i in range(N)], "u4"),
        0,
    ),
    "guarded": (guarded, [X, Z32], X, 0),
    "transpose_2d": (transpose_2d, [M2, np.zeros_like(M2)], M2 * 2, 0),
}


OTHERS = [(name, ((8, 0), (10, 0))[(i + shift) % 2]) for shift in (0, 1) for i, name in enumerate(CASES)]


@pytest.mark.parametrize(
    ("name", "cc"),
    [*((name, (9, 0)) for name in CASES), *OTHERS[: len(CASES)], *long(OTHERS[len(CASES) :])],
    ids=lambda x: x if isinstance(x, str) else f"sm{x[0]}{x[1]}",
)
def test_compiled_kernels_compute_what_numpy_does(name, cc):
    fn, args, want, tol = CASES[name]
    args = [a.copy() for a in args]
    kw = {"grid": (5, 3), "block": (8, 8)} if name == "transpose_2d" else {"grid": 1, "block": N}
    run_arrays(fn, kw["grid"], kw["block"], *args, shared_bytes=512 if name == "dynamic_shared" else 0, cc=cc)
    np.testing.assert_allclose(args[-1].astype("f8"), np.asarray(want, "f8"), atol=tol, rtol=0)


@pytest.mark.parametrize(
    ("name", "tol"), [("exp", 3e-6), ("log_sqrt_sin", 1e-5), ("divide", 1e-4), ("libdevice", 1e-5)]
)
def test_fastmath_stays_within_its_tolerance(name, tol):
    fn, args, want, _ = CASES[name]
    args = [a.copy() for a in args]
    run_arrays(fn, 1, N, *args, fastmath=True)
    np.testing.assert_allclose(args[-1], want, atol=tol, rtol=0)


@pytest.mark.parametrize(
    "name", ["votes", "collatz", "dynamic_shared", "count", "match", "local_array", "atomic_int", "shuffles"]
)
def test_random_schedules_agree(name):
    fn, args, want, tol = CASES[name]
    for seed in range(4):
        a = [x.copy() for x in args]
        run_arrays(fn, 1, N, *a, shared_bytes=512 if name == "dynamic_shared" else 0, seed=seed)
        np.testing.assert_allclose(a[-1].astype("f8"), np.asarray(want, "f8"), atol=max(tol, 1e-12), rtol=0)


def test_float16_arithmetic_of_numba_calls_external_functions():
    """numba's own half arithmetic is not contained in compile_ptx output; the simulator says so."""

    def kernel(a, o):
        t = cuda.threadIdx.x
        o[t] = cuda.fp16.hfma(a[t], a[t], a[t])

    h = X.astype("f2")
    with pytest.raises(UnsupportedInstructionError, match="external"):
        run_arrays(kernel, 1, N, h, h.copy())


@pytest.mark.parametrize("fastmath", [False, True, {"contract"}])
def test_infinities(fastmath):
    def kernel(a, o, n):
        t = cuda.threadIdx.x
        m = f32(-math.inf)
        for i in range(n):
            m = max(m, a[t * 4 + i])
        s = f32(0.0)
        for i in range(n):
            s += math.exp(a[t * 4 + i] - m)
        o[t] = f32(-7.0) if m == -math.inf else s

    o = np.zeros(32, "f4")
    for n in (0, 4):
        run_arrays(kernel, 1, 32, np.full(128, -np.inf, "f4"), o, n, fastmath=fastmath)
        assert (o == -7).all()


def test_maximum_ignores_nan():
    def kernel(a, b, o):
        t = cuda.threadIdx.x
        o[t] = max(a[t], b[t])

    x, o = np.array([np.nan, 0, 2, np.nan] * 8, "f4"), np.zeros(32, "f4")
    run_arrays(kernel, 1, 32, x, np.ones(32, "f4"), o)
    np.testing.assert_array_equal(o, [1, 1, 2, 1] * 8)
