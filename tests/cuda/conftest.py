"""Compiled kernels start from nothing in the tests that ask for it."""

import pytest

import pagedkv.cuda.compiler.compile as compiling


@pytest.fixture
def directory(monkeypatch, tmp_path):
    """The directory of compiled kernels, which is not there yet; this process has none either."""
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_compiled", {})
    return tmp_path / "cuda"
