"""Times calls on a GPU, one launch at a time, with a cold cache."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple

from .frameworks import Call, Gpu

SAMPLE_MS = 1.0
MOST_LAUNCHES = 50


class Sample(NamedTuple):
    """Means over a few launches.

    Attributes
    ----------
    milliseconds : float
        Of a launch on the GPU.
    host_us : float
        Microseconds that the host took to enqueue one.
    late : float
        Share of launches for which the GPU was ready before the host: their times include the wait.
    """

    milliseconds: float
    host_us: float
    late: float


def sample(gpu: Gpu, call: Call, launches: int) -> Sample:
    """Time launches one by one, each between two events and after an untimed flush.

    The flush keeps the GPU busy while the host enqueues the launch, so that no host time is measured.
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
    """How many launches take about a millisecond, from 1 to 50, by a sample after a warm-up."""
    sample(gpu, call, 1)
    return max(1, min(MOST_LAUNCHES, round(SAMPLE_MS / max(sample(gpu, call, 2).milliseconds, 1e-6))))


def interleaved(gpu: Gpu, contestants: Mapping[str, Call], repeats: int) -> dict[str, list[Sample]]:
    """`repeats` samples of each call, in turns so that drift of the device hits all alike."""
    launches = {name: launches_for(gpu, call) for name, call in contestants.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, call in contestants.items():
            samples[name].append(sample(gpu, call, launches[name]))
    return samples
