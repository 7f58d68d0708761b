"""Devices that record, and no plan of an earlier test."""

import pytest

from pagedkv import backends

from ...support.device_fakes import recording


@pytest.fixture
def nothing_planned(monkeypatch):
    monkeypatch.setattr(backends, "_backends", {})


@pytest.fixture
def devices():
    with recording() as devices:
        yield devices
