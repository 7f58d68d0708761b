"""First fit and buddies: runs in use never overlap, what is free is whole, and everything freed comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.trace.buddy import BuddyAllocator
from pagedkv.trace.first_fit import FirstFit

MEMORY = st.integers(1, 200)
# Sizes to allocate, and negative numbers for which run in use to free.
CALLS = st.lists(st.integers(1, 40) | st.integers(-1000, -1), max_size=60)


def free_runs(allocator):
    """(start, size) of each."""
    if isinstance(allocator, FirstFit):
        return list(allocator.holes)
    return [(start, 1 << k) for k, starts in enumerate(allocator.holes) for start in starts]


def run(allocator, calls):
    """Make the calls, and check after each that every slot is free or in use exactly once."""
    used = {}
    for call in calls:
        if call > 0:
            start = allocator.allocate(call)
            if start is None:
                assert max((size for _, size in free_runs(allocator)), default=0) < call
            else:
                assert start not in used
                used[start] = allocator.sizes[start]
                assert used[start] >= call
        elif used:
            start = sorted(used)[call % len(used)]
            allocator.free(start)
            del used[start]
        assert allocator.sizes == used
        runs = sorted([*used.items(), *free_runs(allocator)])
        assert sum(size for _, size in runs) == allocator.memory
        end = 0
        for start, size in runs:
            assert start == end
            end = start + size
        yield used


@pytest.mark.parametrize("kind", [FirstFit, BuddyAllocator])
@given(memory=MEMORY, calls=CALLS)
def test_every_slot_is_free_or_in_use_once_and_all_comes_back(kind, memory, calls):
    allocator = kind(memory)
    fresh = free_runs(allocator)
    for _ in run(allocator, calls):
        pass
    for start in list(allocator.sizes):
        allocator.free(start)
    assert free_runs(allocator) == fresh
    assert allocator.allocate(allocator.largest) == 0
    assert not allocator.sizes or allocator.largest in allocator.sizes.values()


@given(memory=MEMORY, calls=CALLS)
def test_holes_of_first_fit_are_in_order_and_never_touch(memory, calls):
    allocator = FirstFit(memory)
    for _ in run(allocator, calls):
        ends = [start + size for start, size in allocator.holes]
        assert all(end < start for end, (start, _) in zip(ends, allocator.holes[1:], strict=False))


@given(memory=MEMORY, calls=CALLS)
def test_no_two_buddies_are_free(memory, calls):
    allocator = BuddyAllocator(memory)
    for used in run(allocator, calls):
        for k, starts in enumerate(allocator.holes):
            assert not {start ^ (1 << k) for start in starts} & starts
        assert all(size & (size - 1) == 0 and start % size == 0 for start, size in used.items())


def test_first_fit_takes_the_first_hole_that_is_large_enough():
    allocator = FirstFit(10)
    starts = [allocator.allocate(size) for size in (2, 3, 1, 4)]
    assert starts == [0, 2, 5, 6]
    allocator.free(0)
    allocator.free(6)
    assert allocator.holes == [(0, 2), (6, 4)]
    assert allocator.allocate(3) == 6
    assert allocator.allocate(3) is None


def test_a_buddy_run_is_less_than_twice_as_large_as_asked_for():
    allocator = BuddyAllocator(16)
    assert [allocator.allocate(size) for size in (5, 1, 3)] == [0, 8, 12]
    assert allocator.sizes == {0: 8, 8: 1, 12: 4}
    assert allocator.holes == [{9}, {10}, set(), set(), set()]


@pytest.mark.parametrize("kind", [FirstFit, BuddyAllocator])
def test_blocks_that_are_not_in_use_cannot_be_released(kind):
    allocator = kind(8)
    allocator.free(allocator.allocate(2))
    with pytest.raises(KeyError):
        allocator.free(0)
    assert free_runs(allocator) == [(0, 8)]
