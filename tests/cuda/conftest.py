"""Compiled kernels and the driver start from nothing in the tests that ask for it."""

import contextlib
import sys

import pytest

from pagedkv import backends
from pagedkv.cuda import driver as drivers

from ..compiler.conftest import directory as directory  # a fixture
from ..support.device_fakes import without_code
from .driver_fakes import Recorder
from .graph_fakes import cupy_with_graphs, torch_with_graphs


@contextlib.contextmanager
def recorded(recorder):
    """The driver of two GPUs that nobody has used yet: it records its calls, of kernels without code."""
    assert drivers.cuda_device.__module__ == drivers.__name__, "an earlier test has left its own"
    with pytest.MonkeyPatch.context() as patch, without_code():
        patch.setattr(drivers, "bindings", lambda: (recorder, recorder))
        patch.setattr(drivers, "_gpus", {})
        patch.setattr(drivers, "_devices", {})
        patch.setattr(backends, "_backends", {})
        yield recorder


@pytest.fixture
def cuda():
    with recorded(Recorder()) as recorder:
        yield recorder


@pytest.fixture
def torch(cuda, monkeypatch):
    module = torch_with_graphs(cuda)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def cupy(cuda, monkeypatch):
    module = cupy_with_graphs(cuda)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module
