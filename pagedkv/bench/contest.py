"""Contests: make contestants, check their results, time those that are right in turns, and check again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Call = Callable[[], Any]
PAUSE = 0.01  # s between turns: threads of OpenMP and of others spin for some time after their last work
MOST_SPREAD = 0.15  # of a contestant whose times are not called noisy
REASON_LENGTH = 160
NOT_INSTALLED = " is not installed"


class Refused(Exception):
    """Raised by a contestant that does not support the problem; the message says why."""


def reason(error: Exception) -> str:
    """Explain why a contestant has no time: the first line of its error, with its type unless that adds nothing."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name}{NOT_INSTALLED}"
    first = (str(error).strip().splitlines() or [""])[0]
    is_plain = type(error).__name__ in ("Refused", "BackendUnavailableError")
    text = first if is_plain else f"{type(error).__name__}: {first}"
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."


class Sample(NamedTuple):
    """The time of a call, or the mean time of a few calls.

    Attributes
    ----------
    seconds : float
    host_seconds, thread_seconds : tuple of float
        What each call took on the host, and for how much of that its thread ran; none where the host computes.
    late : float
        Share of calls for which a GPU was ready before the host: their times include the wait.
    """

    seconds: float
    host_seconds: tuple[float, ...] = ()
    thread_seconds: tuple[float, ...] = ()
    late: float = 0.0


Timer = Callable[[Call], Callable[[], Sample]]


def on_host(call: Call, pause: float = PAUSE, clock: Callable[[], float] = time.perf_counter) -> Callable[[], Sample]:
    """Warm a call up, and return a function that takes a sample of it after a pause."""
    call()

    def take() -> Sample:
        time.sleep(pause)
        begin = clock()
        call()
        return Sample(clock() - begin)

    return take


def interleaved(calls: Mapping[str, Call], repeats: int, timer: Timer = on_host) -> dict[str, list[Sample]]:
    """Take `repeats` samples of each call in turns, so that drift affects all calls alike."""
    timed = {name: timer(call) for name, call in calls.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, take in timed.items():
            samples[name].append(take())
    return samples


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> float:
    """The interquartile range over the median."""
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4)
    return (quartiles[2] - quartiles[0]) / statistics.median(values)


@dataclass
class Contest:
    """The result of a contest.

    Attributes
    ----------
    samples : dict
        Of every contestant that was right, in the run that counts.
    errors : dict
        The largest error of every contestant that returned a result.
    notes : dict
        Why contestants have no samples.
    runs : int
        How often all were timed; the run with the least spread counts.
    """

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    runs: int = 0

    def times(self, name: str) -> list[float] | None:
        """The seconds of each sample; None for a contestant without any."""
        return [each.seconds for each in self.samples[name]] if name in self.samples else None

    def seconds(self, name: str) -> float | None:
        """The median time."""
        times = self.times(name)
        return median(times) if times else None

    def spread(self, name: str) -> float | None:
        times = self.times(name)
        return spread(times) if times else None

    def over(self, name: str, other: str) -> float | None:
        """How many times as long `name` takes as `other`."""
        one, two = self.seconds(name), self.seconds(other)
        return one / two if one and two else None


def contest(
    contestants: Mapping[str, Callable[[], Call]],
    others: Mapping[str, Call],
    error_of: Callable[[Any], float],
    tolerance: float,
    repeats: int,
    *,
    timer: Timer = on_host,
    most_runs: int = 1,
    progress: Callable[[str], Any] = lambda name: None,
) -> Contest:
    """Time the contestants whose results are right, in turns with `others`.

    Parameters
    ----------
    contestants : mapping
        By name, functions that make a call, which returns its output, or raise.
    others : mapping
        Calls without an output to compare.
    error_of : callable
        The error of an output.
    tolerance : float
        The largest error allowed, before timing and after it.
    repeats : int
        Samples of each.
    timer : callable
        Warms a call up, and returns what takes a sample of it.
    most_runs : int
        How often to time them all while the spread of any exceeds MOST_SPREAD.
    progress : callable
        Called with who is at work.
    """
    result = Contest()
    calls: dict[str, Call] = {}

    def is_right(name: str, call: Call) -> bool:
        error = error_of(call())
        result.errors[name] = max(error, result.errors.get(name, 0.0))
        if not error <= tolerance:
            result.notes[name] = f"wrong: error {error:.2g}, allowed {tolerance:g}"
        return error <= tolerance

    for name, make in contestants.items():
        progress(name)
        try:
            call = make()
            if is_right(name, call):
                calls[name] = call
        except Exception as error:  # a failure of one contestant must not stop the others
            result.notes[name] = reason(error)
    progress("timing")
    try:
        best = float("inf")
        while result.runs < most_runs and best > MOST_SPREAD:
            samples = interleaved({**others, **calls}, repeats, timer)
            result.runs += 1
            largest = max((spread([each.seconds for each in of]) for of in samples.values()), default=0.0)
            if largest < best:
                best, result.samples = largest, samples
        for name in [name for name, call in calls.items() if not is_right(name, call)]:
            del result.samples[name]
    except Exception as error:  # a failed device stays failed: keep the first error
        result.samples = {}
        result.notes |= dict.fromkeys(calls, reason(error))
    return result
