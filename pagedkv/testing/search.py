"""A search for the smallest example that a check refuses, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy


class Failure(NamedTuple):
    """An example that a check refused, and the error that it raised."""

    example: Any
    error: Exception


class Found(NamedTuple):
    """How many examples were tried before the first failure, and the smallest failure."""

    num_examples: int
    failure: Failure | None


class _TimeIsUp(BaseException):
    """Ends a search at once; after an Exception Hypothesis would go on with the other examples."""


def search(
    strategy: SearchStrategy,
    check: Callable[[Any], Any],
    *,
    max_examples: int,
    seed: int | None = 0,
    stop_at: float = float("inf"),
    share: float = 1,
    shrink_s: float = 20,
) -> Found:
    """Draw examples until one fails, then look for smaller ones.

    Parameters
    ----------
    strategy : SearchStrategy
        A strategy for hashable examples.
    check : callable
        Raises for an example that it refuses.
    max_examples : int
    seed : int or None
        Draw the same examples for the same seed; None for others each time.
    stop_at : float
        The time by `time.monotonic` after which nothing is tried.
    share : float
        The share of the time until then that may be spent, not counting the slowest example, which may have compiled.
    shrink_s : float
        Seconds to look for smaller examples.
    """
    refused: dict[Any, Exception] = {}
    smallest: Any = None
    count, slowest = 0, 0.0
    begun = time.monotonic()
    end = stop_at  # of the search for a failure; later of the search for a smaller one

    def tried(example: Any) -> None:
        nonlocal count, slowest, smallest, end
        if example in refused:  # fail again, so that Hypothesis can replay it when time is up
            smallest = example
            raise refused[example]
        now = time.monotonic()
        if refused and now >= end:
            return
        if not refused and (now >= end or now - begun - slowest >= share * (end - begun)):
            raise _TimeIsUp
        count += not refused
        try:
            check(example)
        except Exception as error:
            if not refused:
                end = time.monotonic() + shrink_s
            refused[example], smallest = error, example
            raise
        slowest = max(slowest, time.monotonic() - now)

    test = settings(
        max_examples=max_examples,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )(hypothesis.given(strategy)(tried))
    if seed is not None:
        test = hypothesis.seed(seed)(test)
    try:
        test()
    except _TimeIsUp:
        pass
    except Exception:
        if not refused:
            raise
        return Found(count, Failure(smallest, refused[smallest]))
    return Found(count, None)
