"""Operations neither depend on nor change the floating-point settings of the caller's thread."""

import contextlib
import ctypes
import platform
import warnings

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv import arithmetic, reference

from .support.operations import OPERATIONS, Operation

pytestmark = pytest.mark.usefixtures("restore_threads", "without_lines")
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


def values(*shape):
    """Numbers of which some columns are denormals, and some overflow once they are multiplied with each other."""
    rng = np.random.default_rng(0)
    scales = np.resize(np.array([1, 1e-40, 3e4], np.float32), shape[-1])
    return rng.uniform(-1, 2, shape).astype(np.float32) * scales


def merge_in_the_emulator(values):
    outs, lses = values(2, 16, 8, 64), values(2, 16, 8)
    return Operation(lambda: pagedkv.merge_states(outs, lses, backend="emulator"), [])


CALLS = OPERATIONS | {"merge in the emulator": merge_in_the_emulator}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:ml_dtypes")
def test_results_do_not_depend_on_the_settings_of_the_caller(name):
    operation = CALLS[name](values)
    expected = operation.result()
    for setting in SETTINGS.values():
        pagedkv.set_num_threads(2)  # new workers, who would have the settings of the thread that starts them
        with setting():
            found = operation.result()
        assert found == expected


def test_the_reference_computes_whatever_the_errstate():
    arguments = [
        values(2, 8, 64),
        *values(2, 4, 16, 2, 64),
        np.array([[0, 1], [2, 3]], np.int32),
        np.array([32, 5], np.int32),
    ]
    expected = reference.decode_attention(*arguments)
    with raising():
        np.testing.assert_array_equal(reference.decode_attention(*arguments), expected)


def test_settings_are_restored_after_a_call_and_after_an_exception():
    def state():
        """Where numbers are rounded to, whether denormals are flushed, and the errstate."""
        one, tiny = np.ones(1, np.float32), np.array([np.float32(1e-40)])
        return (one + one / 10**9).tobytes(), (tiny + tiny).tobytes(), np.geterr()

    default = state()
    with flushing(), rounding_upward(), np.errstate(over="raise", under="warn"):
        before = state()
        assert before[0] != default[0]
        assert before[1] != default[1]
        for name in ("decode", "merge", "write"):
            OPERATIONS[name](values).call()
            assert state() == before
        with pytest.raises(ZeroDivisionError):
            arithmetic.with_default_float_env(lambda: 1 / 0)()
        assert state() == before
    assert state() == default


def test_without_a_c_library_no_setting_is_touched(monkeypatch):
    """Windows has no library of the process: TypeError."""

    def missing(name):
        raise TypeError

    monkeypatch.setattr(arithmetic.ctypes, "PyDLL", missing)
    get, put, default = arithmetic._find_fenv()
    get(default)
    put(default)
