"""Compiled kernels and the driver start from nothing in the tests that ask for it."""

import pytest

import pagedkv.cuda.compiler.compile as compiling
from pagedkv import backends
from pagedkv.cuda import driver as drivers

from ..support.device_fakes import without_code
from .driver_fakes import Recorder


@pytest.fixture
def cuda(monkeypatch):
    """The driver of two GPUs that nobody has used yet: it records its calls, of kernels without code."""
    assert drivers.cuda_device.__module__ == drivers.__name__, "an earlier test has left its own"
    recorder = Recorder()
    monkeypatch.setattr(drivers, "bindings", lambda: (recorder, recorder))
    monkeypatch.setattr(drivers, "_gpus", {})
    monkeypatch.setattr(drivers, "_devices", {})
    monkeypatch.setattr(backends, "_backends", {})
    with without_code():
        yield recorder


def start_again(monkeypatch):
    """Forget the kernels of this process."""
    monkeypatch.setattr(compiling._load_or_compile, "made", {})


@pytest.fixture
def directory(monkeypatch, tmp_path):
    """The directory of compiled kernels, which is not there yet; this process has none either."""
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    start_again(monkeypatch)
    return tmp_path / "cuda"
