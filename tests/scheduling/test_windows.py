"""Scheduler over caches whose layers have windows: requests need what windows see, and no more."""

import numpy as np
import pytest

from pagedkv import PagedKVCache, Scheduler

from . import toy
from .toy import alone, forward

WINDOWS = (6, None)


def make_cache(num_blocks, windows=WINDOWS, **options):
    """A cache whose K and V are of no interest."""
    return PagedKVCache(len(windows), num_blocks, 4, 1, 8, windows=windows, **options)


def run(scheduler, cache):
    """Run all requests to the end, with made-up tokens; yield each step before it is done."""
    while step := scheduler.schedule():
        yield step
        scheduler.update(step, [1] * len(step.sampled))
        cache.check()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_request_that_just_fits_ends(prefix_cache):
    """40 tokens in chunks of 8 take 15 blocks of 4: 10 without a window, 5 with one of 6 tokens."""
    cache = toy.make_cache(15, windows=WINDOWS, prefix_cache=prefix_cache)
    scheduler = Scheduler(cache, max_num_batched_tokens=8)
    number = scheduler.add(range(30), 11)
    assert toy.serve(scheduler, cache) == {number: alone(tuple(range(30)), 11, WINDOWS)}
    assert scheduler.num_preempted == 0


def test_a_request_that_can_never_fit_is_refused():
    scheduler = Scheduler(make_cache(14), max_num_batched_tokens=8)
    message = "a request can have 36 tokens in this cache, got 30 and max_tokens=11: lower .*"
    with pytest.raises(ValueError, match=f"^{message}, or max_num_batched_tokens = 8 smaller$"):
        scheduler.add(range(30), 11)
    Scheduler(make_cache(14), max_num_batched_tokens=4).add(range(30), 11)
    scheduler = Scheduler(make_cache(64, max_seq_len=36))
    with pytest.raises(ValueError, match=f"^{message}, or raise the cache's max_seq_len, as far as"):
        scheduler.add(range(30), 11)


@pytest.mark.parametrize("budget", [4, 7, 16, 64])
@pytest.mark.parametrize("num_blocks", [17, 22, 40])
def test_requests_share_a_pool_that_is_too_small_for_all(budget, num_blocks):
    cache = make_cache(num_blocks)
    scheduler = Scheduler(cache, max_num_batched_tokens=budget)
    for i, length in enumerate((20, 3, 9, 17, 5)):
        scheduler.add(range(i, i + length), 9)
    assert [*run(scheduler, cache)]
    assert cache.stats().used == 0


@pytest.mark.parametrize("windows", [(None, None), (6, 6)])
def test_windows_leave_room_for_more_requests(windows):
    """16 requests of 64 tokens take 16 blocks each, or 3 with a window of 6 in both layers."""
    cache = make_cache(64, windows, prefix_cache=False)
    scheduler = Scheduler(cache, max_num_batched_tokens=16)
    for _ in range(16):
        scheduler.add(range(4), 61)
    assert [*run(scheduler, cache)]
    assert (scheduler.num_preempted == 0) == (windows == (6, 6))


def test_slots_of_a_step_are_those_of_each_group():
    cache = make_cache(64)
    scheduler = Scheduler(cache, max_num_batched_tokens=4)
    for tokens in ([1, 2, 3], [4, 5]):
        scheduler.add(tokens, 2)
    step = scheduler.schedule()
    offsets = np.array([0, 1, 2, 0])
    assert (step.slots == step.batch.block_tables[:, [0, 0, 0, 1], 0] * 4 + offsets).all()


def test_a_long_prompt_never_holds_more_than_its_window_and_a_chunk():
    cache = make_cache(400, (20, None))
    scheduler = Scheduler(cache, max_num_batched_tokens=17)
    scheduler.add([i % 47 for i in range(1000)], 8)
    held = [(step.batch.block_tables >= 0).sum(axis=(1, 2)) for step in run(scheduler, cache)]
    window, full = np.array(held).T
    assert window.max() == 10  # the chunk with 3 tokens before it in its block, and the 19 that a query sees besides
    assert full.max() == 252


@pytest.mark.parametrize("budget", [32, 128, 512])
def test_a_common_beginning_is_found_by_each_in_half_of_the_room(budget):
    """As 8 prompts of 4,096 tokens with 512 in common, windows of 1,024 and blocks of 64 would."""
    windows = (64,) * 5 + (None,)
    rng = np.random.default_rng(0)
    num_needed = 8 * (5 * (budget // 4 + 1 + 16) + 64)
    cache = make_cache(num_needed // 2, windows)
    scheduler = Scheduler(cache, max_num_batched_tokens=budget)
    common = rng.integers(50, size=32)
    numbers = [scheduler.add([*common, *rng.integers(50, size=224)], 8) for _ in range(8)]
    found = {}
    for step in run(scheduler, cache):
        found |= {number: scheduler.num_cached(number) for number in step.requests.tolist()}
    assert found == {number: 0 if number == numbers[0] else 32 for number in numbers}


def test_found_blocks_are_part_of_what_a_request_holds():
    """They come back while the rest is computed, so a request that fits without them fits with them."""
    cache = toy.make_cache(15, windows=WINDOWS)
    scheduler = Scheduler(cache, max_num_batched_tokens=8)
    first, second = [*range(9)], [*range(8), *range(40, 50), *range(20)]
    texts = []
    for prompt, num_new in ((first, 1), (second, 3)):
        number = scheduler.add(prompt, num_new)
        texts.append(toy.serve(scheduler, cache)[number])
    assert cache.stats().hit_tokens == 8
    assert texts == [alone(tuple(first), 1, WINDOWS), alone(tuple(second), 3, WINDOWS)]


def test_those_that_decode_reserve_no_chunk():
    """Six hold 11 of 96 blocks each and need no more; of chunks that windows have yet to pass it would be 16 each."""
    cache = make_cache(96)
    scheduler = Scheduler(cache, max_num_batched_tokens=256, watermark=0)
    for i in range(6):
        scheduler.add([i] * 31, 9)
    step = scheduler.schedule()
    scheduler.update(step, [1] * 6)
    assert cache.num_free == 30
    scheduler.add([7] * 40, 1)
    assert len(scheduler.schedule().requests) == 7


@pytest.mark.parametrize(("keep", "again"), [(0, [15, 1]), (4, [4, 4])])
def test_a_step_can_be_dropped_after_an_update_that_failed_behind_its_commit(monkeypatch, keep, again):
    """Where windows have passed what the queries of the step saw, its requests are computed from the beginning."""
    cache = toy.make_cache(32, windows=WINDOWS, keep=keep)
    scheduler = Scheduler(cache, max_num_batched_tokens=16)
    first, second = [*range(20)], [*range(30, 34)]
    scheduler.add(first, 4)
    scheduler.update(step := scheduler.schedule(), forward(cache, step).astype(int))
    scheduler.add(second, 1)
    step = scheduler.schedule()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "free", lambda seqs: [][0])
        with pytest.raises(IndexError):
            scheduler.update(step, forward(cache, step).astype(int))
    scheduler.drop()
    cache.check()
    step = scheduler.schedule()
    assert np.diff(step.batch.query_starts).tolist() == again
    scheduler.drop()
    assert toy.serve(scheduler, cache) == {0: alone(tuple(first), 4, WINDOWS), 1: alone(tuple(second), 1, WINDOWS)}
