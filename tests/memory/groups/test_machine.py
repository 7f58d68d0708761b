"""Caches with windows against a model that stores the tokens themselves.

The number stored as the K of a token stands for its layer, its sequence's salt and all its tokens up to itself, so a
block that is shared by mistake, released too early or read in the wrong group is noticed wherever it is read: 127 times
as much, which an int8 row and its scale hold exactly. The model says which columns each group holds, whether an
`append` has room, and how long a hit may be: never longer than blocks were stored for, and as long as they allow if
none was evicted.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagedkv
from pagedkv.errors import CapacityError, OutOfBlocksError
from pagedkv.memory import LRU
from pagedkv.memory.prefix.digests import blake2b_128

from ...support.sizes import assert_sizes_follow
from ..manager import last_block_first, refused
from .tables import Chosen, Listener, assert_sound, tables

WINDOWS = [
    {"windows": (6, None)},
    {"windows": (None, 3, 6)},
    {"windows": (None, 1)},
    {"windows": (None, 5, None, 5), "group_size": 1},
    {"windows": (7, None, 7, None), "same_as": {2: 0, 3: 1}},
    {"windows": (9, 4)},
    {"windows": (2, 1)},
    {"windows": (5, 5), "group_size": 1},
    {"windows": (6, None, 6, None, None), "num_kv_heads": (2, 1, 2, 1, 1), "head_dim": (8, 16, 8, 16, 16)},
    {"windows": (None, 5, 3, 5), "num_kv_heads": (3, 2, 3, 2), "head_dim": (16, 8, 16, 8)},
    {"windows": (4, None, 4, None), "num_kv_heads": 1, "head_dim": (8, 24, 8, 24), "same_as": {2: 0, 3: 1}},
    {"windows": 6},
    {"windows": 3},
    {"windows": (3, 2)},
    {"windows": None},
]
SALTS = st.sampled_from([None, None, "a"])
POISON = -1.0


def of_two_bits(data):
    """A hash of which many contents have the same."""
    return bytes([blake2b_128(data)[0] & 3]) * 16


@dataclass
class Seq:
    """A sequence, and what is known and held of it.

    `done` tokens have been computed. The first `known` tokens are known by their ids, and the first `found` blocks can
    be found. Each group holds the columns from `first` on.
    """

    salt: object
    tokens: list
    known: int
    done: int
    found: int
    first: list


class GroupMachine(RuleBasedStateMachine):
    @initialize(
        data=st.data(),
        layers=st.sampled_from(WINDOWS),
        keep=st.sampled_from([0, 0, 3, 8]),
        num_blocks=st.integers(8, 60),
        block_size=st.sampled_from([4, 3, 2, 1, 8]),
        max_seqs=st.sampled_from([6, 4, 9]),
        kv_dtype=st.sampled_from([None, None, "int8"]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        hash_of=st.sampled_from([blake2b_128, blake2b_128, of_two_bits]),
        eviction=st.sampled_from([LRU, LRU, Chosen]),
        from_the_end=st.booleans(),
    )
    def start(
        self,
        data,
        layers,
        keep,
        num_blocks,
        block_size,
        max_seqs,
        kv_dtype,
        prefix_cache,
        hash_of,
        eviction,
        from_the_end,
    ):
        windows = layers["windows"] if isinstance(layers["windows"], tuple) else (layers["windows"],) * 2
        self.listener = Listener()
        options = {"keep": keep, "max_seqs": max_seqs, "max_seq_len": 40 + block_size, "prefix_cache": prefix_cache}
        self.cache = pagedkv.PagedKVCache(
            *(len(windows), num_blocks, block_size),
            **{"num_kv_heads": 1, "head_dim": 8, "kv_dtype": kv_dtype} | layers,
            **options,
            events=self.listener,
            hash_of=hash_of,
            eviction=eviction,
        )
        if prefix_cache and eviction is Chosen:
            self.cache.pool._prefix_cache.eviction.first = (*range(0, num_blocks, 3),)
        if from_the_end:
            last_block_first(self.cache.pool)
        self.is_exact = prefix_cache and hash_of is blake2b_128
        self.keep = keep
        same_as = layers.get("same_as", {})
        self.owner_of = [same_as.get(layer, layer) for layer in range(len(windows))]
        self.group_of = [
            next(g for g, group in enumerate(self.cache.groups) if owner in group.layers) for owner in self.owner_of
        ]
        self.windows = [group.window for group in self.cache.groups]
        self.is_led_by_full = None in self.windows
        if not self.is_led_by_full:
            self.leader = self.windows.index(max(self.windows))
            self.windows[self.leader] = max(block_size + 1, self.windows[self.leader])
        self.seqs: dict[int, Seq] = {}
        self.pins, self.names = {}, itertools.count(1)
        self.unknown = itertools.count(-1, -1)
        self.meaning = {}
        # The blocks that were ever stored, by group, salt and the tokens up to their ends, and those that are to be
        # found as long as none is evicted.
        self.stored, self.sure = set(), set()
        for salt in (None, None, "a"):  # so that there is something to find
            self.add_tokens(self.ids(data, data.draw(st.integers(block_size, 20))), salt)
        self.commit_of([*self.seqs])

    # -- the model
    def num_blocks(self, num_tokens):
        return -(-num_tokens // self.cache.block_size)

    def first_of(self, window, done):
        """The first column that a query behind `done` cached tokens sees."""
        return 0 if window is None else max(0, done - window + 1) // self.cache.block_size

    def passed(self, seq, done):
        """The columns that a sequence holds from once `done` of its tokens are computed."""
        boundary = done // self.cache.block_size * self.cache.block_size - self.keep
        return [max(first, self.first_of(w, boundary)) for first, w in zip(seq.first, self.windows, strict=True)]

    def shortest(self, seq):
        size, held = self.cache.block_size, zip(seq.first, self.windows, strict=True)
        return max((first * size + window - 1 for first, window in held if first), default=0)

    def needed(self, num_tokens):
        """The group and column of each full block that a hit of so many tokens needs."""
        for group, window in enumerate(self.windows):
            whole = num_tokens // self.cache.block_size
            yield from ((group, column) for column in range(self.first_of(window, num_tokens), whole))

    def key(self, group, column, salt, tokens):
        return group, salt, tuple(tokens[: (column + 1) * self.cache.block_size])

    def has(self, stored, num_tokens, salt, tokens):
        """Whether these stored blocks make a hit of so many tokens, whose last block may be a part of a stored one."""
        size = self.cache.block_size
        if not all(self.key(*place, salt, tokens) in stored for place in self.needed(num_tokens)):
            return False
        if num_tokens % size == 0:
            return True
        column, begin = num_tokens // size, tuple(tokens[:num_tokens])
        ends = [
            {text for group, its_salt, text in stored if (group, its_salt, text[:num_tokens]) == (g, salt, begin)}
            for g in range(len(self.windows))
        ]
        return any(len(text) == (column + 1) * size for text in set.intersection(*ends))

    def least_hit(self, salt, tokens):
        """How many tokens must be found, if nothing was evicted."""
        size, stored = self.cache.block_size, self.sure
        longest = len(tokens) - 1
        if not self.is_led_by_full:  # a chain from the root
            chain = itertools.takewhile(
                lambda column: self.key(self.leader, column, salt, tokens) in stored, range(len(tokens) // size)
            )
            longest = min(longest, len([*chain]) * size)
        for num_tokens in range(longest // size * size, 0, -size):
            if self.has(stored, num_tokens, salt, tokens):
                return num_tokens
        return 0

    def check_hit(self, num_cached, salt, tokens):
        assert num_cached < max(1, len(tokens))
        assert num_cached == 0 or self.has(self.stored, num_cached, salt, tokens), "more is found than was stored"
        if self.is_exact and not self.listener.any_removed:
            assert num_cached >= self.least_hit(salt, tokens), "less is found than there is"

    # -- tokens and contents
    def ids(self, data, num_tokens):
        """Few different tokens, and few different runs of them."""
        first, step = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
        return [first ^ (step & i) for i in range(num_tokens)]

    def pick(self, data, most=3):
        return data.draw(st.permutations([*self.seqs]))[: data.draw(st.integers(1, most))]

    def contents(self, seq):
        """The number for each token of a sequence."""
        text = (seq.salt,)
        for token in seq.tokens:
            text += (token,)
            yield self.meaning.setdefault(text, len(self.meaning) + 1)

    def write(self, name, start, slots):
        """Write K and V of the tokens from `start` on in all layers."""
        seq, size = self.seqs[name], self.cache.block_size
        of_groups = slots.reshape(len(self.windows), -1)
        assert (of_groups >= 0).all(), "a new token has no slot"
        assert (self.cache.pool.ref_counts[of_groups // size] == 1).all(), "a new token is in a shared block"
        values = np.array([*self.contents(seq)][start:], np.float32)
        for layer in {*self.owner_of}:
            k = np.broadcast_to(values[:, None, None], (len(values), *self.cache.k_caches[layer].shape[2:])) * 8
            self.cache.write(layer, 127 * (k + layer), -127 * (k + layer), slots)

    # -- rules
    @rule(data=st.data(), salt=SALTS, tail=st.integers(0, 9), chunked=st.booleans(), committed=st.booleans())
    def add(self, data, salt, tail, chunked, committed):
        """Tokens that another sequence begins with, or not, and some more."""
        text = data.draw(st.sampled_from([[], *(seq.tokens[: seq.known] for seq in self.seqs.values())]))
        text = text[: data.draw(st.integers(0, len(text)) | st.just(len(text)))] if text else []
        self.add_tokens(text + self.ids(data, tail if text else data.draw(st.integers(0, 20))), salt, chunked)
        if committed:  # with the others, some of which have nothing to be found yet
            self.commit_of([*self.seqs])

    @rule(num_tokens=st.integers(0, 20))
    def add_unknown(self, num_tokens):
        self.add_tokens([next(self.unknown) for _ in range(num_tokens)], None, known=False)

    def add_tokens(self, tokens, salt, chunked=False, *, known=True):
        cache, size = self.cache, self.cache.block_size
        asked = tokens if known else len(tokens)
        room = cache.num_seqs < cache.max_seqs
        too_long = len(tokens) > cache.max_seq_len
        if too_long or not room:
            with refused(cache, ValueError if too_long else CapacityError):
                cache.add(asked, salt)
            return
        expected = cache.find(tokens, salt) if known else 0
        self.check_hit(expected, salt, tokens)
        first = [self.first_of(window, expected) for window in self.windows]
        columns, free = self.num_blocks(len(tokens)), cache.num_free
        fits = cache.can_add(asked, salt)
        # Found blocks that nobody has count as free.
        assert fits or sum(columns - column for column in first) > free
        assert not fits or len(first) * (columns - expected // size) <= free
        if chunked and known:
            if not fits:
                with refused(cache, OutOfBlocksError):
                    cache.add_found(tokens, salt)
                return
            name, found = cache.add_found(tokens, salt)
            self.seqs[name] = Seq(salt, tokens[:found], found, found, found // size, first)
        else:
            if not fits:
                with refused(cache, OutOfBlocksError):
                    cache.add(asked, salt)
                return
            name, found = cache.add(asked, salt)
            self.seqs[name] = Seq(salt, tokens, len(tokens) if known else 0, found, found // size, first)
            self.write(name, found, cache.slots(name, found, len(tokens)))
        assert found == expected

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), known=st.sampled_from([True, True, True, False]), committed=st.booleans())
    def append(self, data, known, committed):
        names = self.pick(data, 4)
        new = {name: self.new_tokens(data, data.draw(st.integers(0, 9)), known) for name in names}
        if self.append_to(new, [*map(len, new.values())], known) and committed:
            self.commit_of(names)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), unknown_from=st.sampled_from([9, 9, 2]), uncommitted=st.sampled_from([9, 9, 0, 2]))
    def decode(self, data, unknown_from, uncommitted):
        """Steps of the same sequences, one token of each."""
        names = self.pick(data, 4)
        for step in range(data.draw(st.integers(2, 9))):
            known = step < unknown_from
            if not self.append_to({name: self.new_tokens(data, 1, known) for name in names}, 1, known):
                return
            if step != uncommitted:
                self.commit_of(names)
            self.sequences_have_their_tokens()

    def new_tokens(self, data, n, known):
        return self.ids(data, n) if known else [next(self.unknown) for _ in range(n)]

    def append_to(self, new, n, known):
        """Whether there was room."""
        cache, names, counts = self.cache, [*new], [*map(len, new.values())]
        tokens = [*itertools.chain(*new.values())] if known else None
        if any(len(self.seqs[name].tokens) + len(new[name]) > cache.max_seq_len for name in names):
            with refused(cache, ValueError, "n must be at most"):
                cache.append(names, n, tokens)
            return False
        passed = {name: self.passed(self.seqs[name], len(self.seqs[name].tokens)) for name in names}
        if self.num_lacking(new, passed) > 0:
            with pytest.raises(OutOfBlocksError):
                cache.append(names, n, tokens)
            for name in names:  # what nobody needs may have been released all the same
                held = tables(cache, [name])[:, 0] >= 0
                before, after = self.seqs[name].first, passed[name]
                first = [int(row.argmax()) if row.any() else last for row, last in zip(held, after, strict=True)]
                assert first in (before, after)
                if first != before:
                    self.seqs[name].first, self.seqs[name].done = first, len(self.seqs[name].tokens)
            return False
        starts = {name: len(self.seqs[name].tokens) for name in names}
        slots = cache.append(names, n, tokens)
        own = iter(np.split(slots, np.cumsum(counts), axis=-1))
        for name in names:
            seq = self.seqs[name]
            seq.known += len(new[name]) if known and seq.known == len(seq.tokens) else 0
            seq.first, seq.done = passed[name], len(seq.tokens)
            seq.tokens = seq.tokens + new[name]
            of_name = next(own)
            assert of_name.tolist() == cache.slots(name, starts[name], len(seq.tokens)).tolist()
            self.write(name, starts[name], of_name)
        slots[...] = -1  # they are the caller's
        return True

    def num_lacking(self, new, passed):
        """How many blocks too few are free for an append that first releases what each sequence has passed."""
        refs, needed = self.cache.pool.ref_counts.copy(), 0
        held = dict(zip(new, tables(self.cache, [*new]).swapaxes(0, 1), strict=True))
        for name in new:
            for group, first in enumerate(passed[name]):
                dropped = held[name][group][self.seqs[name].first[group] : first]
                refs[dropped[dropped >= 0]] -= 1
        for group in range(len(self.windows)):
            writers = Counter()
            for name, tokens in new.items():
                length = len(self.seqs[name].tokens)
                needed += self.num_blocks(length + len(tokens)) - self.num_blocks(length)
                if tokens and length % self.cache.block_size:
                    writers[int(held[name][group][length // self.cache.block_size])] += 1
            needed += sum(n - (n == refs[block]) for block, n in writers.items())
        return needed - np.count_nonzero(refs == 0)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def commit(self, data):
        self.commit_of(self.pick(data, 9))

    def commit_of(self, names):
        self.cache.commit(names)
        for name in names:
            seq = self.seqs[name]
            if self.cache.prefix_cache:
                self.store(seq)
            seq.done = len(seq.tokens)
            seq.first = self.passed(seq, seq.done)

    def store(self, seq):
        """Remember the full blocks that a sequence holds."""
        full = seq.known // self.cache.block_size
        held = [range(first, full) for first in seq.first]
        keys = {self.key(g, column, seq.salt, seq.tokens) for g, columns in enumerate(held) for column in columns}
        self.stored |= keys
        if not self.is_led_by_full and full > seq.found and seq.first[self.leader] >= max(1, seq.found):
            full = seq.found  # the block above the first one to store was passed
            seq.known = full * self.cache.block_size
        self.sure |= {key for key in keys if len(key[2]) <= full * self.cache.block_size}
        seq.found = full

    @precondition(lambda self: self.seqs and self.cache.num_seqs < self.cache.max_seqs)
    @rule(data=st.data(), n=st.integers(1, 2))
    def fork(self, data, n):
        name = data.draw(st.sampled_from([*self.seqs]))
        n = min(n, self.cache.max_seqs - self.cache.num_seqs)
        self.seqs |= {fork: replace(self.seqs[name]) for fork in self.cache.fork(name, n)}

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def reorder(self, data):
        names = self.pick(data, 9)
        parents = data.draw(st.lists(st.integers(0, len(names) - 1), min_size=len(names), max_size=len(names)))
        self.cache.reorder(names, parents)
        self.seqs |= {name: replace(self.seqs[names[i]]) for name, i in zip(names, parents, strict=True)}

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def truncate(self, data):
        """To anything, or to what is left of the last tokens."""
        names = self.pick(data)
        lengths = {}
        for name in names:
            seq = self.seqs[name]
            most, least = len(seq.tokens), min(self.shortest(seq), len(seq.tokens))
            lengths[name] = data.draw(st.integers(0, most) | st.integers(least, most) | st.just(least))
        wrong = [name for name in names if 0 < lengths[name] < self.shortest(self.seqs[name])]
        if wrong:
            with refused(self.cache, ValueError, "must be 0 or at least"):
                self.cache.truncate(names, [*lengths.values()])
            return
        self.cache.truncate(names, [*lengths.values()])
        for name, length in lengths.items():
            self.shorten(self.seqs[name], length)

    def shorten(self, seq, length):
        seq.tokens = seq.tokens[:length]
        seq.known, seq.done = min(seq.known, length), min(seq.done, length)
        seq.found = min(seq.found, length // self.cache.block_size)
        if not length:
            seq.first = [0] * len(self.windows)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def free(self, data):
        names = self.pick(data)
        self.cache.free(names)
        for name in names:
            del self.seqs[name]

    @precondition(lambda self: self.seqs and self.cache.num_seqs < self.cache.max_seqs and self.cache.prefix_cache)
    @rule(data=st.data())
    def pin(self, data):
        """A pin keeps what it found until `unpin`."""
        seq, name = self.seqs[data.draw(st.sampled_from([*self.seqs]))], f"pin {next(self.names)}"
        tokens, size = seq.tokens[: seq.known], self.cache.block_size
        whole = range(size, len(tokens) + 1, size)  # no block has a 2, so no part of one is found behind these
        expected = max((n for n in whole if self.cache.find([*tokens[:n], 2], seq.salt) == n), default=0)
        if not expected:
            with refused(self.cache, ValueError, "must begin with a full block"):
                self.cache.pin(name, tokens, seq.salt)
            return
        length = self.cache.pin(name, tokens, seq.salt)
        assert length == expected
        self.pins[name] = tokens[:length], seq.salt

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        name = next(iter(self.pins))
        self.cache.unpin(name)
        del self.pins[name]

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def reset(self, really):
        if really:
            self.cache.reset()
            self.pins.clear()
            self.stored.clear()
            self.sure.clear()
            for seq in self.seqs.values():
                seq.known = seq.found = 0

    @rule(data=st.data(), order=st.randoms(use_true_random=False))
    def pressure(self, data, order):
        """Hand out free blocks, whose contents are lost, and take them back in another order: groups trade them."""
        blocks = self.cache.pool.allocate(data.draw(st.integers(0, self.cache.num_free)))
        for layer in {*self.owner_of}:
            for cache in self.cache._layer_caches.layers[layer]:
                cache[blocks] = POISON
        order.shuffle(blocks)
        self.cache.pool.release(blocks)

    # -- what must hold
    @invariant()
    def agrees(self):
        cache = self.cache
        if self.pins:
            cache.check()
        else:
            assert_sound(cache, [*self.seqs])
        assert (cache.num_seqs, cache.num_tokens - sum(len(tokens) for tokens, _ in self.pins.values())) == (
            len(self.seqs) + len(self.pins),
            sum(len(seq.tokens) for seq in self.seqs.values()),
        )
        stats = cache.stats()
        assert stats.wasted_slots == stats.used * cache.block_size - cache.block_fills().sum()
        for tokens, salt in self.pins.values():
            assert cache.find([*tokens, 0], salt) >= len(tokens)
        self.listener.agrees_with(cache)
        assert_sizes_follow(cache, len(self.seqs) + cache.pool.num_blocks)

    @invariant()
    def sequences_have_their_tokens(self):
        """Each group holds just the columns of the model, with the contents of each layer."""
        cache, size, names = self.cache, self.cache.block_size, [*self.seqs]
        of_groups, batch = tables(cache, names), cache.batch(names)
        assert batch.seq_lens.tolist() == [len(seq.tokens) for seq in self.seqs.values()]
        for i, seq in enumerate(self.seqs.values()):
            length, numbers = len(seq.tokens), np.array([*self.contents(seq)], np.float32)
            slots = cache.slots(names[i], 0, length).reshape(len(self.windows), -1)
            for group, first in enumerate(seq.first):
                held = np.arange(of_groups.shape[2])
                held = (held >= first) & (held < self.num_blocks(length))
                assert ((of_groups[group, i] >= 0) == held).all(), f"group {group} holds other columns than {first}.."
                assert first * size <= max(0, seq.done - (self.windows[group] or seq.done + 1) + 1)
                columns, offsets = np.divmod(np.arange(length), size)
                expected = of_groups[group, i][columns] * np.int64(size) + offsets
                assert slots[group].tolist() == np.where(columns < first, -1, expected).tolist()
            for layer, (owner, group) in enumerate(zip(self.owner_of, self.group_of, strict=True)):
                start, held = seq.first[group] * size, 127 * (numbers[seq.first[group] * size :] * 8 + owner)
                arrays = cache._layer_caches.layers[layer]
                for (caches, *scales), expected in ((arrays[::2], held), (arrays[1::2], -held)):
                    at = np.divmod(slots[group, start:], size)
                    rows = caches[at] * scales[0][at][..., None] if scales else caches[at]
                    assert (rows == expected[:, None, None]).all()


class LongGroupMachine(GroupMachine):
    pass


TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = settings(max_examples=30, stateful_step_count=25)
# A hundred thousand operations.
TestLongGroupMachine = pytest.mark.long(LongGroupMachine.TestCase)
TestLongGroupMachine.settings = settings(max_examples=2_500, stateful_step_count=40)
