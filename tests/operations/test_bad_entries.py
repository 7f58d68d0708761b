"""raise_if_failed: errors for entries that kernels have skipped."""

import sys

import numpy as np
import pytest

import pagedkv
from pagedkv import backends
from pagedkv.arrays import current_streams
from pagedkv.cuda import driver
from pagedkv.cuda.backend import GpuBackend

from ..support.device_fakes import RecordingDevice, fake_cupy, fake_torch


@pytest.fixture
def used(monkeypatch):
    """Calls have gone to GPUs."""
    monkeypatch.setattr(backends, "_backends", {"cuda": GpuBackend()})


class ReportingDevice(RecordingDevice):
    """Has a report buffer with an entry in it, if there is one."""

    def __init__(self, *entry):
        super().__init__()
        self.report = np.array([1, *entry] if entry else [0] * 5, np.int64)

    def take(self, name):
        content, self.report = self.report.view(np.uint8), np.zeros(5, np.int64)
        return content


def test_a_bad_entry_of_any_device_is_raised_once(monkeypatch, used):
    devices = [ReportingDevice(), ReportingDevice(1, 3, 2, 99), ReportingDevice(2, 4, 0, -7)]
    monkeypatch.setattr(driver, "cuda_devices", lambda: devices)
    with pytest.raises(IndexError, match=r"block_tables .* got 99 for sequence 3, column 2"):
        pagedkv.raise_if_failed()
    with pytest.raises(ValueError, match=r"seq_lens .* got -7 for sequence 4"):
        pagedkv.raise_if_failed()
    pagedkv.raise_if_failed()


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_no_call_waits_in_a_capture(monkeypatch, used, framework):
    module = fake_cupy() if framework == "cupy" else fake_torch()
    module.streams[0] = 7
    monkeypatch.setitem(sys.modules, framework, module)
    refused = []
    monkeypatch.setattr(driver, "refuse_capture", lambda streams, reason: refused.extend(streams))
    monkeypatch.setattr(driver, "cuda_devices", lambda: [])
    pagedkv.raise_if_failed()
    assert 7 in refused


def test_torch_that_uses_no_gpu_has_no_stream(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert current_streams() == []


def test_raise_if_failed_before_any_call_raises_nothing(monkeypatch):
    monkeypatch.setattr(backends, "_backends", {})
    monkeypatch.setattr(driver, "cuda_devices", lambda: pytest.fail("there is nothing to ask"))
    pagedkv.raise_if_failed()
