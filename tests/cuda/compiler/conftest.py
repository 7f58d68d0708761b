"""Counts compilations."""

import pytest

import pagedkv.cuda.compiler.compile as compiling


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
