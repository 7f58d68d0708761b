"""The manager against a model that stores the tokens themselves.

Every token written gets a number of its own, stored in its slot after the copies were done; after each step every
sequence is read back through its block table. What an operation needs of the pool is worked out one sequence at a
time from what the table shows.
"""

import itertools
from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv.errors import CapacityError, OutOfBlocksError
from pagedkv.memory import BlockPool, SequenceTable

from .manager import last_block_first, refused

FEW = st.integers(1, 2)
ALL = st.just(99)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from([4, 3, 8, 2, 5, 1]),
        max_seqs=st.sampled_from([8, 10, 5, 3]),
        max_blocks=st.integers(2, 8),
        from_the_end=st.booleans(),
    )
    def start(self, num_blocks, block_size, max_seqs, max_blocks, from_the_end):
        self.pool = BlockPool(num_blocks)
        if from_the_end:
            last_block_first(self.pool)
        self.table = SequenceTable(self.pool, block_size, max_seqs, max_blocks)
        self.stored = np.zeros((num_blocks, block_size), np.int64)
        self.numbers = itertools.count(1)
        self.model: dict[int, list[int]] = {}
        self.gone: list[int] = []

    def pick(self, data, sizes):
        """Distinct sequences that are alive, in any order, named in any way."""
        seqs = data.draw(st.permutations(sorted(self.model)))[: data.draw(sizes)]
        return data.draw(st.sampled_from([list, tuple, lambda seqs: np.array(seqs, np.int64)]))(seqs)

    def write(self, slots):
        """Store new tokens in the slots, which belong to one sequence each."""
        assert len(set(slots.tolist())) == len(slots)
        assert (self.pool.ref_counts[slots // self.table.block_size] == 1).all()
        tokens = list(itertools.islice(self.numbers, len(slots)))
        self.stored.reshape(-1)[slots] = tokens
        return tokens

    def num_blocks(self, num_tokens):
        return -(-num_tokens // self.table.block_size)

    def blocks_needed(self, counts):
        """Blocks that appending counts[seq] tokens to each sequence takes out of the pool."""
        needed, writers = 0, Counter()
        for seq, count in counts.items():
            length = len(self.model[seq])
            needed += self.num_blocks(length + count) - self.num_blocks(length)
            if count and length % self.table.block_size:
                writers[self.table.block_tables(seq)[0, length // self.table.block_size]] += 1
        for block, count in writers.items():
            needed += count - (count == self.pool.ref_counts[block])
        return needed

    @precondition(lambda self: len(self.model) < self.table.max_seqs)
    @rule(data=st.data())
    def add(self, data):
        num_tokens = data.draw(st.integers(1, 2 * self.table.block_size) | st.integers(0, self.table.max_seq_len + 1))
        error = None
        if num_tokens > self.table.max_seq_len:
            error = ValueError
        elif self.num_blocks(num_tokens) > self.pool.num_free:
            error = OutOfBlocksError
        if error:
            with refused(self.table, error):
                self.table.add(num_tokens)
            return
        seq = self.table.add(num_tokens)
        assert seq not in self.model
        assert seq not in self.gone
        self.model[seq] = self.write(self.table.slots(seq, 0, num_tokens))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def decode_step(self, data):
        self.append(self.pick(data, FEW | ALL), 1)

    @rule(data=st.data(), most=st.sampled_from([2, 9]))
    def append_several(self, data, most):
        seqs = self.pick(data, FEW | ALL)
        each = st.lists(st.integers(0, most), min_size=len(seqs), max_size=len(seqs))
        self.append(seqs, data.draw(st.integers(0, most) | each))

    def append(self, seqs, n):
        each = n if isinstance(n, list) else [n] * len(seqs)
        counts = {int(seq): count for seq, count in zip(seqs, each, strict=True)}
        error = None
        if any(len(self.model[seq]) + count > self.table.max_seq_len for seq, count in counts.items()):
            error = ValueError
        elif self.blocks_needed(counts) > self.pool.num_free:
            error = OutOfBlocksError
        if error:
            with refused(self.table, error):
                self.table.append(seqs, n)
            return
        free_after = self.pool.num_free - self.blocks_needed(counts)
        slots, copies = self.table.append(seqs, n)
        assert self.pool.num_free == free_after
        assert not set(copies[:, 0].tolist()) & set(copies[:, 1].tolist())
        self.stored[copies[:, 1]] = self.stored[copies[:, 0]]
        tokens = iter(self.write(slots))
        for seq, count in counts.items():
            self.model[seq] += itertools.islice(tokens, count)

    @precondition(lambda self: 0 < len(self.model) < self.table.max_seqs)
    @rule(data=st.data(), wander=st.integers(0, 4))
    def fork(self, data, wander):
        """Fork some, one of them perhaps twice, and give a few of the family tokens of their own."""
        num_rows, num_free = self.table.max_seqs - len(self.model), self.pool.num_free
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=min(3, num_rows)))
        n = data.draw(st.integers(1, min(3, num_rows // len(seqs))))
        forks = self.table.fork(seqs, n)
        parents = [seq for seq in seqs for _ in range(n)]
        assert len(set(forks)) == len(parents)
        assert not set(forks) & (self.model.keys() | set(self.gone))
        assert self.pool.num_free == num_free
        self.model |= {fork: self.model[seq].copy() for fork, seq in zip(forks, parents, strict=True)}
        self.append(data.draw(st.permutations([*set(seqs), *forks]))[:wander], 1)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), wander=st.integers(0, 4))
    def reorder(self, data, wander):
        """Go on with the tokens of others, and give a few tokens of their own."""
        seqs = [int(seq) for seq in self.pick(data, FEW | ALL)]
        parents = data.draw(st.lists(st.integers(0, len(seqs) - 1), min_size=len(seqs), max_size=len(seqs)))
        self.table.reorder(seqs, data.draw(st.sampled_from([list, tuple, np.array]))(parents))
        self.model |= {seq: self.model[seqs[parent]].copy() for seq, parent in zip(seqs, parents, strict=True)}
        assert self.pool.num_free == self.pool.num_blocks - len(np.unique(self.used_blocks()))
        self.append(data.draw(st.permutations(seqs))[:wander], 1)

    def used_blocks(self):
        tables = self.table.block_tables(list(self.model))
        return tables[tables >= 0]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), beyond=st.sampled_from([0, 0, 0, 0, 1]))
    def truncate(self, data, beyond):
        seqs = self.pick(data, FEW)
        if len(seqs) == 1:
            lengths = data.draw(st.integers(0, len(self.model[seqs[0]]) + beyond))
        else:
            lengths = [
                data.draw(st.integers(max(0, len(self.model[seq]) - 4), len(self.model[seq]) + beyond)) for seq in seqs
            ]
        each = lengths if isinstance(lengths, list) else [lengths] * len(seqs)
        if any(length > len(self.model[seq]) for seq, length in zip(seqs, each, strict=True)):
            with refused(self.table, ValueError):
                self.table.truncate(seqs, lengths)
            return
        self.table.truncate(seqs, lengths)
        for seq, length in zip(seqs, each, strict=True):
            del self.model[seq][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        seqs = self.pick(data, FEW)
        self.table.free(seqs)
        for seq in seqs:
            del self.model[seq]
            self.gone.append(int(seq))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def misuse(self, data):
        """Fork one too many, name one sequence twice, or one that is gone."""
        seqs = list(self.pick(data, FEW))
        with refused(self.table, CapacityError):
            self.table.fork(seqs[0], self.table.max_seqs - len(self.model) + 1)
        error, wrong = data.draw(st.sampled_from([(ValueError, seqs[0]), *((KeyError, seq) for seq in self.gone[-3:])]))
        seqs.insert(data.draw(st.integers(0, len(seqs))), wrong)
        for mutate in (self.table.append, self.table.free, lambda seqs: self.table.truncate(seqs, 0)):
            with refused(self.table, error):
                mutate(seqs)
        if error is KeyError:
            for use in (self.table.fork, lambda seq: self.table.slots(seq, 0, 0), self.table.seq_lens):
                with refused(self.table, error):
                    use(wrong)

    @invariant()
    def sequences_have_their_tokens(self):
        self.table.check()
        seqs = list(self.model)
        tables, lengths = self.table.block_tables(seqs), self.table.seq_lens(seqs)
        assert lengths.tolist() == [len(tokens) for tokens in self.model.values()]
        assert (self.table.num_seqs, self.table.num_tokens) == (len(seqs), lengths.sum())
        for blocks, seq in zip(tables, seqs, strict=True):
            tokens = self.model[seq]
            held = self.num_blocks(len(tokens))
            assert (blocks[held:] == -1).all()
            assert self.stored[blocks[:held]].reshape(-1)[: len(tokens)].tolist() == tokens
            assert self.stored.reshape(-1)[self.table.slots(seq, 0, len(tokens))].tolist() == tokens


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=50, stateful_step_count=40)
