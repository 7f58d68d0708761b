"""Bench of the memory manager in a server: prompts with a prefix cache, decode steps, the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time_ns
from typing import Any

import numpy as np

from ..cache import PagedKVCache
from ..scheduling import Scheduler
from .contest import median, spread
from .report import Row

BLOCK_SIZE = 16
NUM_TOKENS = 2048
NUM_STEPS = 20
NUM_IDS = 32_000


def run(nums_seqs: tuple[int, ...], num_running: int, num_waiting: int, repeats: int) -> list[Row]:
    """Time prompts, decode steps and steps of the scheduler, in processor time.

    A prompt has 2048 tokens; what is timed is `add` and `commit`, of tokens that are not in the cache and then of the
    same ones and one more. A decode step is `append` of known tokens, `batch` and `commit`, with an array of handles.
    A step of the scheduler is `schedule` and `update` of `num_running` requests of 64 to 2048 tokens that all decode,
    while `num_waiting` wait behind one that is too long to start.

    Returns
    -------
    list of dict
        Least and median microseconds, and interquartile range over the median.
    """
    rng = np.random.default_rng(0)
    times = _prompts(rng, repeats)
    for num_seqs in nums_seqs:
        times[f"decode step, {num_seqs} sequences"] = _decode_steps(rng, num_seqs)
    name = f"scheduler step, {num_running} running, {num_waiting} waiting"
    times[name] = _scheduler_steps(rng, num_running, num_waiting)
    return [
        {"serving": what, "pagedkv_us": median(samples), "least_us": min(samples), "spread": spread(samples)}
        for what, samples in times.items()
    ]


def _cache(num_blocks: int, max_seqs: int, max_seq_len: int) -> PagedKVCache:
    """Make a cache with blocks of a few bytes, since nothing is computed."""
    return PagedKVCache(1, num_blocks, BLOCK_SIZE, 1, 8, max_seqs=max_seqs, max_seq_len=max_seq_len)


def _time(call: Callable[[], Any]) -> float:
    """Measure the microseconds of processor time that a call takes."""
    start = process_time_ns()
    call()
    return (process_time_ns() - start) / 1000


def _prompts(rng: np.random.Generator, repeats: int) -> dict[str, list[float]]:
    cache = _cache(8 * NUM_TOKENS // BLOCK_SIZE, 2, NUM_TOKENS + 1)
    times: dict[str, list[float]] = {"prompt, a miss": [], "prompt, a hit": []}
    for _ in range(4 * repeats):
        tokens = rng.integers(NUM_IDS, size=NUM_TOKENS).tolist()
        for samples, prompt in zip(times.values(), (tokens, [*tokens, 0]), strict=True):
            seqs: list[int] = []
            samples.append(_time(lambda seqs=seqs, prompt=prompt: _start(cache, seqs, prompt)))  # type: ignore[misc]
            cache.free(seqs)
    return times


def _start(cache: PagedKVCache, seqs: list[int], prompt: list[int]) -> None:
    seqs.append(cache.add(prompt).seq)
    cache.commit(seqs)


def _decode_steps(rng: np.random.Generator, num_seqs: int) -> list[float]:
    blocks_each = (NUM_TOKENS + NUM_STEPS) // BLOCK_SIZE + 1
    cache = _cache(num_seqs * blocks_each, num_seqs, blocks_each * BLOCK_SIZE)
    seqs: list[int] = []
    for i in range(num_seqs):
        seqs.append(cache.add(rng.integers(NUM_IDS, size=NUM_TOKENS - i % BLOCK_SIZE).tolist()).seq)
    cache.commit(seqs)
    handles = np.array(seqs)

    def step() -> None:
        cache.append(handles, tokens=tokens)
        cache.batch(handles)
        cache.commit(handles)

    samples = []
    for _ in range(NUM_STEPS):
        tokens = rng.integers(NUM_IDS, size=num_seqs)
        samples.append(_time(step))
    return samples


def _scheduler_steps(rng: np.random.Generator, num_running: int, num_waiting: int) -> list[float]:
    """Time steps in a pool with room for them, and one block too few for the long request that waits first."""
    lens = rng.integers(64, NUM_TOKENS + 1, num_running + num_waiting)
    before, after = (int((-(-(lens[:num_running] + n) // BLOCK_SIZE)).sum()) for n in (0, NUM_STEPS))
    long = (after - before) * BLOCK_SIZE + 1
    cache = _cache(after, num_running + 1, long + NUM_TOKENS)
    scheduler = Scheduler(cache, max_num_batched_tokens=2 * int(lens.sum()), watermark=0)
    for num_tokens in (*lens[:num_running].tolist(), long, *lens[num_running:].tolist()):
        scheduler.add(rng.integers(NUM_IDS, size=num_tokens).tolist(), NUM_STEPS + 1)
    samples = []
    for _ in range(NUM_STEPS):
        samples.append(_time(lambda: _step(scheduler)))
        assert scheduler.num_running == num_running
    return samples[1:]  # the first one computes the prompts


def _step(scheduler: Scheduler) -> None:
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(step, np.full(len(step.sampled), 7))
