"""AllocatorMachine: right allocators pass, and each mistake fails with a message that explains it."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pagedkv import PagedKVCache
from pagedkv.testing import AllocatorMachine, edited

from .block_manager import BlockManager, BlockManagerMachine

# Without a search for the smallest example, which takes longer than to find one.
SOME = settings(max_examples=100, stateful_step_count=30, derandomize=True, phases=[Phase.generate])


def play(machine, **changes):
    run_state_machine_as_test(machine, settings=settings(SOME, report_multiple_bugs=False, **changes))


def test_a_right_allocator_passes():
    play(BlockManagerMachine, max_examples=50)


# Which of its effects is met first depends on what Hypothesis draws: its words name any.
NEEDS = "self.require(num_new + copies)"


@pytest.mark.parametrize(
    ("method", "old", "new", "says"),
    [
        ("take", "popleft()", "pop(); self.free_blocks.append(block)", "a block is free that a sequence has"),
        ("release", "== 0", "<= 1", "a block is free that a sequence has"),
        ("add", "self.require(self.num_of(length))", "", "pop from an empty deque"),
        ("add", "self.num_of(length))]", "1 + self.num_of(length))]", r"\d+ blocks were taken where \d+ are enough"),
        ("add", "return len(self.tables) - 1", "return 0", "handle 0 of one that is alive|its table is"),
        ("add", "return len(self.tables) - 1", "", "add and fork must return the handle of the new sequence"),
        ("append", "self.ref_counts[table[-1]] > 1", "False", "which holds what was written for token"),
        ("append", "copied = [(source, table[-1])]", "copied = []", "which holds"),
        ("append", "self.release(source)", "", "a block is lost|blocks were taken where|but MemoryError"),
        ("append", NEEDS, "self.require(num_new)", "pop from an empty deque"),
        ("append", NEEDS, "self.require(num_new + 1)", "blocks are needed and . are free, but MemoryError"),
        (
            "append",
            NEEDS,
            f"table += [self.take()] * (not self.free_blocks); {NEEDS}",
            "empty|enough|become|but MemoryError",
        ),
        ("fork", "self.ref_counts[block] += 1", "pass", "a block is free that a sequence has|which holds what was"),
        ("fork", "self.tables[seq].copy()", "self.tables[seq]", "its table is|a block is lost"),
        ("truncate", "self.release(table.pop())", "table.pop()", "a block is lost|but MemoryError"),
        ("truncate", "self.num_of(length)", "length // self.block_size", r"\d blocks of ., its table"),
        ("free", "self.release(block)", "pass", "a block is lost"),
        ("free", "self.release(block)", "self.free_blocks.append(block)", "a block is free that a sequence has"),
    ],
)
def test_each_mistake_is_found(method, old, new, says):
    class Wrong(BlockManager):
        pass

    setattr(Wrong, method, edited(getattr(BlockManager, method), old, new))
    with pytest.raises((AssertionError, IndexError), match=says):
        play(type("Machine", (BlockManagerMachine,), {"manager_type": Wrong}))


def test_the_state_after_a_refusal_is_checked():
    class Leaky(BlockManager):
        def require(self, count):
            if count > len(self.free_blocks):
                self.free_blocks.clear()
            super().require(count)

    with pytest.raises(AssertionError, match=r"^refused, but free blocks and tables .* have become"):
        play(type("Machine", (BlockManagerMachine,), {"manager_type": Leaky}))


def test_missing_operations_are_left_out():
    class Least(BlockManagerMachine):
        append, fork, truncate = AllocatorMachine.append, AllocatorMachine.fork, AllocatorMachine.truncate
        longest, most_seqs = 2, 1

    play(Least, max_examples=10)


def test_missing_methods_of_a_subclass_are_named():
    class Nothing(AllocatorMachine):
        pass

    with pytest.raises(NotImplementedError, match=r"^a subclass of AllocatorMachine has start\(num_blocks"):
        play(Nothing)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"nums_blocks": ()}, r"nums_blocks must be one size or more, each at least 1, got \(\)"),
        ({"block_sizes": (4, 0)}, r"block_sizes must be one size or more, each at least 1, got \(4, 0\)"),
        ({"longest": 0}, "longest must be at least 1, got 0: nothing would be tried"),
        ({"most_seqs": 0}, "most_seqs must be at least 1, got 0: nothing would be tried"),
    ],
)
def test_sizes_with_which_nothing_is_tried_are_refused(sizes, says):
    with pytest.raises(ValueError, match=rf"^{says}(\n|$)"):
        play(type("Machine", (BlockManagerMachine,), sizes))


def test_the_end_is_looked_at_in_an_except_clause_too():
    class Never(BlockManagerMachine):
        def free(self, seq):
            raise AssertionError("freed at the end")

        free_sequence = None  # no rule frees before

    def ends():
        with pytest.raises(AssertionError, match=r"^freed at the end"):
            play(Never)

    ends()
    try:
        raise KeyError
    except KeyError:
        ends()


def test_another_exception_than_the_refusal_is_explained():
    class Other(BlockManager):
        def require(self, count):
            if count > len(self.free_blocks):
                raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match=r"^no room") as raised:
        play(type("Machine", (BlockManagerMachine,), {"manager_type": Other}))
    notes = "\n".join(raised.value.__notes__)
    assert "blocks are needed and" in notes
    assert "if this refuses, name it in `refusal`" in notes


@pytest.mark.parametrize(
    ("method", "result", "says"),
    [
        ("add", [0], r"must return a handle that can be hashed, got \[0\]\n"),
        ("num_cached", -1, r"^num_cached must be 0 to .*, the sequence's tokens, got -1"),
        ("num_cached", 99, "got 99"),
    ],
)
def test_results_of_the_subclass_are_checked(method, result, says):
    class Wrong(BlockManagerMachine):
        def num_free(self):
            return self.num_blocks

    setattr(Wrong, method, lambda self, _: result)
    with pytest.raises(AssertionError, match=says):
        play(Wrong)


class CacheMachine(AllocatorMachine):
    """Our cache, whose prefix cache keeps what is freed."""

    refusal = (MemoryError, ValueError)  # ValueError: more tokens than the whole pool has room for
    too_many = 0

    def start(self, num_blocks, block_size):
        sizes = {"block_size": block_size, "num_kv_heads": 1, "head_dim": 8}
        self.cache = PagedKVCache(num_layers=1, num_blocks=num_blocks, **sizes)
        self.cache._layer_caches.copy = lambda copies: [self.copy_block(*pair) for pair in copies.tolist()]
        self.found = 0

    def add(self, tokens):
        seq, self.found = self.cache.add(tokens)
        return seq

    def append(self, seq, tokens):
        self.cache.append([seq], len(tokens), tokens)

    def truncate(self, seq, length):
        self.cache.truncate([seq], length)

    def free(self, seq):
        self.cache.commit([seq])
        self.cache.free([seq])

    def num_free(self):
        return self.cache.num_free

    def block_table(self, seq):
        table = self.cache.batch([seq]).block_tables[0]
        return table[table >= 0]

    def num_cached(self, seq):
        return self.found + (self.found > 0) * self.too_many


def test_our_cache_passes():
    play(CacheMachine, max_examples=30)


def test_what_a_prefix_cache_did_not_find_is_noticed():
    with pytest.raises(AssertionError, match="which holds"):
        play(type("Machine", (CacheMachine,), {"too_many": 1}))
