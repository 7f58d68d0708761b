"""Scheduler: plans which tokens of which requests a server computes next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cache import PagedKVCache
from ..memory.arguments import as_int, as_ints, require_callable
from ..memory.ids import owned_spans
from ..memory.prefix.digests import root_digest
from ..memory.prefix.prompt import ids_of
from .admission import Admission
from .request import NOT_RUNNING, Request
from .running import Running
from .step import Finished, Int64Array, Step
from .swapping import Swap, Swapping
from .waiting import Waiting

MAX_PRIORITY = MAX_AGING = 2**31 - 1  # the order is kept in int64


class Scheduler:
    """Plans the steps of continuous batching over a PagedKVCache, and never touches a model.

    A server adds requests, asks for a step, lets its model compute the step, and returns the tokens that it chose.
    Every running request is in every step: with one token while it generates, with a chunk of its prompt before that.
    A request starts as soon as there is room for all its tokens, or, where layers have windows, for all the blocks that
    it holds at a time; tokens that the prefix cache finds are not computed. When the pool is full, the last request in
    the order is preempted: it frees its blocks, and is computed again later or, with `swap`, comes back from a store.

    Requests are served in the order in which they come, with priorities that age: one of priority p starts behind
    those of priority 0 that are added in the ``p * aging`` steps after it, and before all later ones. The first
    running request is never preempted, and no request overtakes the first waiting one, so each request ends if those
    before it do.

    Without `swap` the same calls give the same steps. One thread at a time may call the scheduler. Only the scheduler
    may append to, truncate or free its sequences; the cache may hold others as well. A call that raises an error loses
    no request and can be repeated; `restart` recovers from an interrupt (Ctrl-C) in the middle of a call.

    Parameters
    ----------
    cache : PagedKVCache
    max_num_batched_tokens : int
        The most tokens of a step.
    max_num_seqs : int or None
        The most requests that run at a time, at most max_num_batched_tokens; None for max_seqs of the cache.
    watermark : float
        The share of the pool, from 0 to 1, that starting a request leaves free, so that running requests can grow.
    aging : int
        How many steps one level of priority is worth.
    eos_token_id : int or None
        The token that ends a text.
    snapshot_every : int or None
        Of a cache with states: how many tokens of a prompt lie between two snapshots, rounded down to whole blocks, for
        prompts that part from it anywhere. None for snapshots at its last full block, where another prompt has parted
        from it, and at `snapshot_at` alone. Each takes as much memory as a state.
    swap : SwapSpace or None
        Where the K and V of a preempted request wait, if copying them out and in has taken less time than computing
        them. So what a step computes then depends on how long steps and copies took, and tokens do not. A request that
        waits takes no row of the cache, swapped or not.
    clock : callable
        Returns seconds. With one of your own, and a `swap`, the same calls give the same steps.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here.

    Examples
    --------
    A loop with a model that always chooses token 7:

    >>> from pagedkv import PagedKVCache, Scheduler
    >>> cache = PagedKVCache(num_layers=1, num_blocks=8, block_size=4, num_kv_heads=1, head_dim=8)
    >>> scheduler = Scheduler(cache, max_num_batched_tokens=8)
    >>> request = scheduler.add([1, 2, 3, 4, 5], max_tokens=2)
    >>> while step := scheduler.schedule():
    ...     tokens = [7] * len(step.sampled)  # here a model computes step.tokens, and writes K and V to step.slots
    ...     print(step.tokens, scheduler.update(step, tokens))
    [1 2 3 4 5] []
    [7] [Finished(request=0, tokens=array([7, 7], dtype=int32), reason='length')]

    A resumable request has several turns. `drop` gives up a step that has failed, and `abort` a request:

    >>> chat = scheduler.add([1, 2, 3, 4, 6], max_tokens=1, resumable=True)
    >>> finished = scheduler.update(scheduler.schedule(), [7])
    >>> scheduler.num_cached(chat)
    4
    >>> scheduler.extend(chat, [8, 9], max_tokens=5)
    >>> scheduler.tokens(chat)
    array([1, 2, 3, 4, 6, 7, 8, 9], dtype=int32)
    >>> step = scheduler.schedule()
    >>> scheduler.drop()
    >>> scheduler.abort(chat)
    True
    >>> scheduler.num_running, scheduler.num_waiting
    (0, 0)
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int | None = None,
        watermark: float = 0.01,
        aging: int = 256,
        eos_token_id: int | None = None,
        snapshot_every: int | None = None,
        swap: Swap | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(cache, PagedKVCache):
            raise TypeError(f"cache must be a PagedKVCache, got {type(cache).__name__}")
        if swap is not None and getattr(swap, "cache", None) is not cache:
            raise ValueError(
                f"swap must be a SwapSpace of the scheduler's cache, got {swap!r}: pass SwapSpace(cache, '4GiB'), say"
            )
        require_callable("clock", clock, "a function that returns seconds")
        if not 0 <= watermark <= 1:
            raise ValueError(f"watermark must be from 0 to 1, got {watermark}")
        budget = as_int("max_num_batched_tokens", max_num_batched_tokens, minimum=1)
        most = min(cache.max_seqs, budget)
        if max_num_seqs is not None and as_int("max_num_seqs", max_num_seqs, minimum=1) > most:
            of_states = ", which state_memory may limit" if cache.states else ""
            raise ValueError(
                f"max_num_seqs must be at most max_num_batched_tokens = {budget} and the cache's max_seqs = "
                f"{cache.max_seqs}{of_states}, got {max_num_seqs}"
            )
        max_num_seqs = most if max_num_seqs is None else int(max_num_seqs)
        self._aging = as_int("aging", aging, maximum=MAX_AGING)
        self._eos = None if eos_token_id is None else as_int("eos_token_id", eos_token_id)
        self._cache = cache
        self._requests: dict[int, Request] = {}
        every = None if snapshot_every is None else as_int("snapshot_every", snapshot_every, minimum=1)
        self._waiting = Waiting()
        self._running = Running(max_num_seqs, has_stops=bool(cache.states) and cache.prefix_cache)
        watermark_blocks = int(np.ceil(watermark * cache.pool.num_blocks))
        self._swapping = None if swap is None else Swapping(swap, clock)
        limits = budget, max_num_seqs, watermark_blocks
        self._admission = Admission(cache, self._running, self._waiting, *limits, self._swapping, every)
        self._step: Step | None = None
        self._leaving: list[int] = []  # sequences of the step whose requests were aborted
        self._num_added = self._num_steps = 0

    def __repr__(self) -> str:
        return f"Scheduler({self.num_running} requests run, {self.num_waiting} wait, of {self._cache!r})"

    @property
    def num_running(self) -> int:
        """How many requests run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for room, preempted ones included."""
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        """How often a request was preempted so far."""
        return self._admission.num_preempted

    @property
    def num_swapped(self) -> int:
        """How often a preempted request was swapped out so far."""
        return 0 if self._swapping is None else self._swapping.num_swapped

    @property
    def max_request_len(self) -> int:
        """The most tokens that a request can have, prompt and text; the last token of a text does not count."""
        return self._admission.max_request_len

    def tokens(self, request: int) -> npt.NDArray[np.int32]:
        """All tokens that a request has so far, (num_tokens,) int32, as a new array.

        Raises
        ------
        KeyError
            The request has ended, or was never added.
        """
        found = self._find(request)
        return found.tokens.copy() if found.lane == NOT_RUNNING else self._running.tokens_of(found)

    def num_cached(self, request: int) -> int:
        """How many tokens of a request the prefix cache had when its turn started; 0 before that.

        Its own tokens that it finds after a preemption do not count.

        Raises
        ------
        KeyError
            The request has ended, or was never added.
        """
        return self._find(request).num_cached or 0

    def add(
        self,
        tokens: Any,
        max_tokens: int,
        *,
        priority: int = 0,
        salt: str | bytes | None = None,
        resumable: bool = False,
        find: bool = True,
        snapshot_at: Any = (),
    ) -> int:
        """Add a request, which waits until there is room for it.

        Parameters
        ----------
        tokens : (num_tokens,) ints
            The prompt, at least one id.
        max_tokens : int
            The most tokens to generate, at least 1.
        priority : int
            Requests of lower priority numbers start earlier, as in vLLM.
        salt : str, bytes or None
            As in `PagedKVCache.add`.
        resumable : bool
            Whether the request stays when its turn ends, until `extend` or `abort`.
        find : bool
            False to compute all its tokens, of whose logits you want each, whatever the prefix cache has; other
            requests find them as ever.
        snapshot_at : sequence of int
            Lengths, at most num_tokens, from which later prompts may go on, such as where the messages of a chat end.
            A cache with states keeps a snapshot at each, rounded down to whole blocks; others need none.

        Returns
        -------
        int
            The number of the request.

        Raises
        ------
        ValueError
            There are no tokens, or more than the cache could ever hold: with windows that depends on
            max_num_batched_tokens, too, since blocks come back after each step.
        TypeError
            An argument is not as described here.
        """
        ids, max_tokens = ids_of(tokens), as_int("max_tokens", max_tokens, minimum=1)
        priority = as_int("priority", priority, minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)
        root = root_digest(salt)
        if not len(ids):
            raise ValueError("tokens must have at least one token, got none")
        self._admission.require_fit(len(ids), max_tokens)
        number, stops = self._num_added, _lengths(snapshot_at, len(ids))
        request = Request(
            number, ids, len(ids), len(ids) + max_tokens, priority, self._key(priority), salt, root, bool(resumable)
        )
        request.snapshot_at, request.finds = stops, bool(find)
        self._num_added += 1
        self._requests[number] = request
        self._waiting.push(request)
        return number

    def extend(self, request: int, tokens: Any, max_tokens: int, *, snapshot_at: Any = ()) -> None:
        """Start another turn of a resumable request, with a user's answer or the result of a tool for example.

        It waits like a new request; the prefix cache finds what was computed before, unless that was evicted.

        Parameters
        ----------
        request : int
        tokens : (num_tokens,) ints
            Tokens to append to those that it has; may be empty.
        max_tokens : int
            The most tokens to generate in this turn.
        snapshot_at : sequence of int
            As in `add`: lengths of the whole text.

        Raises
        ------
        ValueError
            Its turn has not ended, or it would have more tokens than the cache could ever hold.
        KeyError
            The request has ended, or was never added.
        """
        found, ids, max_tokens = self._find(request), ids_of(tokens), as_int("max_tokens", max_tokens, minimum=1)
        if found.lane != NOT_RUNNING or found.number in self._waiting:
            raise ValueError(f"request {request} is in the middle of a turn: extend it when update says it has ended")
        ids = np.concatenate([found.tokens, ids])
        self._admission.require_fit(len(ids), max_tokens)
        found.snapshot_at = _lengths(snapshot_at, len(ids))
        found.tokens, found.num_prompt, found.max_len = ids, len(ids), len(ids) + max_tokens
        found.key, found.num_cached = self._key(found.priority), None
        self._waiting.push(found)

    def abort(self, request: int) -> bool:
        """End a request in any state, and free its blocks.

        If it is in the current step, that step still writes its K and V, so its blocks are freed after the step.

        Returns
        -------
        bool
            False if the request had ended before; then nothing changes.

        Raises
        ------
        KeyError
            The request was never added.
        """
        number = as_int("request", request, minimum=None)
        if number not in self._requests and 0 <= number < self._num_added:
            return False
        found = self._find(number)
        if found.lane != NOT_RUNNING and self._step is not None:  # every running request is in it
            self._leaving.append(int(self._running.seqs[found.lane]))
            self._running.stop(found)
        elif found.lane != NOT_RUNNING:
            self._admission.stop(found)
        elif found.number in self._waiting:
            self._waiting.remove(found)
        del self._requests[found.number]
        return True

    def schedule(self) -> Step | None:
        """Plan the next step.

        Returns
        -------
        Step or None
            None if no request runs or waits.

        Raises
        ------
        RuntimeError
            The previous step is not done: call `update` or `drop` first.
        OutOfBlocksError, CapacityError
            No request runs, and the first waiting one has no room because other users of the cache hold its blocks or
            rows; it goes on waiting. OutOfBlocksError also if another thread takes blocks during the call.
        """
        if self._step is not None:
            raise RuntimeError("the step before is not done: call update with it, or drop")
        preempted = self._admission.make_room()
        if not preempted or not len(self._running):
            self._admission.start_some()
        if not len(self._running):
            return None
        running, cache = self._running, self._cache
        lanes, counts = running.lanes, self._admission.counts()
        seqs, starts = running.seqs[lanes], running.num_computed[lanes]
        n: int | Int64Array = counts
        if counts.max() == 1:
            n, tokens = 1, running.tokens[lanes, starts]  # a step of single tokens, in less time
        else:
            owners, positions = owned_spans(starts, counts)
            tokens = running.tokens[lanes[owners], positions]
        ids = tokens.astype(np.int64)
        ends = starts + counts
        is_sampled = ends == running.lens[lanes]
        numbers = running.numbers[lanes]
        if self._swapping is not None:
            self._swapping.begin_step()
        try:
            slots = cache.append(seqs, n, ids)
            logits_indices = cache.asarray((np.cumsum(counts) - 1)[is_sampled])
            batch = cache.batch(seqs, n)
            sampled = numbers[is_sampled]
            tokens_there = cache.asarray(ids)
            step = Step(numbers, tokens_there, slots, batch, logits_indices, sampled, seqs, lanes, counts, is_sampled)
        except BaseException:
            cache.truncate(seqs, starts)  # a listener of the cache may raise after append has changed it
            raise
        self._num_steps += 1
        self._step = step
        return step

    def update(self, step: Step, tokens: Any) -> list[Finished]:
        """Report that a step is computed, and which tokens were chosen.

        Other requests can find the blocks that it has filled from now on.

        Parameters
        ----------
        step : Step
            The last step, whose K and V have been written in all layers.
        tokens : (num_sampled,) ints
            The next token of each of `step.sampled`.

        Returns
        -------
        list of Finished
            The requests whose turn has ended. Their blocks are free; only resumable requests stay.

        Raises
        ------
        ValueError
            `step` is not the last one, or the number of tokens is wrong.
        TypeError
            `tokens` are not ints.
        """
        if step is None or step is not self._step:
            raise ValueError("step must be the last one that schedule returned, and not done yet")
        ids, running = ids_of(tokens), self._running
        if len(ids) != len(step.sampled):
            raise ValueError(f"tokens must have shape (num_sampled,) = ({len(step.sampled)},), got {ids.shape}")
        alive = running.numbers[step._lanes] == step.requests
        lanes, counts = step._lanes[alive], step._counts[alive]
        grown, ids = step._lanes[step._is_sampled & alive], ids[alive[step._is_sampled]]
        lens = running.lens[grown] + 1
        stopped = ids == (-1 if self._eos is None else self._eos)
        ended = np.flatnonzero(stopped | (lens == running.max_lens[grown]))
        # Calls that may raise come first, and of those the one that cannot be repeated comes last.
        if self._swapping is not None:
            self._swapping.end_step(len(step.requests), len(step.tokens))
        running.widen(int(lens.max(initial=0)))
        num_computed = running.num_computed[lanes] + counts
        if running.next_stops is None:
            self._cache.commit(running.seqs[lanes])
        else:
            self._cache.commit(running.seqs[lanes], lasting=num_computed == running.next_stops[lanes])
        if len(ended) or self._leaving:
            self._cache.free([*running.seqs[grown[ended]].tolist(), *self._leaving])
        running.extend(grown, ids)
        running.move(lanes, num_computed)
        self._step, self._leaving = None, []
        return [self._finish(int(grown[i]), "stop" if stopped[i] else "length") for i in ended]

    def drop(self) -> None:
        """Give up the current step, if there is one, after an error of the model for example.

        The next step has its tokens again.
        """
        step, running = self._step, self._running
        if step is not None:
            lanes = step._lanes[running.numbers[step._lanes] == step.requests]
            seqs, num_computed = running.seqs[lanes], running.num_computed[lanes]
            if self._cache.states:
                # States that were written already are those of the step: go back to snapshots.
                for i in (self._cache.state_lens(seqs) != num_computed).nonzero()[0].tolist():
                    lens = self._cache.lens_with_state(int(seqs[i]))
                    num_computed[i] = lens[lens <= num_computed[i]][-1]
            try:
                self._cache.truncate(seqs, num_computed)
            except ValueError:  # an update has failed behind its commit, and windows have passed what came before
                num_computed = np.zeros_like(num_computed)
                self._cache.truncate(seqs, 0)
            running.move(lanes, num_computed)
            self._cache.free(self._leaving)
            self._step, self._leaving = None, []

    def restart(self, tokens: Mapping[int, Any]) -> None:
        """Recover from an interrupt (Ctrl-C) in the middle of a call: free all blocks of the scheduler.

        The requests named in `tokens` wait to be computed again; the current step and all other requests are dropped.

        Parameters
        ----------
        tokens : dict
            All tokens, from the first one of the prompt, by the number of each request that goes on.

        Raises
        ------
        KeyError
            The request has ended, or was never added.
        """
        requests = {number: self._find(number) for number in tokens}
        for seq in {*self._running.seqs.tolist(), *self._leaving, self._admission.last_started}:
            with suppress(KeyError):  # the handle of an earlier request of the lane
                self._cache.free(seq)
        self._requests, self._step, self._leaving = requests, None, []
        for number, request in requests.items():
            request.tokens, request.lane, request.copy = ids_of(tokens[number]), NOT_RUNNING, None
        self._waiting.refill(requests)
        self._running.clear()

    def _find(self, request: int) -> Request:
        try:
            return self._requests[as_int("request", request, minimum=None)]
        except KeyError:
            raise KeyError(f"no request {request}: it has ended or was never added") from None

    def _key(self, priority: int) -> int:
        """The key of a request that is added now.

        All requests age at the same rate, so the order of two never changes.
        """
        return self._num_steps + priority * self._aging

    def _finish(self, lane: int, reason: str) -> Finished:
        """End the turn of the request in a lane, whose sequence is freed."""
        request = self._running.requests[lane]
        assert request is not None
        self._running.stop(request)
        if not request.resumable:
            del self._requests[request.number]
        return Finished(request.number, request.tokens[request.num_prompt :], reason)


def _lengths(snapshot_at: Any, num_tokens: int) -> tuple[int, ...]:
    """Check the lengths at which a caller wants snapshots."""
    lengths = as_ints("snapshot_at", snapshot_at)
    if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= num_tokens:
        raise ValueError(f"snapshot_at must be lengths from 0 to num_tokens = {num_tokens}, got {lengths.tolist()}")
    return tuple(lengths.tolist())
