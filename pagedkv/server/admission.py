"""Admission: limits the number of requests, and tells refused clients when to try again."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LONGEST = 60  # seconds: OpenAI's clients ignore a longer time
REMEMBERED = 128  # requests that have ended, from which the rate is computed


class Busy(Exception):
    """Raised when the server takes no more requests at the moment.

    Attributes
    ----------
    retry_after : int
        Seconds after which to try again.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(eq=False)
class Place:
    """A request that runs or waits: how many tokens it may generate, and has generated."""

    max_tokens: int
    num_tokens: int = 0


class Admission:
    """Counts the requests that run and wait, and their tokens.

    Each refused client gets its own time to try again, when as many requests have ended as were refused before it: if
    all tried at the same time, most would be refused again.

    Parameters
    ----------
    max_requests, max_batch : int
        The most requests in all, and the most that run.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(self, max_requests: int, max_batch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests, self._max_batch, self._clock = max_requests, max_batch, clock
        self._places: set[Place] = set()
        self._last_turn = 0.0  # the latest time that a refused client has got
        self._restart()

    def __len__(self) -> int:
        return len(self._places)

    @contextlib.contextmanager
    def places(self, count: int, max_tokens: int) -> Iterator[list[Place]]:
        """Count so many requests, all or none, for as long as the context is open.

        Raises
        ------
        ValueError
            There is never room for so many.
        Busy
            There are too many requests.
        """
        if count > self._max_requests:
            raise ValueError(f"a request may ask for {self._max_requests} texts on this server, got {count}")
        if len(self) + count > self._max_requests:
            raise Busy("too many requests wait: try again later", self.retry_after())
        if not self:  # idle time must not count as time for a request
            self._restart()
        places = [Place(max_tokens) for _ in range(count)]
        self._places.update(places)
        try:
            yield places
        finally:
            self._places.difference_update(places)
            self._num_ended += sum(place.num_tokens for place in places)
            self._lengths.extend(place.num_tokens for place in places)
            self._marks.append((self._clock(), self._num_tokens()))

    def retry_after(self) -> int:
        """The seconds, from 1 to LONGEST, after which one more refused client should try again."""
        now, (since, before) = self._clock(), self._marks[0]
        # If no request has got a token yet, count a token for each running one.
        seconds_of_token = (now - since) / max(self._max_batch, self._num_tokens() - before)
        lengths = self._lengths or [place.max_tokens for place in self._places]
        seconds_each = seconds_of_token * sum(lengths) / max(1, len(lengths))
        self._last_turn = min(max(now, self._last_turn) + seconds_each, now + LONGEST)
        return max(1, math.ceil(self._last_turn - now))

    def _num_tokens(self) -> int:
        return self._num_ended + sum(place.num_tokens for place in self._places)

    def _restart(self) -> None:
        self._num_ended = 0
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._marks = deque([(self._clock(), 0)], REMEMBERED)
