"""Makes the contestants of a cell, compares what comes out, and times in turns those that are right."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..reasons import reason
from ..report import median, spread

Call = Callable[[], Any]
MOST_SPREAD, MOST_RUNS = 0.15, 3
PAUSE = 0.01  # s between turns: threads of OpenMP and of others spin for some time after their last work


@dataclass
class Contest:
    """The result.

    Attributes
    ----------
    seconds : dict
        Of each call of every contestant that was right, in the run that counts.
    errors : dict
        Of every contestant that returned a result.
    notes : dict
        Why contestants have no time.
    runs : int
        How often the cell was measured; the run with the least spread counts.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    runs: int = 0

    @property
    def spread(self) -> float:
        """The largest spread of any contestant."""
        return max(map(spread, self.seconds.values()), default=0.0)

    def median(self, name: str) -> float | None:
        """Seconds of a call; None for a contestant without a time."""
        return median(self.seconds[name]) if name in self.seconds else None


def interleaved(calls: Mapping[str, Call], repeats: int, pause: float = PAUSE) -> dict[str, list[float]]:
    """Seconds of each call, in turns so that drift hits all alike, after one warm-up."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            time.sleep(pause)
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def contest(
    contestants: Mapping[str, Callable[[], Call]],
    others: Mapping[str, Call],
    error_of: Callable[[Any], float],
    tolerance: float,
    repeats: int,
) -> Contest:
    """Time the contestants that are right, in turns with `others`, and again while the spread is too large.

    Parameters
    ----------
    contestants : mapping
        By name, functions that make a call, which returns its output, or raise.
    others : mapping
        Calls without an output to compare.
    error_of : callable
        The error of an output.
    tolerance : float
        The largest error allowed.
    repeats : int
        Timed calls of each.
    """
    result = Contest()
    calls: dict[str, Call] = {}
    for name, make in contestants.items():
        try:
            call = make()
            result.errors[name] = error = error_of(call())
        except Exception as caught:  # one contestant's failure must not stop the others
            result.notes[name] = reason(caught)
            continue
        if error <= tolerance:
            calls[name] = call
        else:
            result.notes[name] = f"wrong: error {error:.2g}, allowed {tolerance:g}"
    best = None
    while result.runs < MOST_RUNS and (best is None or best > MOST_SPREAD):
        seconds = interleaved({**others, **calls}, repeats)
        result.runs += 1
        largest = max(map(spread, seconds.values()), default=0.0)
        if best is None or largest < best:
            best, result.seconds = largest, seconds
    return result
