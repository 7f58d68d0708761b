"""Scheduler over a cache with states under random calls: every step begins with the states of its texts."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv.errors import CapacityError

from ..memory.texts import ROOM, P, snapshot_texts
from .test_states import Server


class StateMachine(RuleBasedStateMachine):
    @initialize(
        num_states=st.sampled_from([4, 2, 3, 1, 9, 40]),
        num_blocks=st.sampled_from([24, 16, 60]),
        budget=st.sampled_from([8, 5, 12, 40]),
        every=st.sampled_from([None, None, 8, 5]),
        prefix_cache=st.sampled_from([True] * 5 + [False]),
    )
    def start(self, num_states, num_blocks, budget, every, prefix_cache):
        options = {"max_num_batched_tokens": budget, "snapshot_every": every, "watermark": 0}
        self.server = Server(num_states, num_blocks, prefix_cache, max_seqs=6, **options)
        self.scheduler, self.cache = self.server.scheduler, self.server.cache
        self.alive, self.idle, self.others = set(), set(), []

    def text(self, data, most):
        """Few different runs, so that many begin alike."""
        first, n = data.draw(st.integers(1, 2)), data.draw(st.integers(1, most))
        return [first * i % 3 + 1 for i in range(n)]

    @rule(data=st.data(), resumable=st.booleans(), salt=st.sampled_from([None, None, None, "a"]))
    def add(self, data, resumable, salt):
        for _ in range(data.draw(st.integers(1, 3))):
            prompt, new = self.text(data, 30), self.text(data, 12)
            at = data.draw(st.lists(st.integers(0, len(prompt)), max_size=2))
            number = self.server.add(prompt, new, resumable=resumable, salt=salt, snapshot_at=at)
            self.alive.add((number, resumable))

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def extend(self, data):
        number = data.draw(st.sampled_from(sorted(self.idle)))
        before, more, new = self.scheduler.tokens(number).tolist(), self.text(data, 5), self.text(data, 8)
        if len(before) + len(more) + len(new) < ROOM:
            at = data.draw(st.lists(st.integers(0, len(before) + len(more)), max_size=2))
            self.scheduler.extend(number, more, len(new), snapshot_at=at)
            self.server.given[number] = [*before, *more, *new]
            self.idle.remove(number)
            self.alive.add((number, True))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(sorted(self.alive)))
        self.scheduler.abort(request[0])
        self.alive.remove(request)

    @precondition(lambda self: self.cache.num_free > 6 and len(self.others) < 2)
    @rule(n=st.integers(1, 5))
    def others_take_room(self, n):
        try:
            self.others.append(self.cache.add(n * P).seq)
        except CapacityError:
            assert self.scheduler.num_running + len(self.others) == self.cache.max_seqs

    @precondition(lambda self: self.others)
    @rule()
    def others_give_room_back(self):
        self.cache.free(self.others.pop())

    @rule(outcomes=st.lists(st.sampled_from(["compute"] * 4 + ["fail", "fail late", "leave"]), min_size=1, max_size=6))
    def serve(self, outcomes):
        for outcome in outcomes:
            try:
                step = self.scheduler.schedule()
            except CapacityError:
                assert self.others
                continue
            if step is None:
                assert not self.alive
                return
            if outcome == "leave":
                number = int(step.requests[0])
                self.alive = {request for request in self.alive if request[0] != number}
            tokens = [] if outcome == "fail" else self.server.forward(step)
            if outcome == "leave":
                self.scheduler.abort(number)
            if outcome.startswith("fail"):
                self.scheduler.drop()
            else:
                self.finish(self.scheduler.update(step, tokens))
            self.cache.check()

    def finish(self, finished):
        for number, _, _ in finished:
            [request] = [request for request in self.alive if request[0] == number]
            self.alive.remove(request)
            if request[1]:
                assert self.scheduler.tokens(number).tolist() == self.server.given[number]
                self.idle.add(number)

    @invariant()
    def snapshots_are_those_of_their_tokens(self):
        if hasattr(self, "server"):
            assert all(text == tokens for text, tokens in snapshot_texts(self.cache))

    def teardown(self):
        if hasattr(self, "server"):
            self.cache.free(self.others)
            for _ in range(60 * (1 + len(self.alive))):  # more than the tokens of each
                finished = self.server.step()
                if finished is None:
                    break
                self.finish(finished)
            assert not self.alive
            stats = self.cache.stats()
            assert (stats.used, stats.used_states) == (0, 0)


class LongMachine(StateMachine):
    pass


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=20, stateful_step_count=15)
TestLongMachine = pytest.mark.long(LongMachine.TestCase)
TestLongMachine.settings = settings(max_examples=2_500, stateful_step_count=40)
