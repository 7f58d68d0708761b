"""States of sequences under random calls. A state is all tokens that it stands for, so that no wrong one can hide."""

from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv.errors import CapacityError, OutOfBlocksError
from pagedkv.memory.device.state_arrays import StateArrays
from pagedkv.memory.prefix.digests import blake2b_128

from .groups.tables import Listener
from .manager import fails_after, refused
from .prefix.router import Router
from .prefix.test_machine import HASHES
from .texts import ROOM, P, Texts, advanced, make_cache, snapshot_digests, snapshots

SALTS = st.sampled_from([None, None, None, "a"])
WINDOWS = ((None,), (None,), (5, None), (6,), (3, 9))


class StateMachine(RuleBasedStateMachine):
    hashes = ("blake2b",)

    @initialize(
        windows=st.sampled_from(WINDOWS),
        num_states=st.sampled_from([4, 2, 3, 7, 1, 30]),
        num_blocks=st.sampled_from([60, 20, 12, 200]),
        prefix_cache=st.sampled_from([True] * 7 + [False]),
        data=st.data(),
    )
    def start(self, windows, num_states, num_blocks, prefix_cache, data):
        hash_of = HASHES[data.draw(st.sampled_from(self.hashes))] if prefix_cache else blake2b_128
        self.has_windows, self.told = windows != (None,), Router() if len(windows) == 1 else Listener()
        self.cache = make_cache(
            num_states,
            num_layers=len(windows),
            num_blocks=num_blocks * len(windows),
            max_seqs=6,
            max_seq_len=ROOM,
            windows=windows,
            prefix_cache=prefix_cache,
            hash_of=hash_of,
            events=self.told,
        )
        self.texts, self.salts, self.pins = Texts(self.cache), {}, []

    @property
    def tokens(self):
        return self.texts.tokens

    def pick(self, data, most=3):
        return data.draw(st.permutations([*self.tokens]))[: data.draw(st.integers(1, most))]

    def more(self, data, seq, most=9):
        """Few different tokens, so that many texts begin alike."""
        n = data.draw(st.integers(1, most))
        first = data.draw(st.integers(1, 2))
        return [first + i % 2 for i in range(min(n, ROOM - len(self.tokens[seq])))]

    @rule(data=st.data(), salt=SALTS, in_chunks=st.booleans())
    def begin(self, data, salt, in_chunks):
        """A prompt that begins as some text, or not, and ends with a chunk of it."""
        known = data.draw(st.sampled_from([[], *self.tokens.values()]))
        known = known[: data.draw(st.integers(0, len(known)) | st.just(len(known)))]
        prompt = [*known, *([1, 2] * 10)[: data.draw(st.integers(0, 20))]][:ROOM] or [1]
        found, blocks = self.cache.find(prompt, salt), self.cache.find_blocks(prompt, salt)
        assert found % P == 0
        assert found <= blocks <= len(prompt) - 1
        room = len(self.tokens) + len(self.pins) < self.cache.max_seqs
        if not self.cache.can_add(prompt, salt):
            with refused(self.cache, OutOfBlocksError if room else CapacityError):
                self.cache.add_found(prompt, salt)
            return
        assert room
        seq, num_cached = self.texts.start(prompt, salt)
        self.salts[seq] = salt
        assert num_cached == found
        stops = [found + (len(prompt) - found) // 2 // P * P] if in_chunks else []
        for stop in sorted({*stops, blocks if blocks > found else len(prompt), len(prompt)}):
            self.compute([(seq, prompt[len(self.tokens[seq]) : stop])], lasting=True)

    def compute(self, new, lasting=False):
        """A pass, unless there is no room for its tokens."""
        new = [(seq, tokens) for seq, tokens in new if tokens]
        if not new:
            return
        seqs = [seq for seq, _ in new]
        before = self.cache.seq_lens(seqs).tolist()
        try:
            self.texts.compute(*new, lasting=lasting)
        except OutOfBlocksError:
            assert self.cache.seq_lens(seqs).tolist() == before

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), lasting=st.booleans())
    def go_on(self, data, lasting):
        self.compute([(seq, self.more(data, seq)) for seq in self.pick(data)], lasting)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), n=st.integers(1, 9))
    def decode(self, data, n):
        seqs = self.pick(data, 4)
        for _ in range(n):
            self.compute([(seq, self.more(data, seq, most=1)) for seq in seqs])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data, n):
        seq = self.pick(data, 1)[0]
        if len(self.tokens) + len(self.pins) + n > self.cache.max_seqs:
            with refused(self.cache, CapacityError):
                self.cache.fork(seq, n)
            return
        for _ in range(n):
            other = self.texts.fork(seq)
            self.salts[other] = self.salts[seq]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def reorder(self, data):
        seqs = self.pick(data, 4)
        parents = data.draw(st.lists(st.integers(0, len(seqs) - 1), min_size=len(seqs), max_size=len(seqs)))
        self.cache.reorder(seqs, parents)
        self.tokens.update(zip(seqs, [self.tokens[seqs[parent]] for parent in parents], strict=True))
        self.salts.update(zip(seqs, [self.salts[seqs[parent]] for parent in parents], strict=True))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), anywhere=st.booleans())
    def go_back(self, data, anywhere):
        seq = self.pick(data, 1)[0]
        lens = self.cache.lens_with_state(seq).tolist()
        assert {0, len(self.tokens[seq])} <= {*lens}
        length = data.draw(st.integers(0, len(self.tokens[seq])) if anywhere else st.sampled_from(lens))
        if length not in lens:
            with refused(self.cache, ValueError, "^length must be "):
                self.cache.truncate(seq, length)
            return
        with suppress(*[ValueError] * self.has_windows):  # which have released what comes before
            self.texts.truncate(seq, length)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def take_back(self, data):
        """Tokens that are appended and not computed, some of them taken back one by one."""
        seq = self.pick(data, 1)[0]
        before, new = len(self.tokens[seq]), self.more(data, seq)
        try:
            self.cache.append([seq], len(new), new)
        except OutOfBlocksError:
            return
        if new:
            with refused(self.cache, ValueError, "^seqs must have states that stand for all their tokens"):
                self.cache.commit([seq])
        self.cache.truncate(seq, before + len(new) // 2)
        self.cache.truncate(seq, before)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def write_in_vain(self, data):
        """An interrupt in the middle of a write: states that are lost show, and a snapshot or nothing remains."""
        seqs = self.pick(data, 4)
        new = [self.more(data, seq) for seq in seqs]
        states = self.cache.read_states(seqs)
        try:
            self.cache.append(seqs, [*map(len, new)], [token for tokens in new for token in tokens])
        except OutOfBlocksError:
            return
        after = advanced(states, new)
        with pytest.MonkeyPatch.context() as patch:
            if data.draw(st.booleans()):
                for array in after.values():
                    array[1:] = 77  # the first one has come
            failing = fails_after(0, StateArrays.write, KeyboardInterrupt())

            def write(arrays, index, values, write=StateArrays.write):
                write(arrays, index, after)
                failing()

            patch.setattr(StateArrays, "write", write)
            with pytest.raises(KeyboardInterrupt):
                self.cache.write_states(seqs, after)
        self.cache.check()
        for seq, stands_for in zip(seqs, self.cache.state_lens(seqs).tolist(), strict=True):
            before = self.tokens[seq]
            assert stands_for in (-1, len(before))
            lens = self.cache.lens_with_state(seq)
            length = int(lens[lens <= len(before)][-1])
            assert stands_for < 0 or length == len(before)
            try:
                self.texts.truncate(seq, length)
            except ValueError:
                assert self.has_windows
                self.texts.truncate(seq, 0)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data):
        self.texts.free(*self.pick(data))

    @precondition(lambda self: self.tokens and self.cache.prefix_cache)
    @rule(data=st.data())
    def pin(self, data):
        seq = self.pick(data, 1)[0]
        if len(self.tokens) + len(self.pins) < self.cache.max_seqs:
            name = f"pin {len(self.pins)}"
            with suppress(ValueError):  # no snapshot is there
                self.cache.pin(name, self.tokens[seq], self.salts[seq])
                self.pins.append(name)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        self.cache.unpin(self.pins.pop())

    @precondition(lambda self: self.cache.num_free)
    @rule(data=st.data())
    def evict(self, data):
        """Others take all blocks that are left, or some."""
        n = data.draw(st.integers(1, self.cache.num_free) | st.just(self.cache.num_free))
        self.cache.pool.release(self.cache.pool.allocate(n))

    @rule(many=st.sampled_from([False, False, True]))
    def reset(self, many):
        if many:
            self.cache.reset()
            self.pins = []
            assert snapshots(self.cache) == []

    @precondition(lambda self: self.tokens and self.cache.prefix_cache)
    @rule(data=st.data())
    def finds_its_own_text(self, data):
        """Of a text with a snapshot, a prompt finds as much as truncate goes back to, if its blocks are there."""
        seq = self.pick(data, 1)[0]
        text = self.tokens[seq]
        lens = self.cache.lens_with_state(seq)
        expected = max(n for n in lens.tolist() if n < max(1, len(text)) and n % P == 0)
        if not self.has_windows and self.hashes == ("blake2b",):
            assert self.cache.find([*text, 1], self.salts[seq]) >= expected

    @invariant()
    def is_sound(self):
        if hasattr(self, "texts"):
            self.texts.check()

    @invariant()
    def events_tell_what_can_be_found(self):
        if hasattr(self, "texts") and self.cache.prefix_cache:
            assert self.told.states == snapshot_digests(self.cache)
            for seq in self.tokens if not self.has_windows else ():
                prompt, salt = [*self.tokens[seq], 1], self.salts[seq]
                assert self.told.find(prompt, salt, P) == self.cache.find(prompt, salt)

    def teardown(self):
        if hasattr(self, "texts"):
            self.texts.free(*self.tokens)
            while self.pins:
                self.unpin()
            self.cache.check()
            stats = self.cache.stats()
            assert (stats.used, stats.used_states) == (0, 0)


class CollidingMachine(StateMachine):
    hashes = ("2 bits", "constant")


class LongMachine(StateMachine):
    pass


class LongCollidingMachine(CollidingMachine):
    pass


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=30, stateful_step_count=25)
TestCollidingMachine = CollidingMachine.TestCase
TestCollidingMachine.settings = settings(max_examples=15, stateful_step_count=25)
TestLongMachine = pytest.mark.long(LongMachine.TestCase)
TestLongMachine.settings = settings(max_examples=2_500, stateful_step_count=40)
TestLongCollidingMachine = pytest.mark.long(LongCollidingMachine.TestCase)
TestLongCollidingMachine.settings = settings(max_examples=1_000, stateful_step_count=40)
