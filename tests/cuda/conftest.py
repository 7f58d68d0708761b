"""Compiled kernels start from nothing in the tests that ask for it."""

import pytest

import pagedkv.cuda.compiler.compile as compiling


def start_again(monkeypatch):
    """Forget the kernels of this process."""
    monkeypatch.setattr(compiling._load_or_compile, "made", {})


@pytest.fixture
def directory(monkeypatch, tmp_path):
    """The directory of compiled kernels, which is not there yet; this process has none either."""
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    start_again(monkeypatch)
    return tmp_path / "cuda"
