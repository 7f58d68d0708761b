"""Swapping: whether the K and V of a preempted request wait in a store, or are computed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ..cache import PagedKVCache
from .request import Request

_KEPT = 9  # measures whose median counts: one that took long, as while a kernel compiles, then says little
_TRY_AGAIN = 16
_TOO_LONG = 1e9  # seconds for a token that does not come back


class Swap(Protocol):
    """What the scheduler asks of a `pagedkv.stores.SwapSpace`, which has the comments."""

    cache: PagedKVCache

    def copy_out(self, seq: int) -> Any: ...
    def copy_in(self, seq: int, copy: Any) -> int: ...


class Swapping:
    """Takes the cheaper way for each preempted request, by the seconds that steps and swaps take.

    A step with chunks takes longer than one in which all decode. That, for each token that it has more, is what a
    token costs that is computed again. A swap costs what copying takes, for each token that comes back. Tokens that
    the prefix cache finds when a request starts again cost nothing either way.

    The first preemption is a swap, since nothing is known of swaps then. So is one after 16 that were none, for the
    store may be another by now.

    Parameters
    ----------
    swap : Swap
    clock : callable
        Returns seconds.

    Attributes
    ----------
    num_swapped : int
        How often a request was copied to the store.
    """

    def __init__(self, swap: Swap, clock: Callable[[], float]) -> None:
        self._swap, self._clock = swap, clock
        self._began, self._num_refused, self.num_swapped = 0.0, 0, 0
        # Seconds of a step in which all decode; seconds per token of computing, copying out and copying in.
        self._decoding, self._computing, self._out, self._in = (deque[float](maxlen=_KEPT) for _ in range(4))
        self._missing = deque[float](maxlen=_KEPT)  # the share of a text that the prefix cache does not find

    def begin_step(self) -> None:
        """Note when a step begins."""
        self._began = self._clock()

    def end_step(self, num_seqs: int, num_tokens: int) -> None:
        """Measure a step that is computed."""
        seconds = self._clock() - self._began
        if num_tokens == num_seqs:
            self._decoding.append(seconds)
        elif num_tokens >= 2 * num_seqs:  # with fewer, the difference says more of other things
            more = max(0.0, seconds - _typical(self._decoding))
            self._computing.append(more / (num_tokens - num_seqs))

    def take_out(self, seq: int, num_tokens: int) -> Any:
        """Copy a sequence to the store, if that is the cheaper way; returns the copy, or None."""
        if not num_tokens or not self._is_cheaper():
            return None
        began = self._clock()
        copy = self._swap.copy_out(seq)
        self._out.append(_TOO_LONG if copy is None else (self._clock() - began) / num_tokens)
        self.num_swapped += copy is not None
        return copy

    def put_back(self, request: Request, seq: int, num_cached: int) -> int:
        """Append to the sequence of a request that starts again what its copy has; returns its length."""
        self._missing.append(1.0 - num_cached / len(request.tokens))
        copy, request.copy = request.copy, None
        if copy is None or copy.num_tokens <= num_cached or _typical(self._in) > _typical(self._computing, _TOO_LONG):
            return num_cached
        began = self._clock()
        length = self._swap.copy_in(seq, copy)
        num_back = length - num_cached
        self._in.append((self._clock() - began) / num_back if num_back else _TOO_LONG)
        return length

    def _is_cheaper(self) -> bool:
        """Whether a swap costs less than computing, or has to be tried."""
        missing = _typical(self._missing, 1.0)
        swapping = _typical(self._out) + missing * _typical(self._in)
        if not self._out or swapping < missing * _typical(self._computing, _TOO_LONG):
            self._num_refused = 0
            return True
        self._num_refused += 1
        if self._num_refused == _TRY_AGAIN:
            self._num_refused = 0
            self._out.clear()
            self._in.clear()
        return False


def _typical(measures: deque[float], unknown: float = 0.0) -> float:
    """The median, or what counts while nothing is measured."""
    return sorted(measures)[len(measures) // 2] if measures else unknown
