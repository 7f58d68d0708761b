"""What makes a run on a GPU survive a bad kernel, tried where there is none."""

import os
from types import SimpleNamespace

from pagedkv.cuda import driver

from ..conftest import pytest_runtest_teardown
from ..cuda.conftest import recorded
from ..cuda.driver_fakes import Recorder


def test_a_worker_on_which_an_error_sticks_ends_before_its_next_test(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    item = SimpleNamespace(path="test_kernel.py", get_closest_marker=lambda name: name == "gpu")
    with recorded(Recorder()) as cuda:
        driver.cuda_device(0, 0)
        next(pytest_runtest_teardown(item, item))
        assert not ended
        cuda.fail["wait"] = 700  # an illegal address: every later call of the process fails with it
        next(pytest_runtest_teardown(item, item))
        assert ended
