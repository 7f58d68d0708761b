"""PagedKVCache with its prefix cache against a twin in plain Python, and the K and V that it hands out.

The number stored as the K of a token stands for its sequence's salt and all its tokens up to itself, so a block that is
shared by mistake is noticed wherever it is read: 127 times as much, which an int8 row and its scale hold exactly. With
hashes that collide the twin's do, too.
"""

import itertools
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagedkv
from pagedkv.calls import CACHES
from pagedkv.errors import CapacityError, OutOfBlocksError
from pagedkv.memory.prefix.digests import blake2b_128

from ...support.sizes import assert_sizes_follow
from ..manager import last_block_first, refused
from .router import Router
from .twin import Twin

SALTS = st.sampled_from([None, None, "a", b"b"])
HASHES = {
    "blake2b": blake2b_128,
    "2 bits": lambda data: bytes([blake2b(data).digest()[0] & 3]) * 16,
    "low half": lambda data: bytes(8) + blake2b(data, digest_size=8).digest(),
    "constant": lambda data: bytes(16),
}


class PrefixMachine(RuleBasedStateMachine):
    hashes = ("blake2b", "low half")
    salts = (None, "a", b"b")

    @initialize(
        data=st.data(),
        num_blocks=st.integers(3, 24),
        block_size=st.sampled_from([4, 3, 2, 1, 8]),
        max_seqs=st.sampled_from([6, 4, 9]),
        kv_dtype=st.sampled_from([None, None, "int8"]),
        from_the_end=st.booleans(),
    )
    def start(self, data, num_blocks, block_size, max_seqs, kv_dtype, from_the_end):
        hash_of = HASHES[data.draw(st.sampled_from(self.hashes))]
        self.router = Router()
        self.cache = pagedkv.PagedKVCache(
            *(2, num_blocks, block_size, 1, 8),
            **{"max_seqs": max_seqs, "hash_of": hash_of, "events": self.router, "kv_dtype": kv_dtype},
        )
        if from_the_end:
            last_block_first(self.cache.pool)
        self.twin = Twin(num_blocks, block_size, hash_of)
        self.numbers, self.meaning = itertools.count(1), {}
        self.pins = []
        for salt in (None, None, "a"):  # so that there is something to find
            self.add_tokens(self.ids(data, data.draw(st.integers(block_size, 4 * block_size))), salt, known=True)
        self.commit_of(self.names)

    @property
    def names(self):
        return [name for name in self.twin.seqs if not isinstance(name, str)]

    def pick(self, data, most=3):
        return data.draw(st.permutations(self.names))[: data.draw(st.integers(1, most))]

    def ids(self, data, num_tokens):
        """Few different tokens, and few different runs of them."""
        first, step = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
        return [first ^ (step & i) for i in range(num_tokens)]

    def contents(self, seq):
        """The number for each token of a sequence."""
        tokens = [seq.salt]
        for token in seq.tokens:
            tokens.append(token)
            yield self.meaning.setdefault(tuple(tokens), len(self.meaning) + 1)

    def write(self, name, start):
        slots = self.cache.slots(name, start, len(self.twin.seqs[name].tokens))
        assert (self.cache.pool.ref_counts[slots // self.cache.block_size] == 1).all()
        values = np.array([*self.contents(self.twin.seqs[name])][start:], np.float32)
        k = np.broadcast_to(values[:, None, None], (len(values), 1, 8)).copy()
        for layer in range(2):
            self.cache.write(layer, 127 * (k + layer), -127 * k, slots)

    @rule(data=st.data(), salt=SALTS, known=st.sampled_from([True, True, True, False]), tail=st.integers(0, 9))
    def add(self, data, salt, known, tail):
        """Tokens that another sequence begins with, or not, and some more."""
        texts = [seq.tokens[: seq.known] for seq in self.twin.seqs.values()]
        tokens = data.draw(st.sampled_from([[], *texts])) if known else []
        tokens = tokens[: data.draw(st.integers(0, len(tokens)) | st.just(len(tokens)))] if tokens else []
        tokens = tokens + self.ids(data, tail if tokens else data.draw(st.integers(0, 20)))
        if not known:
            tokens = [-next(self.numbers) for _ in tokens]  # nothing else is equal to these
        self.add_tokens(tokens, salt, known)

    def add_tokens(self, tokens, salt, known):
        asked = tokens if known else len(tokens)
        room = len(self.twin.seqs) < self.cache.max_seqs
        fits = room and self.cache.can_add(asked, salt)
        too_long = len(tokens) > self.cache.max_seq_len
        if too_long or not room:
            with refused(self.cache, ValueError if too_long else CapacityError):
                self.cache.add(asked, salt)
            return
        expected = self.cache.find(tokens, salt) if known else 0
        try:
            num_cached = self.twin.add("new", tokens, salt, known=known)
        except OutOfBlocksError:
            assert not fits
            with refused(self.cache, OutOfBlocksError):
                self.cache.add(asked, salt)
            return
        assert fits
        name, found = self.cache.add(asked, salt)
        assert found == num_cached == expected
        self.twin.seqs[name] = self.twin.seqs.pop("new")
        self.write(name, num_cached)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), known=st.sampled_from([True, True, True, False]), committed=st.booleans())
    def append(self, data, known, committed):
        names = self.pick(data, 4)
        new = {name: self.ids(data, data.draw(st.integers(0, 9))) if known else [-next(self.numbers)] for name in names}
        if self.append_to(new, [*map(len, new.values())], known) and committed:
            self.commit_of(names)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), unknown_from=st.sampled_from([9, 9, 2]), uncommitted=st.sampled_from([9, 9, 0, 2]))
    def decode(self, data, unknown_from, uncommitted):
        """Steps of the same sequences, one token of each."""
        names = self.pick(data, 4)
        for step in range(data.draw(st.integers(2, 7))):
            known = step < unknown_from
            new = {name: self.ids(data, 1) if known else [-next(self.numbers)] for name in names}
            if not self.append_to(new, 1, known):
                return
            tables = self.cache.batch(names).block_tables
            assert tables.tolist() == self.cache.block_tables(names[::-1])[::-1].tolist()
            tables[...] = -1
            if step != uncommitted:
                self.commit_of(names)
            self.cache.check()

    def append_to(self, new, n, known):
        """Whether there was room."""
        names, tokens = [*new], [*itertools.chain(*new.values())] if known else None
        if any(len(self.twin.seqs[name].tokens + new[name]) > self.cache.max_seq_len for name in names):
            return False
        starts = [len(self.twin.seqs[name].tokens) for name in names]
        try:
            self.twin.append(new, known=known)
        except OutOfBlocksError:
            with refused(self.cache, OutOfBlocksError):
                self.cache.append(names, n, tokens)
            return False
        self.cache.append(names, n, tokens)[...] = -1  # they are the caller's
        for name, start in zip(names, starts, strict=True):
            self.write(name, start)
        return True

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def commit(self, data):
        self.commit_of(self.pick(data, 9))

    def commit_of(self, names):
        self.cache.commit(names)
        self.twin.commit(names)

    @precondition(lambda self: len(self.names) > 0 and len(self.twin.seqs) < self.cache.max_seqs)
    @rule(data=st.data(), n=st.integers(1, 2))
    def fork(self, data, n):
        name = data.draw(st.sampled_from(self.names))
        n = min(n, self.cache.max_seqs - len(self.twin.seqs))
        self.twin.fork(name, self.cache.fork(name, n))

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def reorder(self, data):
        names = self.pick(data, 9)
        parents = data.draw(st.lists(st.integers(0, len(names) - 1), min_size=len(names), max_size=len(names)))
        self.cache.reorder(names, parents)
        self.twin.reorder(names, parents)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def truncate(self, data):
        lengths = {name: data.draw(st.integers(0, len(self.twin.seqs[name].tokens))) for name in self.pick(data)}
        self.cache.truncate([*lengths], [*lengths.values()])
        self.twin.truncate(lengths)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def free(self, data):
        names = self.pick(data)
        self.cache.free(names)
        self.twin.free(names)

    @precondition(lambda self: self.names and len(self.twin.seqs) < self.cache.max_seqs)
    @rule(data=st.data())
    def pin(self, data):
        seq = self.twin.seqs[data.draw(st.sampled_from(self.names))]
        name = f"pin {next(self.numbers)}"
        tokens = seq.tokens[: seq.known]
        if not self.twin.look_up(tokens, seq.salt):
            with refused(self.cache, ValueError, "must begin with a full block"):
                self.cache.pin(name, tokens, seq.salt)
            return
        assert self.cache.pin(name, tokens, seq.salt) == self.twin.hold(name, tokens, seq.salt)
        self.pins.append(name)
        with refused(self.cache, ValueError, "which is pinned"):
            self.cache.pin(name, [])

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        name = self.pins.pop(0)
        self.cache.unpin(name)
        self.twin.free([name])
        with refused(self.cache, KeyError, "no pin is called"):
            self.cache.unpin(name)

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def reset(self, really):
        if really:
            self.cache.reset()
            self.twin.reset(self.pins)
            self.pins = []

    @invariant()
    def agrees(self):
        cache, twin = self.cache, self.twin
        cache.check()
        stats = cache.stats()
        assert (stats.free, stats.cached) == (twin.num_free, len(twin.waiting))
        assert stats.shared == sum(n > 1 for n in twin.refs().values())
        assert stats.wasted_slots == stats.used * cache.block_size - cache.block_fills().sum()
        assert (stats.queried_tokens, stats.hit_tokens) == (twin.queried, twin.hit)
        assert set(self.router.blocks) == set(twin.index)
        self.router.agrees_with(cache, self.salts)
        assert_sizes_follow(cache, len(twin.seqs) + cache.pool.num_blocks)

    @invariant()
    def sequences_have_their_tokens(self):
        names = self.names
        batch = self.cache.batch(names)
        assert batch.seq_lens.tolist() == [len(self.twin.seqs[name].tokens) for name in names]
        for name, table, length in zip(names, batch.block_tables, batch.seq_lens.tolist(), strict=True):
            expected = [*self.contents(self.twin.seqs[name])]
            for layer in range(2):
                caches, stored = self.cache._layer(layer)
                k, v = pagedkv.gather_kv(
                    **dict(zip(CACHES, caches, strict=False)), block_table=table, seq_len=length, **stored
                )
                assert k[:, 0, 0].tolist() == [127 * (number + layer) for number in expected]
                assert v[:, 0, 7].tolist() == [-127 * number for number in expected]


class CollidingMachine(PrefixMachine):
    hashes = ("2 bits", "constant")
    salts = ()  # the names of blocks do not tell them apart


class LongMachine(PrefixMachine):
    pass


class LongCollidingMachine(CollidingMachine):
    pass


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=30)
TestCollidingMachine = CollidingMachine.TestCase
TestCollidingMachine.settings = settings(max_examples=40, stateful_step_count=30)
# A million operations.
TestLongMachine = pytest.mark.long(LongMachine.TestCase)
TestLongMachine.settings = settings(max_examples=12_500, stateful_step_count=40)
TestLongCollidingMachine = pytest.mark.long(LongCollidingMachine.TestCase)
TestLongCollidingMachine.settings = settings(max_examples=12_500, stateful_step_count=40)
