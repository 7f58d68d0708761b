"""Compilations are counted, and kernels forgotten."""

import pytest

import pagedkv.compiler.compile as compiling


@pytest.fixture
def compiled(monkeypatch):
    """How often numba has compiled."""
    calls = []
    make_ptx = compiling._make_ptx

    def counted(*args):
        calls.append(args)
        return make_ptx(*args)

    monkeypatch.setattr(compiling, "_make_ptx", counted)
    return calls


def start_again(monkeypatch):
    """Forget the kernels of this process."""
    monkeypatch.setattr(compiling._load_or_compile, "made", {})


@pytest.fixture
def directory(monkeypatch, tmp_path):
    """The directory of compiled kernels, which is not there yet; this process has none either."""
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    start_again(monkeypatch)
    return tmp_path / "cuda"
