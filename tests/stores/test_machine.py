"""Two caches, whose blocks and windows may differ, over a store that may fail: what is found was written.

The K and V of a token are digests of all tokens up to it, so that a block which is anybody else's is seen.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv.errors import CapacityError
from pagedkv.stores import HostStore, SavedSequences, SwapSpace

from .caches import W, evict
from .test_prefixes import FAULTS, damage, make_store, prefixes_of
from .test_windows import assert_found_is_written, assert_seen, computed, windowed, write

NAMES, SALTS = ("a", "b"), (None, "a tenant")


class UnreliableStore:
    """Keeps blocks, and does something else at times, until it is told to be reliable."""

    def __init__(self, seed, is_reliable):
        # With room for all that a history stores, so that nothing is missing because it was evicted.
        self.is_reliable, self.store = is_reliable, HostStore(2**25, make_store().block_bytes)
        # Calls of several threads may come in any order: each method draws for itself.
        self.draws = {name: random.Random(f"{name} {seed}") for name in ("get", "has", "put", "remove")}

    def fails(self, method, share=0.2):
        return self.draws[method].random() < share and not self.is_reliable

    def get(self, keys):
        found = self.store.get(keys)
        if not self.fails("get"):
            return found
        fault, _ = self.draws["get"].choice([*FAULTS.values()])
        return fault(keys, found)

    def has(self, keys):
        there = self.store.has(keys)
        if not self.fails("has"):
            return there
        return self.draws["has"].choice([[], None, [False] * len(keys), [True] * len(keys), [*there, True]])

    def put(self, keys, blocks):
        """Lose some blocks, damage some for good, raise although all is there."""
        kept, damages = [], [damage, lambda block: block[:-8], lambda block: bytes(8)]
        is_lossy = self.fails("put")
        for key, block in zip(keys, map(bytes, blocks), strict=True):
            if self.fails("put", 0.05):
                block = self.draws["put"].choice(damages)(block)
            if not (is_lossy and self.fails("put")):
                kept.append((key, block))
        self.store.put([key for key, _ in kept], [block for _, block in kept])
        if self.fails("put", 0.1):
            raise ConnectionError("after all was written")

    def remove(self, keys):
        if self.fails("remove"):
            raise TimeoutError("nothing is removed")
        self.store.remove(keys)


class StoresMachine(RuleBasedStateMachine):
    @initialize(
        data=st.data(),
        seed=st.integers(0, 2**32),
        is_reliable=st.sampled_from([True, False, False]),
        windows=st.none() | st.permutations([None, 3, 2 * W + 1]) | st.permutations([None, None, W]),
        vocabulary=st.integers(1, 3),
        block_tokens=st.sampled_from([W, 3, 5]),
        kv_dtype=st.sampled_from([None, None, "int8"]),
    )
    def start(self, data, seed, is_reliable, windows, vocabulary, block_tokens, kv_dtype):
        self.windows, self.vocabulary, self.block_tokens = windows, vocabulary, block_tokens
        self.store = UnreliableStore(seed, is_reliable)
        self.was_reliable = is_reliable
        self.caches, self.prefixes, self.spaces = [], [], []
        for _ in range(2):
            of_cache = {"block_size": data.draw(st.sampled_from([4, 1, 3, W, 2 * W])), "kv_dtype": kv_dtype}
            if windows is not None:
                of_cache["keep"] = data.draw(st.sampled_from([0, W]))
            cache = windowed(2**10 // of_cache["block_size"], windows=windows, **of_cache)
            self.caches.append(cache)
            self.prefixes.append(self.prefixes_of(cache))
            self.spaces.append(None if windows else SwapSpace(cache, self.store, block_tokens=block_tokens, timeout=60))
        self.alive = [{}, {}]  # by its handle, the tokens and the salt of a sequence
        self.out = [{}, {}]  # the same of those in a store
        self.texts = set()  # all that was computed, with the salts
        self.saved = {}  # by its name and salt, all tokens that may be there, and whether they must
        for _ in range(3):
            self.compute(data, data.draw(st.integers(1, 3 * W)), is_loaded=False, is_stored=True)
            self.settle()

    def prefixes_of(self, cache):
        return prefixes_of(cache, self.store, block_tokens=self.block_tokens, timeout=60)

    def draw_text(self, data):
        """Tokens that begin as others did, or as few different ones do."""
        tokens, salt = data.draw(st.sampled_from([((), None), *sorted(self.texts, key=repr)]))
        if not tokens:
            salt = data.draw(st.sampled_from(SALTS))
        tokens = tokens[: data.draw(st.integers(0, min(7 * W, len(tokens))))]
        return (*tokens, *self.draw_tokens(data, data.draw(st.integers(1, 8 * W - len(tokens))))), salt

    def draw_tokens(self, data, count):
        factor = data.draw(st.integers(0, 2))
        return [factor * i % self.vocabulary + 1 for i in range(count)]

    def draw_seq(self, data, held):
        """One of the caches, by its place, and one of the sequences of it that are alive, or out."""
        i = data.draw(st.sampled_from([i for i, seqs in enumerate(held) if seqs]))
        return i, data.draw(st.sampled_from(sorted(held[i])))

    @precondition(lambda self: any(len(alive) < 3 for alive in self.alive))
    @rule(data=st.data(), chunk=st.integers(1, 3 * W), is_loaded=st.booleans(), is_stored=st.booleans())
    def compute(self, data, chunk, is_loaded, is_stored):
        i = data.draw(st.sampled_from([i for i, alive in enumerate(self.alive) if len(alive) < 3]))
        tokens, salt = self.draw_text(data)
        cache, prefixes = self.caches[i], self.prefixes[i]
        if is_loaded:
            self.load(i, tokens, salt)
        if not cache.can_add(tokens, salt):
            return
        self.alive[i][computed(cache, tokens, salt, chunk)] = tokens, salt
        self.texts.add((tokens, salt))
        if is_stored:
            assert prefixes.store(tokens, salt) <= len(tokens)

    def load(self, i, tokens, salt):
        found = self.prefixes[i].load([*tokens, 1], salt)
        assert found == self.caches[i].find([*tokens, 1], salt)
        return found

    @precondition(lambda self: any(self.alive))
    @rule(data=st.data(), count=st.integers(1, 2 * W))
    def append(self, data, count):
        i, seq = self.draw_seq(data, self.alive)
        cache = self.caches[i]
        tokens, salt = self.alive[i][seq]
        count = min(count, 10 * W - len(tokens))
        more = self.draw_tokens(data, count)
        slots = cache.append(seq, count, tokens=more)
        self.alive[i][seq] = tokens, salt = (*tokens, *more), salt
        write(cache, tokens, salt, slots)
        cache.commit(seq)
        self.texts.add((tokens, salt))

    @precondition(lambda self: any(self.alive))
    @rule(data=st.data())
    def free(self, data):
        i, seq = self.draw_seq(data, self.alive)
        self.caches[i].free(seq)
        del self.alive[i][seq]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), i=st.integers(0, 1), loads=st.booleans())
    def share(self, data, i, loads):
        """Store a text in one cache, and load it into the other one."""
        tokens, salt = data.draw(st.sampled_from(sorted(self.texts, key=repr)))
        num_given = self.prefixes[i].store(tokens, salt)
        if not loads:
            return
        assert self.prefixes[i].flush()
        other = self.caches[1 - i]
        has_room = other.can_add(tokens, salt, chunk=self.prefixes[1 - i].chunk)
        found = self.load(1 - i, tokens, salt)
        if self.was_reliable and self.windows is None and has_room:
            assert found >= num_given // other.block_size * other.block_size

    @precondition(lambda self: any(self.alive))
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def save(self, data, name):
        i, seq = self.draw_seq(data, self.alive)
        tokens, salt = self.alive[i][seq]
        is_saved = SavedSequences(self.prefixes[i]).save(seq, name)
        before, _ = self.saved.get((name, salt), (set(), False))
        self.saved[name, salt] = ({tokens} if is_saved and self.was_reliable else before | {tokens}), is_saved
        assert is_saved or not self.was_reliable

    @precondition(lambda self: self.saved)
    @rule(name=st.sampled_from(NAMES), salt=st.sampled_from(SALTS), i=st.integers(0, 1))
    def restore(self, name, salt, i):
        may_be, must_be = self.saved.get((name, salt), (set(), False))
        try:
            seq, num_tokens, tokens = SavedSequences(self.prefixes[i]).restore(name, salt)
        except KeyError:
            assert not (self.was_reliable and must_be)
            return
        except CapacityError:
            return
        tokens = tuple(tokens.tolist())
        assert tokens in may_be
        if self.was_reliable and self.windows is None:
            assert num_tokens == len(tokens)
        assert_seen(self.caches[i], seq, tokens[:num_tokens], salt)
        self.goes_on(i, seq, tokens[:num_tokens], salt)

    def goes_on(self, i, seq, tokens, salt):
        """Keep a sequence that has come back, unless nothing has."""
        if tokens and len(self.alive[i]) < 3:
            self.alive[i][seq] = tokens, salt
        else:
            self.caches[i].free(seq)

    @precondition(lambda self: self.windows is None and any(self.alive))
    @rule(data=st.data())
    def swap_out(self, data):
        i, seq = self.draw_seq(data, self.alive)
        if self.spaces[i].swap_out(seq):
            self.out[i][seq] = self.alive[i].pop(seq)
        else:
            assert not self.was_reliable

    @precondition(lambda self: any(self.out))
    @rule(data=st.data())
    def swap_in(self, data):
        i, seq = self.draw_seq(data, self.out)
        cache = self.caches[i]
        tokens, salt = self.out[i][seq]
        if -(-len(tokens) // cache.block_size) > cache.num_free:
            return
        [num_tokens] = self.spaces[i].swap_in(seq)
        del self.out[i][seq]
        assert num_tokens == len(tokens) or not self.was_reliable
        self.goes_on(i, seq, tokens[:num_tokens], salt)

    @rule(i=st.integers(0, 1), what=st.sampled_from(["evict", "reset", "open again"]))
    def forget(self, i, what):
        """A pool evicts all that it may, or a process starts anew beside the same cache."""
        if what == "evict":
            evict(self.caches[i])
        elif what == "reset" and not (self.alive[i] or self.out[i]):  # whose ids it would forget
            self.caches[i].reset()
        else:
            self.prefixes[i].close()
            self.prefixes[i] = self.prefixes_of(self.caches[i])

    @precondition(lambda self: not self.was_reliable)
    @rule(share=st.integers(1, 5))
    def lose(self, share):
        self.store.store.remove([*self.store.store._slots._used][::share])

    def settle(self):
        """Wait for all threads, so that a history goes the same way whenever Hypothesis tries it again."""
        for owner in (*(prefixes.patient for prefixes in self.prefixes), *(x._patient for x in self.spaces if x)):
            owner._gets.call(lambda: None).result(10)
            assert owner.flush()

    @invariant()
    def what_is_found_was_written(self):
        self.settle()
        for cache, alive in zip(self.caches, self.alive, strict=True):
            for tokens, salt in self.texts:
                assert_found_is_written(cache, tokens, salt)
            for seq, (tokens, salt) in alive.items():
                assert cache.seq_lens(seq) == len(tokens)
                assert_seen(cache, seq, tokens, salt)

    def teardown(self):
        if not hasattr(self, "caches"):
            return
        for cache, alive, out in zip(self.caches, self.alive, self.out, strict=True):
            for seq in (*alive, *out):
                cache.free(seq)
            assert cache.stats().used == 0
        self.heals()
        for closed in (*self.prefixes, *filter(None, self.spaces)):
            closed.close()

    def heals(self):
        """Once the store does what it should, what it has lost or damaged comes back, a text at a time."""
        self.settle()
        self.store.is_reliable = True
        cache, prefixes = self.caches[0], self.prefixes[0]
        for tokens, salt in sorted(self.texts, key=repr)[:3]:
            for _ in range(2):
                cache.reset()
                self.load(0, tokens, salt)
                cache.free(computed(cache, tokens, salt))
                num_given = prefixes.store(tokens, salt)
                assert prefixes.flush()
            cache.reset()
            if self.windows is None:
                full = len(tokens) // cache.block_size * cache.block_size
                assert num_given == full // self.block_tokens * self.block_tokens
                assert self.load(0, tokens, salt) >= num_given // cache.block_size * cache.block_size
            assert_found_is_written(cache, tokens, salt)


class LongStoresMachine(StoresMachine):
    pass


TestStoresMachine = StoresMachine.TestCase
TestStoresMachine.settings = settings(max_examples=10, stateful_step_count=12)
TestLongStoresMachine = pytest.mark.long(LongStoresMachine.TestCase)
TestLongStoresMachine.settings = settings(max_examples=1_000, stateful_step_count=40)
