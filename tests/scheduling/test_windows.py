"""Requests need the blocks of their windows, and no more: while they wait, start, run and are preempted."""

import pytest

from pagedkv import PagedKVCache, Scheduler


def make_cache(num_blocks, windows=(6, None), **options):
    return PagedKVCache(2, num_blocks, 4, 1, 8, windows=windows, **options)


def serve(scheduler, cache):
    """Run all requests to the end, with made-up tokens; return the most blocks that were used."""
    most = 0
    while step := scheduler.schedule():
        most = max(most, cache.stats().used)
        scheduler.update(step, [1] * len(step.sampled))
        cache.check()
    return most


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_request_that_just_fits_ends(prefix_cache):
    """40 tokens in chunks of 8 take 15 blocks of 4: 10 without a window, 5 with one of 6 tokens."""
    cache = make_cache(15, prefix_cache=prefix_cache)
    scheduler = Scheduler(cache, max_num_batched_tokens=8)
    scheduler.add(list(range(30)), 11)
    assert serve(scheduler, cache) == 10 + 3
    assert scheduler.num_preempted == 0


def test_a_request_that_can_never_fit_is_refused():
    scheduler = Scheduler(make_cache(14), max_num_batched_tokens=8)
    with pytest.raises(
        ValueError, match=r"a request can have 36 tokens in this cache, got 30 and max_tokens=11: lower .*smaller$"
    ):
        scheduler.add(list(range(30)), 11)


@pytest.mark.parametrize("budget", [4, 7, 16, 64])
@pytest.mark.parametrize("num_blocks", [17, 22, 40])
def test_requests_share_a_pool_that_is_too_small_for_all(budget, num_blocks):
    cache = make_cache(num_blocks)
    scheduler = Scheduler(cache, max_num_batched_tokens=budget)
    for i, length in enumerate((20, 3, 9, 17, 5)):
        scheduler.add(list(range(i, i + length)), 9)
    assert serve(scheduler, cache) <= num_blocks
    assert cache.stats().used == 0


@pytest.mark.parametrize("windows", [None, 6])
def test_windows_leave_room_for_more_requests(windows):
    """16 requests of 64 tokens take 16 blocks each, or 3 with a window of 6 in both layers."""
    cache = make_cache(64, windows, prefix_cache=False)
    scheduler = Scheduler(cache, max_num_batched_tokens=16)
    for _ in range(16):
        scheduler.add(list(range(4)), 61)
    serve(scheduler, cache)
    assert (scheduler.num_preempted == 0) == (windows is not None)
