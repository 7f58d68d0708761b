"""Running: the requests that have a sequence in the cache, stored in arrays."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .request import NOT_RUNNING, Request

Int64Array = npt.NDArray[np.int64]
NO_REQUEST = -1
_NO_STOP = np.iinfo(np.int64).max


class Running:
    """The running requests, each of which has a lane: an index into all arrays.

    Parameters
    ----------
    max_num_seqs : int
        How many lanes there are.
    has_stops : bool
        Whether chunks of prompts have to end at stops, so that snapshots of states stay there.

    Attributes
    ----------
    lanes : (num_running,) int64
        The lanes in use, ordered by the keys and numbers of their requests.
    numbers, seqs : (max_num_seqs,) int64
        The request of each lane, or NO_REQUEST, and the handle of its sequence.
    lens, num_computed, max_lens : (max_num_seqs,) int64
        The length of each request, how many of its tokens are in the cache, and its largest length in this turn.
    roots : (max_num_seqs,) int64
        The first half of the root digest of its salt.
    tokens : (max_num_seqs, width) int32
        The tokens of each request.
    stops : list of (sequence of int)
        The stops of each lane, ascending.
    next_stops : (max_num_seqs,) int64, or None
        The first of them that is not computed yet; None without stops.
    """

    def __init__(self, max_num_seqs: int, has_stops: bool = False) -> None:
        self.numbers = np.full(max_num_seqs, NO_REQUEST)
        self.seqs, self.lens, self.num_computed, self.max_lens, self.roots, self._keys = np.zeros(
            (6, max_num_seqs), np.int64
        )
        self.tokens = np.zeros((max_num_seqs, 0), np.int32)
        self.stops: list[Sequence[int]] = [()] * max_num_seqs
        self.next_stops = np.full(max_num_seqs, _NO_STOP) if has_stops else None
        self.clear()

    def clear(self) -> None:
        """Free all lanes, in whatever state an interrupted call has left them."""
        self.lanes = np.empty(0, np.int64)
        self.numbers[:] = NO_REQUEST
        self.requests: list[Request | None] = [None] * len(self.numbers)
        self._free = list(range(len(self.numbers)))[::-1]

    def __len__(self) -> int:
        return len(self.lanes)

    @property
    def num_uncomputed(self) -> Int64Array:
        """How many tokens of each request are not computed yet, (num_running,) int64, at least 1."""
        return self.lens[self.lanes] - self.num_computed[self.lanes]

    @property
    def num_ready(self) -> Int64Array:
        """How many of them one chunk of each request may have, (num_running,) int64, at least 1."""
        if self.next_stops is None:
            return self.num_uncomputed
        return np.minimum(self.lens[self.lanes], self.next_stops[self.lanes]) - self.num_computed[self.lanes]

    def start(self, request: Request, seq: int, num_computed: int, stops: Sequence[int] = ()) -> None:
        """Give a request a lane; `seq` already has num_computed of its tokens, and `tokens` is wide enough."""
        num_tokens = len(request.tokens)
        lane = self._free.pop()
        self.numbers[lane], self.seqs[lane], self._keys[lane] = request.number, seq, request.key
        self.lens[lane] = num_tokens
        self.max_lens[lane], self.roots[lane] = request.max_len, first_half(request.root)
        self.tokens[lane, :num_tokens] = request.tokens
        self.stops[lane] = stops
        self.move(np.array([lane]), np.array([num_computed]))
        self.requests[lane], request.lane = request, lane
        last = self.lanes[-1:]
        self.lanes = np.append(self.lanes, lane)
        if len(last) and (self._keys[last[0]], self.numbers[last[0]]) > (request.key, request.number):
            self.lanes = self.lanes[np.lexsort((self.numbers[self.lanes], self._keys[self.lanes]))]

    def stop(self, request: Request) -> None:
        """Free the lane of a request, which keeps the tokens it has so far."""
        lane = request.lane
        request.tokens = self.tokens_of(request)
        self.lanes = self.lanes[self.lanes != lane]
        self.numbers[lane], self.requests[lane], request.lane = NO_REQUEST, None, NOT_RUNNING
        self._free.append(lane)

    def tokens_of(self, request: Request) -> npt.NDArray[np.int32]:
        """Copy the tokens of a request."""
        return self.tokens[request.lane, : self.lens[request.lane]].copy()

    def extend(self, lanes: Int64Array, tokens: npt.NDArray[np.int32]) -> None:
        """Append a token to each of some lanes, which are wide enough."""
        lens = self.lens[lanes]
        self.tokens[lanes, lens] = tokens
        self.lens[lanes] = lens + 1

    def move(self, lanes: Int64Array, num_computed: Int64Array) -> None:
        """Note how many tokens of some lanes are computed."""
        self.num_computed[lanes] = num_computed
        if self.next_stops is not None:
            for lane, n in zip(lanes.tolist(), num_computed.tolist(), strict=True):
                stops = self.stops[lane]
                self.next_stops[lane] = _NO_STOP if not stops or n >= stops[-1] else stops[bisect(stops, n)]

    def widen(self, width: int) -> None:
        """Make room for `width` tokens of each request."""
        before = self.tokens.shape[1]
        if width > before:
            tokens = np.zeros((len(self.tokens), max(width, 2 * before)), np.int32)
            tokens[:, :before] = self.tokens
            self.tokens = tokens


def first_half(root: bytes) -> int:
    """The first 64 bits of a root digest."""
    return int.from_bytes(root[:8], "little", signed=True)
