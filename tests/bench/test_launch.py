"""The bench of launches runs without a GPU, and measures calls that reach the device."""

import sys

from pagedkv.bench import launch


def test_launch_bench_runs(monkeypatch):
    monkeypatch.setattr(launch, "CALLS_PER_REPEAT", 5)
    before = sys.modules.get("cupy")
    rows = launch.run(repeats=2, progress=lambda text: None)
    assert [(row["arrays"], row["kernel"], row["launches"]) for row in rows] == [
        ("interface only", "v1", 1),
        ("interface only", "v2", 2),
        ("like CuPy", "v1", 1),
        ("like CuPy", "v2", 2),
    ]
    assert all(0 < row["us"] < 10_000 for row in rows)
    assert sys.modules.get("cupy") is before
