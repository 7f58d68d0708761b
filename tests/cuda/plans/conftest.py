"""Devices that record, and no plan of an earlier test."""

import sys

import pytest

from pagedkv import backends

from ...support.device_fakes import InterfaceArray, fake_cupy, fake_torch, recording


@pytest.fixture
def nothing_planned(monkeypatch):
    monkeypatch.setattr(backends, "_backends", {})


@pytest.fixture
def devices():
    with recording() as devices:
        yield devices


@pytest.fixture(params=["interface", "cupy", "torch"])
def kind(request, monkeypatch):
    """What makes a device array of a NumPy array."""
    if request.param == "interface":
        return InterfaceArray
    module = fake_cupy() if request.param == "cupy" else fake_torch()
    monkeypatch.setitem(sys.modules, request.param, module)
    return module.ndarray if request.param == "cupy" else module.Tensor
