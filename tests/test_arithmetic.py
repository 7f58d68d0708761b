"""No operation depends on the arithmetic that the caller's thread is set to, and none leaves it changed."""

import contextlib
import ctypes
import platform
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

import pagedkv
from pagedkv import arithmetic, reference

from .support.problems import Spec, build
from .support.problems import run as run_problem

pytestmark = pytest.mark.usefixtures("restore_threads")
TINY = np.float32(1e-40)  # a denormal
UPWARD = {"x86_64": 0x800, "AMD64": 0x800, "aarch64": 0x400000, "arm64": 0x400000}


@contextlib.contextmanager
def flushing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def rounding_upward():
    mode = UPWARD.get(platform.machine())
    if mode is None or arithmetic._DEFAULT is None:
        pytest.skip("nobody knows how to set the rounding mode here")
    library = ctypes.CDLL(None)
    assert library.fesetround(mode) == 0
    try:
        yield
    finally:
        library.fesetround(0)


@contextlib.contextmanager
def raising():
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


SETTINGS = {"flushing": flushing, "rounding": rounding_upward, "raising": raising}


def decode(length, **options):
    """Values that underflow in the sums, in the softmax and in the rounding of the result."""
    rng = np.random.default_rng(0)
    dtype = options.pop("dtype", np.float32)
    k, v = rng.standard_normal((2, -(-length // 16), 16, 2, 64), np.float32)
    v *= TINY
    k[0, 0] *= 1e4
    v[0, :, 1] = 6e4
    q = rng.standard_normal((2, 8, 64), np.float32)
    q[0] *= TINY
    tables = np.tile(rng.permutation(len(k)).astype(np.int32), (2, 1))
    args = (*(x.astype(dtype) for x in (q, k, v)), tables, np.array([length, length - 5], np.int32))
    return lambda: pagedkv.decode_attention(*args, return_lse=True, **options)


def prefill():
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 4, 16, 2, 64), np.float32)
    q = rng.standard_normal((40, 8, 64), np.float32) * 30
    args = (q, k, v * TINY, np.arange(4, dtype=np.int32)[None], np.array([60], np.int32), np.array([0, 40], np.int32))
    return lambda: pagedkv.prefill_attention(*args, return_lse=True)


def write(dtype, **options):
    x = np.random.default_rng(2).standard_normal((9, 2, 64), np.float32) * np.float32(10) ** np.arange(-41, 40, 9)[
        :, None, None
    ].astype(np.float32)

    def call():
        caches = [np.zeros((4, 16, 2, 64), dtype) for _ in range(2)]
        pagedkv.write_kv(x, -x, *caches, np.arange(9), **options)
        return caches

    return call


def gather():
    codes = np.arange(2 * 4 * 16 * 2 * 64).astype(np.uint8).reshape(2, 4, 16, 2, 64)
    table = np.arange(4, dtype=np.int32)
    options = {"kv_dtype": "fp8_e5m2", "k_scale": 1e-40, "v_scale": 1e38}
    return lambda: pagedkv.gather_kv(*codes, table, 60, **options)


def merge(dtype=np.float32):
    outs = (np.random.default_rng(3).standard_normal((3, 4, 8, 64), np.float32) * TINY).astype(dtype)
    outs[0] = 6e4
    lses = np.linspace(-200, 100, 3 * 4 * 8, dtype=np.float32).reshape(3, 4, 8)
    lses[:, 0] = -np.inf
    return lambda: pagedkv.merge_states(outs, lses)


def rotate(dtype):
    q = (np.random.default_rng(4).standard_normal((9, 2, 64), np.float32) * TINY).astype(dtype)
    q[4:] = 6e4
    angles = np.linspace(0, 100, 9 * 32, dtype=np.float32).reshape(9, 32)
    tables = np.cos(angles), np.sin(angles)
    return lambda: pagedkv.apply_rotary(q, q, *tables, np.arange(9))


def copy():
    caches = np.full((2, 4, 16, 2, 8), TINY)
    return lambda: pagedkv.copy_blocks(*caches, np.array([[0, 1]])) or caches


def emulated():
    problem = build(Spec(layout="vllm"))
    problem.v_cache[...] *= TINY
    return lambda: run_problem(problem, backend="emulator")


CALLS = {
    "decode on this thread": decode(100),
    "decode on workers": decode(3000),
    "decode of float16": decode(100, dtype=np.float16),
    "decode of bfloat16": decode(100, dtype=ml_dtypes.bfloat16),
    "prefill": prefill(),
    "write": write(np.float32),
    "write of float16": write(np.float16),
    "write of bfloat16": write(ml_dtypes.bfloat16),
    "write of fp8": write(np.uint8, kv_dtype="fp8_e4m3", k_scale=1e-40, v_scale=np.full(2, 3e-39, np.float32)),
    "gather": gather(),
    "merge": merge(),
    "merge of float16": merge(np.float16),
    "rotate": rotate(np.float32),
    "rotate float16": rotate(np.float16),
    "copy": copy(),
    "emulator": emulated(),
}


def bits(results):
    return [np.array(x).tobytes() for x in results]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:ml_dtypes")
def test_the_bits_do_not_depend_on_the_settings_of_the_caller(name, setting):
    call = CALLS[name]
    expected = bits(call())
    pagedkv.set_num_threads(2)  # new workers, who would have the settings of the thread that starts them
    with SETTINGS[setting]():
        results = call()
    assert bits(results) == expected


def test_the_reference_computes_whatever_the_errstate():
    problem = build(Spec())
    problem.q[...] *= 1e4
    expected = reference.decode_attention(*problem.args)
    with raising():
        np.testing.assert_array_equal(reference.decode_attention(*problem.args), expected)


def test_settings_are_as_before_after_a_call_and_after_an_exception():
    def state():
        """Where numbers are rounded to, whether denormals are flushed, and the errstate."""
        one, tiny = np.ones(1, np.float32), np.array([TINY])
        return (one + one / 10**9).tobytes(), (tiny + tiny).tobytes(), np.geterr()

    def fail():
        raise MemoryError

    default = state()
    with flushing(), rounding_upward(), np.errstate(over="raise", under="warn"):
        before = state()
        assert before[0] != default[0]
        assert before[1] != default[1]
        for name in ("decode on this thread", "merge", "write"):
            CALLS[name]()
            assert state() == before
        with pytest.raises(MemoryError):
            arithmetic.with_default_float_env(fail)()
        assert state() == before
    assert state() == default


def test_where_the_library_cannot_be_asked_nothing_is_set(monkeypatch):
    """Windows has no library of the process: TypeError."""

    def missing(name):
        raise TypeError

    monkeypatch.setattr(arithmetic.ctypes, "PyDLL", missing)
    get, put, default = arithmetic._of_the_c_library()
    get(default)
    put(default)
