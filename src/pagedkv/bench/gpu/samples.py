"""Times of calls on a GPU, each launch on its own with a cold cache."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple

from .frameworks import Call, Gpu

SAMPLE_MS = 1.0
MOST_LAUNCHES = 50


class Sample(NamedTuple):
    """Milliseconds of one launch, the mean of a few; microseconds that the host took to ask for one; and the share of
    them that the GPU was ready for before the host had asked, whose times hold waiting for the host."""

    milliseconds: float
    host_us: float
    late: float


def sample(gpu: Gpu, call: Call, launches: int) -> Sample:
    """Time launches one by one between two events each, each after a flush that is not timed, and wait at the end.

    The GPU is busy with the flush while the host asks for what is timed, so the host's time is not in it.
    """
    intervals, late, seconds = [], 0, 0.0
    for _ in range(launches):
        gpu.flush()
        start = gpu.record()
        begin = perf_counter()
        call()
        seconds += perf_counter() - begin
        stop = gpu.record()
        late += gpu.passed(start)
        intervals.append((start, stop))
    gpu.synchronize()
    total = sum(gpu.milliseconds(*interval) for interval in intervals)
    return Sample(total / launches, seconds / launches * 1e6, late / launches)


def launches_for(gpu: Gpu, call: Call) -> int:
    """How many launches take about a millisecond, by a sample after one to warm up; from 1 to 50."""
    sample(gpu, call, 1)
    return max(1, min(MOST_LAUNCHES, round(SAMPLE_MS / max(sample(gpu, call, 2).milliseconds, 1e-6))))


def interleaved(gpu: Gpu, contestants: Mapping[str, Call], repeats: int) -> dict[str, list[Sample]]:
    """Samples of calls that take turns, `repeats` times: drift of the device hits all alike."""
    launches = {name: launches_for(gpu, call) for name, call in contestants.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, call in contestants.items():
            samples[name].append(sample(gpu, call, launches[name]))
    return samples
