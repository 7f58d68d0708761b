"""Looks for an example that a check refuses, and for the smallest one, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy


class Failure(NamedTuple):
    """An example that a check refused, and what it raised."""

    example: Any
    error: Exception


class Found(NamedTuple):
    """How many examples were tried before anything was refused, and the smallest that was."""

    num_examples: int
    failure: Failure | None


class _TimeIsUp(BaseException):
    """Ends a search at once: Hypothesis takes no Exception for an end, and would draw all the other examples."""


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
    """Draw examples until one fails, and then smaller ones.

    Parameters
    ----------
    strategy : SearchStrategy
        Of hashable examples.
    check : callable
        Raises for an example that is refused.
    max_examples : int
    seed : int or None
        The same examples for the same seed; None: others each time.
    stop_at : float
        Time of `time.monotonic` from which on nothing is tried.
    share : float
        Of the time until then that may be spent, the slowest example not counted: it may have waited for a compiler.
    shrink_s : float
        Seconds to look for a smaller example.
    """
    refused: dict[Any, Exception] = {}
    smallest: Any = None
    count, slowest = 0, 0.0
    begun = time.monotonic()
    end = stop_at  # of the search, and then of the one for a smaller example

    def tried(example: Any) -> None:
        nonlocal count, slowest, smallest, end
        if example in refused:  # what has failed fails, so that the last one is replayed when time is up
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
