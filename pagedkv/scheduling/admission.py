"""Admission: starts and preempts requests, depending on the room in a step and in the cache."""

from __future__ import annotations

import numpy as np

from ..cache import PagedKVCache
from ..errors import CapacityError
from ..memory.handles import NO_HANDLE
from .request import Request
from .running import Running, first_half
from .step import Int64Array
from .swapping import Swapping
from .waiting import Waiting


class Admission:
    """Starts the first waiting requests while there is room, and preempts the last running ones when there is none.

    Parameters
    ----------
    cache : PagedKVCache
    running, waiting : Running, Waiting
    budget, max_num_seqs : int
        The most tokens and requests of a step.
    watermark : int
        Blocks that a start leaves free while others run.
    swapping : Swapping or None
        Where K and V of preempted requests may wait.
    snapshot_every : int or None
        Tokens between snapshots of the state of a prompt.

    Attributes
    ----------
    max_request_len : int
        The most tokens that a request can have; the last one that it generates, which is not computed, does not count.
    num_preempted : int
        How often a request was preempted.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        running: Running,
        waiting: Waiting,
        budget: int,
        max_num_seqs: int,
        watermark: int,
        swapping: Swapping | None,
        snapshot_every: int | None,
    ) -> None:
        self._cache, self._running, self._waiting, self._swapping = cache, running, waiting, swapping
        self.budget, self._max_num_seqs, self._watermark = budget, max_num_seqs, watermark
        self._longest = cache.layer_groups.longest(cache.pool.num_blocks, budget, cache.keep)
        self.max_request_len = min(cache.max_seq_len, self._longest)
        self._last, self._snapshot_every = [NO_HANDLE], snapshot_every
        self.num_preempted = 0

    @property
    def last_started(self) -> int:
        """The handle of the sequence started last."""
        return self._last[0]

    def require_fit(self, num_tokens: int, max_tokens: int) -> None:
        """Raise ValueError unless the cache has room for so many tokens and the text that they get."""
        if num_tokens + max_tokens - 1 > self.max_request_len:
            remedy = "make the cache larger"
            if self._longest >= self._cache.max_seq_len + self._cache.block_size:
                remedy = "raise the cache's max_seq_len, as far as the model goes"
            elif self._cache.layer_groups.has_windows and self._longest < self._cache.max_seq_len:
                remedy += f", or max_num_batched_tokens = {self.budget} smaller"
            raise ValueError(
                f"a request can have {self.max_request_len} tokens in this cache, got {num_tokens} and "
                f"max_tokens={max_tokens}: lower max_tokens, shorten the prompt, or {remedy}"
            )

    def counts(self) -> Int64Array:
        """How many tokens of each running request go into a step: one of each, then more in their order."""
        more = self._running.num_ready - 1
        before = np.cumsum(more) - more
        return 1 + np.minimum(np.maximum(self.budget - len(more) - before, 0), more)

    def make_room(self) -> bool:
        """Preempt the last requests until the others can go on; return whether any was preempted."""
        running, preempted = self._running, False
        while len(running):
            lens = running.num_computed[running.lanes]
            if self._num_blocks(lens + self.counts()) - self._num_blocks(lens) <= self._cache.num_free:
                break
            self._preempt(running.requests[running.lanes[-1]])
            preempted = True
        return preempted

    def start_some(self) -> None:
        """Start requests while there is room in the step and in the cache."""
        running, waiting, budget = self._running, self._waiting, self.budget
        growth, keep, lanes = self._cache.layer_groups.growth, self._cache.keep, running.lanes
        num_ready = int(running.num_ready.sum())
        # Blocks that running requests still need for the tokens they have.
        reserved = growth(running.num_computed[lanes], running.lens[lanes], budget, keep)
        while len(running) < self._max_num_seqs and num_ready < budget:
            request = waiting.first()
            if request is None or self._is_being_computed(request):
                return
            running.widen(len(request.tokens))  # which may raise, and then no sequence has started
            reserve = reserved + (self._watermark if len(running) else 0)
            num_matched = 0 if running.next_stops is None else self._cache.find_blocks(request.tokens, request.salt)
            try:
                preempted = request.num_cached is not None
                seq, num_cached = self._cache.add_found(
                    request.tokens,
                    request.salt,
                    reserve=reserve,
                    chunk=budget,
                    preempted=preempted,
                    last=self._last,
                    find=request.finds,
                )
            except CapacityError as error:
                if len(running):
                    return
                error.args = (
                    f"request {request.number} cannot start, and none runs that could end: {error}; free or unpin "
                    f"other sequences of the cache, or abort the request",
                )
                raise
            stops: list[int] = []
            if running.next_stops is not None:
                stops = request.stops(num_cached, num_matched, self._cache.block_size, self._snapshot_every)
            running.start(request, seq, num_cached, stops)
            waiting.remove(request)
            if request.num_cached is None:  # after a preemption it would find its own tokens
                request.num_cached = num_cached
            elif self._swapping is not None:
                try:
                    self._swapping.put_back(request, seq, num_cached)
                finally:  # the clock may raise behind the copy
                    num_cached = int(self._cache.seq_lens(seq)[0])
                    running.move(np.array([request.lane]), np.array([num_cached]))
            num_tokens = len(request.tokens)
            num_ready = int(running.num_ready.sum())
            reserved += growth(num_cached, num_tokens, budget, keep)

    def stop(self, request: Request) -> None:
        """End the sequence of a running request."""
        self._cache.free(int(self._running.seqs[request.lane]))
        self._running.stop(request)

    def _preempt(self, request: Request | None) -> None:
        """Free the blocks of a running request, which waits, and may have a copy of them."""
        assert request is not None
        if self._swapping is not None:
            lane = request.lane
            request.copy = self._swapping.take_out(int(self._running.seqs[lane]), int(self._running.num_computed[lane]))
        self.stop(request)
        self._waiting.push(request)
        self.num_preempted += 1

    def _is_being_computed(self, request: Request) -> bool:
        """Whether a running request is computing what this one will find if it waits.

        Those are blocks; with states a snapshot, too, or blocks that show where both requests part, so that this one
        stops there and leaves a snapshot for those behind it.
        """
        running, size = self._running, self._cache.block_size
        num_tokens = len(request.tokens) - 1  # the last one is computed in any case
        if not self._cache.prefix_cache or not request.finds or num_tokens < size:
            return False
        lanes = running.lanes[running.num_uncomputed > 1]
        lanes = lanes[(running.roots[lanes] == first_half(request.root)) & (running.lens[lanes] >= size)]
        if not len(lanes):
            return False
        # Most requests begin differently, which the first block shows.
        lanes = lanes[(running.tokens[lanes, :size] == request.tokens[:size]).all(axis=1)]
        most = min(num_tokens, running.tokens.shape[1])
        differs = running.tokens[lanes, :most] != request.tokens[:most]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), most)
        shared = np.minimum(common, running.lens[lanes]) // size * size
        behind = running.num_computed[lanes] < shared
        if running.next_stops is None or not behind.any():
            return bool(behind.any())
        num_found = self._cache.find(request.tokens, request.salt)
        if (shared > self._cache.find_blocks(request.tokens, request.salt))[behind].any():
            return True
        lanes, shared = lanes[behind], shared[behind]
        return any(
            max(num_found, running.num_computed[lane]) < stop <= n
            for lane, n in zip(lanes.tolist(), shared.tolist(), strict=True)
            for stop in running.stops[lane]
        )

    def _num_blocks(self, lens: Int64Array) -> int:
        """How many columns the block tables of sequences of these lengths have in all groups of layers."""
        return len(self._cache.groups) * int(np.sum(-(-lens // self._cache.block_size)))
