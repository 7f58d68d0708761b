"""Fixtures for tests of the kernel cache and its folder."""

import logging

import pytest

from pagedkv.kernel_cache import files
from pagedkv.kernel_cache.files import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "blobs", ".blob")


@pytest.fixture
def warnings_logged(monkeypatch, caplog):
    monkeypatch.setattr(files, "_warned", set())
    with caplog.at_level(logging.WARNING, "pagedkv"):
        yield lambda: [record.getMessage() for record in caplog.records]
