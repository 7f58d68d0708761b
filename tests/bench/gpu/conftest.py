"""Fixtures for tests of the GPU benches."""

import pytest

from pagedkv.bench.gpu import measure


@pytest.fixture
def one_launch(monkeypatch):
    """A sample is one launch: subjects that compute take no time by the clock of a fake GPU, and would be launched 50
    times."""
    monkeypatch.setattr(measure, "MOST_LAUNCHES", 1)
