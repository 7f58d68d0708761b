"""AllocatorMachine: random operations on a block allocator, compared with a model that remembers every token."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

WHICH = st.integers(0, 7)  # an index into the live sequences, modulo their number
# Tokens repeat, so that a prefix cache finds some; most forks continue with different ones.
FIRST = st.integers(0, 3)
# Numbers of tokens, and amounts that depend on the end of the sequence.
AMOUNT = st.integers(1, 3) | st.sampled_from(["to the block's end", "one past the block's end", "two blocks"])


class AllocatorMachine(RuleBasedStateMachine):
    """Tests your block allocator with random operations; a subclass says how to call it.

    This state machine of Hypothesis adds, appends, forks, truncates and frees sequences. It records for each slot the
    tokens up to the one written there, and after each operation reads every sequence back through its block table. That
    finds blocks that two sequences share by mistake, blocks that are lost or free twice, writes to shared blocks,
    missing copies, needless refusals, and refusals that change something.

    A subclass defines `start`, `add`, `free`, `num_free` and `block_table`; `append`, `fork` and `truncate` are tested
    if it defines them, and `num_cached` is for a prefix cache. Its attribute ``TestCase`` is a test for pytest and
    unittest; ``hypothesis.stateful.run_state_machine_as_test`` runs it from a function.

    Attributes
    ----------
    refusal : exception or tuple of them
        What the allocator raises when too few blocks are free; by default MemoryError, the base class of
        :class:`~pagedkv.OutOfBlocksError`.
    nums_blocks, block_sizes : tuple of int
        The sizes of pools and blocks to draw from.
    most_seqs : int
        Sequences alive at a time.
    longest : int or None
        Tokens of a sequence; None for as many as fit.
    tokens : dict
        The model: the token ids of each live sequence, by its handle.

    Examples
    --------
    >>> from hypothesis import settings
    >>> from hypothesis.stateful import run_state_machine_as_test
    >>> from pagedkv import BlockPool, SequenceTable
    >>> from pagedkv.testing import AllocatorMachine
    >>> class Machine(AllocatorMachine):
    ...     def start(self, num_blocks, block_size):
    ...         self.table = SequenceTable(BlockPool(num_blocks), block_size, self.most_seqs, 100)
    ...
    ...     def add(self, tokens):
    ...         return self.table.add(len(tokens))
    ...
    ...     def free(self, seq):
    ...         self.table.free(seq)
    ...
    ...     def num_free(self):
    ...         return self.table.num_free
    ...
    ...     def block_table(self, seq):
    ...         return self.table.block_tables(seq)[0]
    >>> run_state_machine_as_test(Machine, settings=settings(max_examples=3, stateful_step_count=5, database=None))
    """

    refusal: ClassVar[type[Exception] | tuple[type[Exception], ...]] = MemoryError
    nums_blocks: ClassVar[Sequence[int]] = (4, 1, 2, 3, 5, 8, 16)
    block_sizes: ClassVar[Sequence[int]] = (4, 1, 2, 3, 8)
    most_seqs: ClassVar[int] = 6
    longest: ClassVar[int | None] = None

    num_blocks: int
    block_size: int

    # -- what a subclass defines; no abstract methods, since Hypothesis's metaclass is no ABCMeta
    def start(self, num_blocks: int, block_size: int) -> None:
        """Make an allocator with `num_blocks` free blocks of `block_size` tokens, and keep it in self."""
        raise NotImplementedError("a subclass of AllocatorMachine has start(num_blocks, block_size)")

    def add(self, tokens: list[int]) -> Any:
        """Start a sequence of these token ids, one or more, and return its handle: anything that can be hashed."""
        raise NotImplementedError("a subclass of AllocatorMachine has add(tokens)")

    def append(self, seq: Any, tokens: list[int]) -> None:
        """Append token ids, one or more; call :meth:`copy_block` for each block to copy first."""
        raise NotImplementedError("append is not tested unless a subclass has it")

    def fork(self, seq: Any) -> Any:
        """Start a sequence with the tokens of another, and return its handle; call `copy_block` as in `append`."""
        raise NotImplementedError("fork is not tested unless a subclass has it")

    def truncate(self, seq: Any, length: int) -> None:
        """Shorten a sequence to its first `length` tokens, at least one."""
        raise NotImplementedError("truncate is not tested unless a subclass has it")

    def free(self, seq: Any) -> None:
        """End a sequence."""
        raise NotImplementedError("a subclass of AllocatorMachine has free(seq)")

    def num_free(self) -> int:
        """How many blocks can be handed out, including those that a prefix cache would evict."""
        raise NotImplementedError("a subclass of AllocatorMachine has num_free()")

    def block_table(self, seq: Any) -> Iterable[int]:
        """The blocks of a sequence in the order of its tokens: ceil(length / block_size) of them."""
        raise NotImplementedError("a subclass of AllocatorMachine has block_table(seq)")

    def num_cached(self, seq: Any) -> int:
        """How many tokens of the sequence just added a prefix cache found, so that they are not written."""
        return 0

    # -- what a subclass may call
    def copy_block(self, source: int, destination: int) -> None:
        """Copy the contents of a block."""
        for offset in range(self.block_size):
            self.written[destination, offset] = self.written.get((source, offset), ((), None))

    # -- the model, which a subclass may use for rules of its own
    def __init__(self) -> None:
        super().__init__()
        self._require_sizes()
        self._handled = sys.exception()  # not None if the machine runs in an except clause
        self.tokens: dict[Any, list[int]] = {}
        # By block and offset: the token ids up to the one written there, and the sequence that wrote it.
        self.written: dict[tuple[int, int], tuple[tuple[int, ...], Any]] = {}

    def _require_sizes(self) -> None:
        """Refuse sizes with which no sequence could be added and every allocator would pass."""
        for name in ("nums_blocks", "block_sizes"):
            if min(sizes := getattr(self, name), default=0) < 1:
                raise ValueError(f"{name} must be one size or more, each at least 1, got {sizes!r}")
        for name in ("most_seqs", "longest"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size!r}: nothing would be tried")

    def num_blocks_of(self, num_tokens: int) -> int:
        """How many blocks a sequence of num_tokens tokens has."""
        return -(-num_tokens // self.block_size)

    def blocks_of(self, seq: Any) -> list[int]:
        """Check and return the block table of a sequence: as many blocks as its tokens need, each once."""
        blocks, length = [int(block) for block in self.block_table(seq)], len(self.tokens[seq])
        expected = self.num_blocks_of(length)
        assert len(blocks) == expected, (
            f"sequence {seq} of {length} tokens needs {expected} blocks of {self.block_size}, its table is {blocks}"
        )
        assert all(0 <= block < self.num_blocks for block in blocks), f"sequence {seq} has no such block: {blocks}"
        assert len({*blocks}) == len(blocks), f"sequence {seq} has a block twice: {blocks}"
        return blocks

    def references(self) -> Counter[int]:
        """Count how many sequences hold each block."""
        return Counter(block for seq in self.tokens for block in self.blocks_of(seq))

    def num_to_append(self, seq: Any, num_tokens: int) -> int:
        """How many blocks an append takes: new ones, and a copy of the last block if that is shared."""
        length = len(self.tokens[seq])
        is_shared = num_tokens and length % self.block_size and self.references()[self.blocks_of(seq)[-1]] > 1
        return self.num_blocks_of(length + num_tokens) - self.num_blocks_of(length) + bool(is_shared)

    def write(self, seq: Any, first: int) -> None:
        """Record the tokens of a sequence from `first` on as written."""
        blocks, tokens = self.blocks_of(seq), self.tokens[seq]
        for i in range(first, len(tokens)):
            self.written[blocks[i // self.block_size], i % self.block_size] = tuple(tokens[: i + 1]), seq

    def attempt(self, num_blocks: int, operation: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
        """Call an operation that may take num_blocks blocks: (True, its result), or (False, None) if it refuses.

        Raises
        ------
        AssertionError
            It took more blocks, refused although enough were free, or refused and changed something.
        """
        num_free, tables = self.num_free(), {seq: self.blocks_of(seq) for seq in self.tokens}
        try:
            result = operation(*arguments)
        except self.refusal as error:
            refusal = repr(error)
        except Exception as error:
            if num_blocks > num_free:
                error.add_note(
                    f"{num_blocks} blocks are needed and {num_free} are free: if this refuses, name it in `refusal`"
                )
            raise
        else:
            taken = num_free - self.num_free()
            assert taken <= num_blocks, f"{taken} blocks were taken where {num_blocks} are enough"
            return True, result
        assert num_blocks > num_free, f"{num_blocks} blocks are needed and {num_free} are free, but {refusal}"
        after = self.num_free(), {seq: [*map(int, self.block_table(seq))] for seq in self.tokens}
        before = num_free, tables
        assert after == before, f"refused, but free blocks and tables {before} have become {after}"
        return False, None

    def pick(self, which: int) -> Any:
        """Choose a live sequence by an index modulo their number."""
        return [*self.tokens][which % len(self.tokens)]

    def has(self, operation: str) -> bool:
        """Whether the subclass defines an operation."""
        return getattr(type(self), operation) is not getattr(AllocatorMachine, operation)

    def _new_tokens(self, length: int, amount: int | str, first: int) -> list[int]:
        """Make token ids to append to `length` tokens; none if the sequence would be too long."""
        to_end = self.block_size - length % self.block_size
        counts = {"to the block's end": to_end, "one past the block's end": to_end + 1}
        count = amount if isinstance(amount, int) else counts.get(amount, 2 * self.block_size)
        fits = self.longest is None or length + count <= self.longest
        return [(first + i) % 4 for i in range(count if fits else 0)]

    def _begin(self, seq: Any, tokens: list[int]) -> None:
        assert seq is not None, "add and fork must return the handle of the new sequence, got None"
        assert isinstance(seq, Hashable), f"add and fork must return a handle that can be hashed, got {seq!r}"
        assert seq not in self.tokens, f"the new sequence has the handle {seq} of one that is alive"
        self.tokens[seq] = tokens

    # -- the random operations
    @initialize(data=st.data())
    def start_empty(self, data: st.DataObject) -> None:
        """Make a new allocator."""
        self.num_blocks = data.draw(st.sampled_from(self.nums_blocks), "num_blocks")
        self.block_size = data.draw(st.sampled_from(self.block_sizes), "block_size")
        self.start(self.num_blocks, self.block_size)

    @precondition(lambda self: len(self.tokens) < self.most_seqs)
    @rule(amount=AMOUNT, first=FIRST)
    def add_sequence(self, amount: int | str, first: int) -> None:
        """Add a sequence, and write the tokens that no prefix cache found."""
        if tokens := self._new_tokens(0, amount, first):
            done, seq = self.attempt(self.num_blocks_of(len(tokens)), self.add, tokens.copy())
            if done:
                self._begin(seq, tokens)
                found = self.num_cached(seq)
                assert 0 <= found <= len(tokens), (
                    f"num_cached must be 0 to {len(tokens)}, the sequence's tokens, got {found}"
                )
                self.write(seq, found)

    @precondition(lambda self: self.tokens and self.has("append"))
    @rule(which=WHICH, amount=AMOUNT, first=FIRST)
    def append_tokens(self, which: int, amount: int | str, first: int) -> None:
        """Append tokens to a sequence; a shared last block that is not full has to be copied."""
        self._append(self.pick(which), amount, first)

    def _append(self, seq: Any, amount: int | str, first: int) -> None:
        length = len(self.tokens[seq])
        if tokens := self._new_tokens(length, amount, first):
            done, _ = self.attempt(self.num_to_append(seq, len(tokens)), self.append, seq, tokens.copy())
            if done:
                self.tokens[seq] = self.tokens[seq] + tokens
                self.write(seq, length)

    @precondition(lambda self: 0 < len(self.tokens) < self.most_seqs and self.has("fork"))
    @rule(which=WHICH, goes_on=st.sampled_from(["none", "the fork", "the other one", "both"]))
    def fork_sequence(self, which: int, goes_on: str) -> None:
        """Fork a sequence, and append a token; an allocator may copy a last block that is not full at once."""
        seq = self.pick(which)
        done, fork = self.attempt(int(len(self.tokens[seq]) % self.block_size > 0), self.fork, seq)
        if done:
            self._begin(fork, self.tokens[seq].copy())
            if self.has("append"):
                for i, one in enumerate(
                    {"the fork": [fork], "the other one": [seq], "both": [fork, seq]}.get(goes_on, [])
                ):
                    self._append(one, 1, i)

    @precondition(lambda self: self.tokens and self.has("truncate"))
    @rule(which=WHICH, dropped=st.integers(1, 9))
    def truncate_sequence(self, which: int, dropped: int) -> None:
        """Drop tokens from the end of a sequence, keeping at least one."""
        seq = self.pick(which)
        if (length := max(1, len(self.tokens[seq]) - dropped)) < len(self.tokens[seq]):
            self.truncate(seq, length)
            self.tokens[seq] = self.tokens[seq][:length]

    @precondition(lambda self: self.tokens)
    @rule(which=WHICH)
    def free_sequence(self, which: int) -> None:
        """Free a sequence."""
        seq = self.pick(which)
        self.free(seq)
        del self.tokens[seq]

    def teardown(self) -> None:
        """Free all sequences, after which all blocks must be free; skipped after a failure, which it would hide."""
        if sys.exception() is self._handled:
            for seq in [*self.tokens]:
                self.free(seq)
                del self.tokens[seq]
                self.no_block_is_lost()

    # -- the invariants
    @invariant()
    def no_block_is_lost(self) -> None:
        """Every block is either free or held by a sequence."""
        used, num_free = len(self.references()), self.num_free()
        assert used + num_free == self.num_blocks, (
            f"{used} blocks are used and {num_free} free of {self.num_blocks}: "
            f"{'a block is lost' if used + num_free < self.num_blocks else 'a block is free that a sequence has'}"
        )

    @invariant()
    def sequences_have_their_tokens(self) -> None:
        """Every sequence finds through its block table what was written for its tokens."""
        for seq, tokens in self.tokens.items():
            blocks = self.blocks_of(seq)
            for i in range(len(tokens)):
                place = blocks[i // self.block_size], i % self.block_size
                content, writer = self.written.get(place, ((), None))
                held = f"what was written for token {len(content) - 1} of sequence {writer}" if content else "nothing"
                assert content == tuple(tokens[: i + 1]), (
                    f"token {i} of sequence {seq} is in block {place[0]} at offset {place[1]}, which holds {held}"
                )
