"""Fixtures for tests of the kernel cache and its folder."""

import logging

import pytest

from pagedkv.compiling import kernel_cache
from pagedkv.compiling.kernel_cache import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "blobs", ".blob")


@pytest.fixture
def warnings_logged(monkeypatch, caplog):
    monkeypatch.setattr(kernel_cache, "_warned", set())
    with caplog.at_level(logging.WARNING, "pagedkv"):
        yield lambda: [record.getMessage() for record in caplog.records]
