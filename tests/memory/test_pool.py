"""BlockPool: which blocks are handed out, what is refused, and what check() finds."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedkv.errors import CapacityError, OutOfBlocksError
from pagedkv.memory import BlockPool

from .manager import refused


def test_a_fresh_pool_hands_out_blocks_in_order():
    pool = BlockPool(5)
    assert (pool.num_blocks, pool.num_free) == (5, 5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first.dtype == second.dtype == np.int32
    assert first.tolist() == [0, 1]
    assert second.tolist() == [2, 3, 4]
    assert pool.num_free == 0


def test_released_blocks_are_handed_out_next_in_the_same_order():
    pool = BlockPool(9)
    pool.allocate(9)
    pool.release([7, 2, 5])
    pool.release([3, 8])
    assert pool.allocate(4).tolist() == [3, 8, 7, 2]


def test_the_result_of_allocate_belongs_to_the_caller():
    pool = BlockPool(3)
    pool.allocate(2)[:] = 99
    pool.release([0, 1])
    pool.check()


def test_a_block_is_free_when_its_last_reference_is_gone():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.retain([1, 1, 0])
    assert pool.ref_counts.tolist() == [2, 3, 0]
    pool.release(np.array([1, 0, 1], np.int32))
    assert pool.ref_counts.tolist() == [1, 1, 0]
    assert pool.num_free == 1
    pool.release((1,))
    assert pool.num_free == 2
    pool.check()


def test_ref_counts_is_a_read_only_view_that_follows_the_pool():
    pool = BlockPool(2)
    counts = pool.ref_counts
    assert counts.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        counts[0] = 1
    pool.allocate(1)
    assert counts.tolist() == [1, 0]


def test_zero_blocks_may_be_allocated():
    pool = BlockPool(2)
    assert pool.allocate(0).shape == (0,)
    pool.retain([])
    pool.release(np.empty(0, np.int64))
    assert pool.num_free == 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: p.allocate(3), OutOfBlocksError, r"^3 blocks asked for, 2 of 5 are free$"),
        (lambda p: p.allocate(2**70), OutOfBlocksError, r"blocks asked for, 2 of 5 are free$"),
        (lambda p: p.allocate(-1), ValueError, r"^n must be at least 0, got -1$"),
        (lambda p: p.allocate(True), TypeError, r"^n must be an int, got bool$"),
        (lambda p: p.allocate(1.0), TypeError, r"^n must be an int, got float$"),
        (lambda p: p.release([3]), KeyError, r"block 3 released 1 times, it has 0 references"),
        (lambda p: p.release([0, 2, 0]), KeyError, r"block 0 released 2 times, it has 1 references"),
        (lambda p: p.release([1, 0, 1, 1]), KeyError, r"block 1 released 3 times, it has 2 references"),
        (lambda p: p.release([0, 5]), KeyError, r"no block 5 in a pool of 5"),
        (lambda p: p.release([0, -1]), KeyError, r"no block -1 in a pool of 5"),
        (lambda p: p.retain([0, 4]), KeyError, r"block 4 has no reference"),
        (lambda p: p.retain([-5]), KeyError, r"no block -5 in a pool of 5"),
        (lambda p: p.release([0.0]), TypeError, r"^blocks must have an integer dtype, got float64$"),
        (lambda p: p.release([0, True]), TypeError, r"^blocks must hold ints, got a bool$"),
        (lambda p: p.release([True]), TypeError, r"^blocks must have an integer dtype, got bool$"),
        (
            lambda p: p.retain(np.array([2**64 - 1])),
            ValueError,
            r"^blocks must be at most 2\*\*63 - 1, got 18446744073709551615$",
        ),
        (lambda p: p.retain(np.array(0)), ValueError, r"^blocks must have shape \(n,\), got \(\)$"),
        (lambda p: p.retain(0), TypeError, r"^blocks must be a list, a tuple or an array of ints, got int$"),
        (lambda p: p.retain("0"), TypeError, r"^blocks must be a list, a tuple or an array of ints, got str$"),
        (lambda p: p.release(np.zeros((1, 1), np.int32)), ValueError, r"^blocks must have shape \(n,\), got \(1, 1\)$"),
    ],
)
def test_refusals(call, error, message):
    pool = BlockPool(5)
    pool.allocate(3)
    pool.retain([1])
    with refused(pool, error, message):
        call(pool)


def test_references_are_counted_up_to_the_last_one_of_int32():
    pool = BlockPool(5)
    pool.allocate(3)
    pool._refs[1], pool._num_shared[0] = 2**31 - 3, 1
    with refused(pool, OverflowError, r"^block 1 would have more than 2\*\*31 - 1 references$"):
        pool.retain([0, 1, 1, 1])
    pool.retain([0, 1, 1])
    assert pool.ref_counts.tolist() == [2, 2**31 - 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("num_blocks", "error", "message"),
    [
        (0, ValueError, r"^num_blocks must be at least 1, got 0$"),
        (2**31, ValueError, r"^num_blocks must be at most 2147483647, got 2147483648$"),
        (2.0, TypeError, r"^num_blocks must be an int, got float$"),
        (False, TypeError, r"^num_blocks must be an int, got bool$"),
        (None, TypeError, r"^num_blocks must be an int, got NoneType$"),
    ],
)
def test_sizes_that_no_pool_has(num_blocks, error, message):
    with pytest.raises(error, match=message):
        BlockPool(num_blocks)


def test_exhaustion_is_a_memory_error():
    assert issubclass(OutOfBlocksError, CapacityError)
    assert issubclass(CapacityError, MemoryError)


@pytest.mark.parametrize(
    ("array", "index", "value", "message"),
    [
        ("_num_free", 0, 5, "5 of 4 blocks are free"),
        ("_num_free", 0, -1, "-1 of 4 blocks are free"),
        ("_num_free", 0, 1, "a block that has no references is not free"),
        ("_free", 0, 4, "a free block does not exist"),
        ("_free", 0, -1, "a free block does not exist"),
        ("_free", 0, 2, "a block is free twice"),
        ("_refs", 0, -1, "a reference count is negative"),
        ("_refs", 0, 0, "a block that has no references is not free"),
        ("_refs", 3, 1, "a free block has references"),
        ("_refs", 1, 2, "shared blocks are counted wrongly"),
    ],
)
def test_check_finds_broken_invariants(array, index, value, message):
    pool = BlockPool(4)
    pool.allocate(2)
    pool.check()
    getattr(pool, array)[index] = value
    with pytest.raises(AssertionError, match=message):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a Counter of references."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.model = Counter()

    @rule(n=st.integers(0, 9))
    def allocate(self, n):
        if n > self.pool.num_blocks - len(self.model):
            with refused(self.pool, OutOfBlocksError):
                self.pool.allocate(n)
            return
        blocks = self.pool.allocate(n).tolist()
        assert len(set(blocks)) == n
        assert not self.model.keys() & set(blocks)
        self.model.update(blocks)

    def pick(self, data):
        """Blocks to name, mostly ones in use, some twice."""
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.model) or [0]), max_size=6))
        return blocks + data.draw(st.sampled_from([[], [], [], [-1], [0], [self.pool.num_blocks]]))

    @rule(data=st.data())
    def retain(self, data):
        blocks = self.pick(data)
        if any(block not in self.model for block in blocks):
            with refused(self.pool, KeyError):
                self.pool.retain(blocks)
        else:
            self.pool.retain(blocks)
            self.model.update(blocks)

    @rule(data=st.data())
    def release(self, data):
        blocks = self.pick(data)
        if Counter(blocks) <= self.model:
            self.pool.release(blocks)
            self.model = self.model - Counter(blocks)
        else:
            with refused(self.pool, KeyError):
                self.pool.release(blocks)

    @invariant()
    def agrees(self):
        self.pool.check()
        assert self.pool.ref_counts.tolist() == [self.model[block] for block in range(self.pool.num_blocks)]
        assert self.pool.num_free == self.pool.num_blocks - len(self.model)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)
