"""The driver and cuda-core as they are found, or what the message says where they are not."""

import subprocess
import sys

import pytest

from pagedkv.cuda import driver as drivers
from pagedkv.cuda.driver import cuda_device
from pagedkv.errors import BackendUnavailableError
from pagedkv.extras import pip_install

from .driver_fakes import Code


@pytest.fixture
def bindings(monkeypatch):
    """cuda.bindings.driver, as if there were a driver for CUDA 13.0, and no GPU had been used yet."""
    from cuda.bindings import driver

    drivers.bindings.cache_clear()
    monkeypatch.setattr(drivers, "_gpus", {})
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (Code(0), 13000))
    monkeypatch.setattr(driver, "cuInit", lambda flags: (Code(0),))
    yield driver
    drivers.bindings.cache_clear()


def test_a_driver_that_starts(bindings):
    import cuda.core

    assert drivers.bindings() == (bindings, cuda.core)


def test_without_a_driver_the_message_says_what_to_install(bindings, monkeypatch):
    def missing():
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    with monkeypatch.context() as patch:
        patch.setattr(bindings, "cuDriverGetVersion", missing)
        with pytest.raises(BackendUnavailableError, match=r'no CUDA driver.*driver >= 580, or use backend="emulator"'):
            cuda_device(0, 0)
    assert drivers.bindings()


def test_an_old_driver_is_named(bindings, monkeypatch):
    monkeypatch.setattr(bindings, "cuDriverGetVersion", lambda: (Code(0), 12040))
    with pytest.raises(
        BackendUnavailableError, match=r'for CUDA 12\.4, and the CUDA 13.*>= 580.*pip install .*\[cu12\]"'
    ):
        cuda_device(0, 0)


def test_no_gpu_is_named(bindings, monkeypatch):
    error = bindings.CUresult.CUDA_ERROR_NO_DEVICE
    monkeypatch.setattr(bindings, "cuInit", lambda flags: (error,))
    with pytest.raises(BackendUnavailableError, match=r"no GPU that it can use \(CUDA_ERROR_NO_DEVICE\)"):
        cuda_device(0, 0)


def test_without_cuda_core_the_message_says_what_to_install():
    program = """
import sys
sys.modules["cuda.core"] = None
from pagedkv import BackendUnavailableError
try:
    from pagedkv.cuda.driver import cuda_device
except BackendUnavailableError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "numba-cuda, which cannot be imported (import of cuda.core halted" in done.stdout
    assert pip_install("cu13") in done.stdout
