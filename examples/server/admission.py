"""Admission: how many requests there are at a time, and when one that finds no room should come again."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LONGEST = 60  # seconds: OpenAI's clients take no notice of a longer time
REMEMBERED = 128  # requests that have ended: the rate is that of so many


class Busy(Exception):
    """No request is taken now.

    Attributes
    ----------
    retry_after : int
        Seconds.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(eq=False)
class Place:
    """What is known of a request that runs or waits: how many tokens it may have, and has."""

    max_tokens: int
    num_tokens: int = 0


class Admission:
    """Counts the requests that run and wait, and their tokens.

    Each one that finds no room gets a time of its own to come again, when as many have ended as were sent away before
    it: all at the same time would find no room again but for a few.

    Parameters
    ----------
    max_requests, max_batch : int
        Those that run and wait together, and those that run, at most.
    clock : callable
        Seconds.
    """

    def __init__(self, max_requests: int, max_batch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests, self._max_batch, self._clock = max_requests, max_batch, clock
        self._places: set[Place] = set()
        self._last_turn = 0.0  # the latest time that somebody was told
        self._restart()

    def __len__(self) -> int:
        return len(self._places)

    @contextlib.contextmanager
    def place(self, max_tokens: int) -> Iterator[Place]:
        """A request is here as long as this is open.

        Raises
        ------
        Busy
            There are too many.
        """
        if len(self) >= self._max_requests:
            raise Busy("too many requests wait: try again later", self.retry_after())
        if not self._places:  # the time without any says nothing of how long one takes
            self._restart()
        place = Place(max_tokens)
        self._places.add(place)
        try:
            yield place
        finally:
            self._places.remove(place)
            self._num_ended += place.num_tokens
            self._lengths.append(place.num_tokens)
            self._marks.append((self._clock(), self._num_tokens()))

    def retry_after(self) -> int:
        """Seconds until it is the turn of one more that was sent away, from 1 to LONGEST."""
        now, (since, before) = self._clock(), self._marks[0]
        # A step without an end in sight gives all that run a token.
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
