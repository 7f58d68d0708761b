"""Scheduler against a twin in plain Python, and each request against its text alone."""

import random
from itertools import accumulate, count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagedkv
from pagedkv.errors import OutOfBlocksError

from ..memory.groups.tables import Listener
from ..memory.manager import last_block_first
from ..memory.prefix.router import Router
from ..stores.test_prefixes import FAULTS
from ..support.sizes import assert_sizes_follow
from .toy import alone, forward, make_cache, swap_of
from .twin import Twin

EOS = 7
# The windows of all layers of a model, and how many tokens stay behind them.
WINDOWS = (((6, None), 0), ((3, None, 9), 0), ((5,), 0), ((None, 1, 4), 3), ((6, 2), 1), ((3,), 0), ((3, 2), 1))


class PlainMachine(RuleBasedStateMachine):
    """Without the prefix cache the twin says what each step is."""

    prefix_cache = False
    swap, swaps, most_new = None, False, 14
    windows = (((None,), 0),)

    def make_swap(self, cache, data):
        return {}

    @initialize(
        data=st.data(),
        num_blocks=st.integers(9, 40),
        block_size=st.sampled_from([4, 3, 2, 1]),
        budget=st.sampled_from([8, 12, 20, 5, 8, 2]),
        max_num_seqs=st.sampled_from([4, 6, 3, 5, 1]),
        watermark=st.sampled_from([0, 0.1]),
        aging=st.sampled_from([2, 0, 10]),
        from_the_end=st.booleans(),
    )
    def start(self, data, num_blocks, block_size, budget, max_num_seqs, watermark, aging, from_the_end):
        max_num_seqs = min(budget, max_num_seqs)
        self.layers, keep = data.draw(st.sampled_from(self.windows))
        self.told = Router() if self.layers == (None,) else Listener()
        self.cache = make_cache(
            num_blocks,
            block_size,
            self.layers,
            keep=keep,
            max_seqs=8,
            prefix_cache=self.prefix_cache,
            events=self.told if self.prefix_cache else None,
        )
        if from_the_end:
            last_block_first(self.cache.pool)
        self.scheduler = pagedkv.Scheduler(
            self.cache,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            watermark=watermark,
            aging=aging,
            eos_token_id=EOS,
            **self.make_swap(self.cache, data),
        )
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.num_groups, windows = len(self.cache.groups), [group.window for group in self.cache.groups]
        watermark = int(np.ceil(watermark * num_blocks))
        self.twin = Twin(num_blocks, block_size, budget, max_num_seqs, watermark, aging, windows, keep, self.swaps)
        self.most = max(n for n in range(200) if sum(self.twin.peaks(n, budget)) <= num_blocks)
        self.texts, self.turns = {}, {}  # all tokens; the prompt of this turn and how many to generate
        self.idle, self.others = set(), []
        self.step = None
        for _ in range(5):
            self.add(data, data.draw(st.integers(-1, 2)), data.draw(st.booleans()), None)

    # -- what users do
    def prompt(self, data, most):
        """Few different runs, so that many begin alike."""
        first, n = data.draw(st.integers(0, 1)), data.draw(st.integers(1, most))
        return [(first * i) % 3 + 1 for i in range(n)]

    @rule(data=st.data(), priority=st.integers(-1, 2), resumable=st.booleans(), salt=st.sampled_from([None, None, "a"]))
    def add(self, data, priority, resumable, salt):
        most = min(data.draw(st.sampled_from([8, 24])), self.most)
        tokens, num_new = self.prompt(data, most), data.draw(st.integers(1, self.most_new))
        if len(tokens) + num_new - 1 > self.most:
            with pytest.raises(ValueError, match=f"a request can have {self.most} tokens in this cache"):
                self.scheduler.add(tokens, num_new)
            return
        number = self.scheduler.add(tokens, num_new, priority=priority, resumable=resumable, salt=salt)
        assert number == self.twin.add(tokens, num_new, priority)
        self.texts[number], self.turns[number] = tokens, (tokens, num_new, resumable)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def extend(self, data):
        number = data.draw(st.sampled_from(sorted(self.idle)))
        more, num_new = self.prompt(data, 6), data.draw(st.integers(1, self.most_new))
        if len(self.texts[number]) + len(more) + num_new - 1 > self.most:
            with pytest.raises(ValueError, match="lower max_tokens, shorten the prompt"):
                self.scheduler.extend(number, more, num_new)
            return
        self.scheduler.extend(number, more, num_new)
        if not self.prefix_cache:
            self.twin.extend(number, more, num_new)
        self.idle.remove(number)
        self.texts[number] = self.texts[number] + more
        self.turns[number] = self.texts[number], num_new, True

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def abort(self, data):
        self.abort_one(data.draw(st.sampled_from(sorted(self.texts))))

    @rule()
    def come_and_go(self):
        """Many that leave before they start."""
        for _ in range(100):
            number = self.scheduler.add([1], 1, priority=2)
            assert number == self.twin.add([1], 1, 2)
            self.scheduler.abort(number)
            self.twin.abort(number)

    def abort_one(self, number):
        self.scheduler.abort(number)
        self.twin.abort(number)
        del self.texts[number]
        self.idle.discard(number)
        with pytest.raises(KeyError, match="has ended or was never added"):
            self.scheduler.tokens(number)

    @precondition(lambda self: len(self.others) < 2 and self.cache.num_free >= self.num_groups)
    @rule(data=st.data())
    def others_take_blocks(self, data):
        n = data.draw(st.integers(1, min(6, self.cache.num_free // self.num_groups)))
        self.others.append((self.cache.add(n * self.cache.block_size).seq, self.num_groups * n))
        self.twin.taken += self.num_groups * n

    @precondition(lambda self: self.others)
    @rule()
    def others_free_blocks(self):
        seq, n = self.others.pop()
        self.cache.free(seq)
        self.twin.taken -= n

    # -- what a server does
    @rule(outcomes=st.lists(st.sampled_from(["compute", "compute", "leave", "fail"]), min_size=1, max_size=4))
    def serve(self, outcomes):
        for outcome in outcomes:
            self.schedule()
            if self.step is not None:
                self.fail() if outcome == "fail" else self.compute(leaves=outcome == "leave")

    def schedule(self):
        running, waiting = self.numbers_in("running"), self.numbers_in("waiting")
        try:
            step = self.scheduler.schedule()
        except OutOfBlocksError:
            assert self.others
            assert self.scheduler.num_running == 0
            step = "out of blocks"
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(running) + len(waiting)
        if not self.prefix_cache:
            planned = self.twin.schedule()
            assert (planned if step is None or isinstance(step, str) else [*self.plan_of(step)]) == (
                step if step is None or isinstance(step, str) else planned
            )
            assert self.scheduler.num_preempted == self.twin.preempted
        if step is None:
            assert not running + waiting
        elif not isinstance(step, str):
            self.looks_right(step, running)
            self.step = step

    def numbers_in(self, state):
        requests = getattr(self.scheduler, f"_{state}")
        return [*requests._requests] if state == "waiting" else requests.numbers[requests.lanes].tolist()

    def plan_of(self, step):
        return zip(step.requests.tolist(), np.diff(step.batch.query_starts).tolist(), strict=True)

    def looks_right(self, step, running):
        assert 0 < len(step.tokens) <= self.budget
        assert 0 < len(step.requests) <= self.max_num_seqs
        assert step.requests.tolist() == self.numbers_in("running")
        # The first of the running requests never gives its blocks back.
        assert running[:1] == [number for number in running[:1] if number in step.requests] or self.others
        starts = step.batch.query_starts.tolist()
        sampled = []
        for i, (number, n) in enumerate(self.plan_of(step)):
            assert n >= 1
            rows = slice(starts[i], starts[i + 1])
            text, positions = self.texts[number], step.batch.positions[rows].tolist()
            assert step.tokens[rows].tolist() == [text[p] for p in positions]
            assert positions == [*range(positions[0], positions[0] + n)]
            assert step.batch.seq_lens[i] == positions[-1] + 1 <= len(text)
            if positions[-1] + 1 == len(text):
                sampled.append((number, starts[i + 1] - 1))
        assert [*zip(step.sampled.tolist(), step.logits_indices.tolist(), strict=True)] == sampled
        tables = step.batch.block_tables.reshape(self.num_groups, len(step.requests), -1)
        peaks = [self.twin.peaks(n, self.budget) for n in step.batch.seq_lens.tolist()]
        held = (tables >= 0).sum(axis=2).T
        assert (held <= peaks).all()
        self.cache.check()

    def compute(self, *, leaves=False):
        step, self.step = self.step, None
        if leaves:  # the first, so that the others' tokens come after one that nobody gets
            self.abort_one(int(step.requests[0]))
        tokens = forward(self.cache, step).astype(np.int64)
        for number, token in zip(step.sampled.tolist(), tokens.tolist(), strict=True):
            if number in self.texts:
                self.texts[number] = [*self.texts[number], token]
        finished = self.scheduler.update(step, tokens)
        is_sampled = np.isin(step.requests, step.sampled).tolist()
        plan = [(number, n, sampled) for (number, n), sampled in zip(self.plan_of(step), is_sampled, strict=True)]
        if not self.prefix_cache:
            expected = self.twin.update(plan, tokens.tolist(), EOS)
            assert [(number, reason) for number, _, reason in finished] == expected
        for number, new, _ in finished:
            prompt, num_new, resumable = self.turns[number]
            text = alone(tuple(prompt), num_new, self.layers)
            assert new.tolist() == text[: text.index(EOS) + 1 if EOS in text else num_new]
            assert [*prompt, *new.tolist()] == self.texts[number]
            if resumable:
                self.idle.add(number)
                assert self.scheduler.tokens(number).tolist() == self.texts[number]
            else:
                del self.texts[number]

    def fail(self):
        """The model raises after it has written some layers, which must have no effect."""
        nothing = np.full((len(self.step.tokens), 1, 64), np.nan, np.float32)
        for layer in range(len(self.layers)):
            self.cache.write(layer, nothing, nothing, self.step.slots)
        with pytest.raises(RuntimeError, match="call update with it, or drop"):
            self.scheduler.schedule()
        self.scheduler.drop()
        with pytest.raises(ValueError, match="step must be the last one"):
            self.scheduler.update(self.step, [1] * len(self.step.sampled))
        self.step = None

    @invariant()
    def remembers_no_more_than_what_is_alive(self):
        assert_sizes_follow(self.scheduler, len(self.texts) + self.cache.max_seqs)

    def teardown(self):
        if hasattr(self, "cache"):
            while self.others:
                self.others_free_blocks()
            for _ in range(3000):
                self.schedule()
                self.cache.check()
                if self.step is None:
                    break
                self.compute()
            assert self.texts.keys() == self.idle
            assert self.cache.stats().used == 0
            if self.swap is not None:
                self.swap._patient.flush()
                assert len(self.store._slots) == 0
                self.swap.close()


class PrefixMachine(PlainMachine):
    prefix_cache = True

    @invariant()
    def finds_what_it_tells(self):
        self.told.agrees_with(self.cache, (None, "a"))


class SwapMachine(PlainMachine):
    """With a store that loses nothing, and a clock by which a swap is always cheaper."""

    swaps, most_new = True, 30

    def make_swap(self, cache, data):
        self.now, (self.swap, self.store) = 0, swap_of(cache)
        return {"swap": self.swap, "clock": lambda: self.now}

    def compute(self, *, leaves=False):
        self.now += len(self.step.tokens) - len(self.step.requests)
        super().compute(leaves=leaves)


class FaultsMachine(PrefixMachine):
    """With a store that fails at times, and any clock."""

    most_new = 30

    def make_swap(self, cache, data):
        draws = random.Random(data.draw(st.integers(0, 2**32)))
        faults = [lambda keys, blocks: blocks] * len(FAULTS) + [fault for fault, _ in FAULTS.values()]
        self.swap, self.store = swap_of(cache, lambda keys, blocks: draws.choice(faults)(keys, blocks))
        now = accumulate(draws.random() for _ in count())
        return {"swap": self.swap, "clock": lambda: next(now)}


class WindowsMachine(PlainMachine):
    windows = WINDOWS


class WindowsPrefixMachine(PrefixMachine):
    windows = WINDOWS


class LongMachine(PlainMachine):
    pass


class LongPrefixMachine(PrefixMachine):
    pass


class LongSwapMachine(SwapMachine):
    pass


class LongFaultsMachine(FaultsMachine):
    pass


class LongWindowsMachine(WindowsMachine):
    pass


class LongWindowsPrefixMachine(WindowsPrefixMachine):
    pass


TestPlainMachine = PlainMachine.TestCase
TestPlainMachine.settings = settings(max_examples=20, stateful_step_count=15)
TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=20, stateful_step_count=15)
TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=20, stateful_step_count=15)
TestFaultsMachine = FaultsMachine.TestCase
TestFaultsMachine.settings = settings(max_examples=20, stateful_step_count=15)
TestWindowsMachine = WindowsMachine.TestCase
TestWindowsMachine.settings = settings(max_examples=15, stateful_step_count=15)
TestWindowsPrefixMachine = WindowsPrefixMachine.TestCase
TestWindowsPrefixMachine.settings = settings(max_examples=15, stateful_step_count=15)
TestLongMachine = pytest.mark.long(LongMachine.TestCase)
TestLongMachine.settings = settings(max_examples=5_000, stateful_step_count=60)
TestLongPrefixMachine = pytest.mark.long(LongPrefixMachine.TestCase)
TestLongPrefixMachine.settings = settings(max_examples=5_000, stateful_step_count=60)
TestLongSwapMachine = pytest.mark.long(LongSwapMachine.TestCase)
TestLongSwapMachine.settings = settings(max_examples=1_000, stateful_step_count=60)
TestLongFaultsMachine = pytest.mark.long(LongFaultsMachine.TestCase)
TestLongFaultsMachine.settings = settings(max_examples=1_000, stateful_step_count=60)
TestLongWindowsMachine = pytest.mark.long(LongWindowsMachine.TestCase)
TestLongWindowsMachine.settings = settings(max_examples=2_500, stateful_step_count=60)
TestLongWindowsPrefixMachine = pytest.mark.long(LongWindowsPrefixMachine.TestCase)
TestLongWindowsPrefixMachine.settings = settings(max_examples=2_500, stateful_step_count=60)
