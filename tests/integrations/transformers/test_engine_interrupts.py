"""An engine that is interrupted at any instant: each text as in an engine that nobody disturbs, and no block lost."""

import random
from contextlib import suppress

import pytest

from pagedkv.integrations.transformers import Engine

from ...support.interrupts import Interrupt
from .models import make_model

FOLDERS = ("pagedkv/integrations/transformers/engine", "pagedkv/scheduling", "pagedkv/memory", "pagedkv/cache.py")
FOLDERS += ("pagedkv/integrations/transformers/request", "pagedkv/integrations/transformers/stream")
STOPS = {5, 11}
COMMON = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture(scope="module")
def model():
    return make_model("Llama", num_hidden_layers=1, eos_token_id=sorted(STOPS))


@pytest.fixture(scope="module")
def alone(model):
    """What a request says that nobody interrupts, as (token, reason) of each step."""
    engine, known = Engine(model, num_blocks=24, block_size=4), {}

    def of(prompt, max_tokens):
        if (prompt, max_tokens) not in known:
            engine.add(list(prompt), max_tokens)
            known[prompt, max_tokens] = [(made.token, made.reason) for made in engine.run()]
        return known[prompt, max_tokens]

    return of


class Disturbed:
    """An engine, what it said to each request, and interrupts at random instants."""

    def __init__(self, model, seed):
        self.random = random.Random(seed)
        budget = self.random.choice([4, 64])
        self.engine = Engine(model, num_blocks=24, block_size=4, max_num_batched_tokens=budget)
        self.theirs = self.engine.cache.add([9] * 5).seq  # of somebody else
        self.num_free = self.engine.cache.num_free
        self.asked, self.said, self.streams, self.interrupts = {}, {}, [], []

    def call(self, method, *args):
        """Its result, or None if it is interrupted."""
        if self.random.random() < 0.5:
            return method(*args)
        try:
            with Interrupt(int(10 ** self.random.uniform(0, 3.3)), FOLDERS) as interrupt:
                return method(*args)
        except KeyboardInterrupt:
            self.interrupts.append(interrupt.came_at)
            self.engine.cache.check()
        return None

    def new_prompt(self):
        start = COMMON[: self.random.randint(0, 8)]
        return (*start, self.random.randint(20, 25)), self.random.randint(2, 8)

    def add(self):
        prompt, max_tokens = self.new_prompt()
        number = self.call(self.engine.add, list(prompt), max_tokens)
        if number is not None:
            self.asked[number], self.said[number] = (prompt, max_tokens), []

    def open_stream(self):
        prompt, max_tokens = self.new_prompt()
        self.streams.append((prompt, max_tokens, self.engine.tokens(list(prompt), max_tokens), []))

    def read(self):
        if self.streams:
            *_, stream, said = self.random.choice(self.streams)
            token = self.call(stream.__next__)
            said += [] if token is None else [token]

    def close_stream(self):
        if self.streams:
            *_, stream, _ = self.streams.pop(self.random.randrange(len(self.streams)))
            stream.close()

    def abort(self):
        number = self.random.choice([number for number in self.asked if number in self.engine._requests] or [None])
        if number is not None:
            del self.asked[number]
            with suppress(KeyError):  # it ended with the last step, of which nothing was heard
                self.call(self.engine.abort, number)

    def step(self):
        for made in self.call(self.engine.step) or []:
            self.said.setdefault(made.request, []).append((made.token, made.reason))

    def containers_are_bounded(self):
        engine = self.engine
        assert engine._is_interrupted or engine._requests.keys() == engine.scheduler._requests.keys()
        assert len(engine._dropped) <= len(engine._requests)
        assert len(engine._results) <= engine.cache.max_seqs


def disturb(model, alone, seed):
    """Where interrupts came, after all texts were compared."""
    one = Disturbed(model, seed)
    for _ in range(4):
        one.open_stream() if seed % 2 else one.add()
    # A step for a stream gives what else comes of it to nobody.
    weights = {one.step: 6, one.add: 2, one.abort: 1}
    if seed % 2:
        weights = {one.read: 6, one.open_stream: 2, one.close_stream: 1}
    for _ in range(14):
        with suppress(StopIteration):
            one.random.choices([*weights], [*weights.values()])[0]()
        one.containers_are_bounded()
    for prompt, max_tokens, stream, said in one.streams:
        said += stream
        expected = [token for token, reason in alone(prompt, max_tokens) if reason != "stop"]
        assert said == expected, one.interrupts
    for made in one.engine.run():
        one.said.setdefault(made.request, []).append((made.token, made.reason))
    for number, (prompt, max_tokens) in one.asked.items():
        assert one.said[number] == alone(prompt, max_tokens), (number, one.interrupts)
    engine = one.engine
    assert engine.cache.num_free == one.num_free, one.interrupts
    assert engine.cache.num_seqs == 1
    assert not engine._requests
    assert not engine.scheduler._requests
    assert engine.cache.seq_lens([one.theirs]) == [5]
    return one.interrupts


@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 2000), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_an_interrupted_engine_generates_the_same_text(model, alone, seeds):
    places = {place for seed in seeds for place in disturb(model, alone, seed)}
    assert len(places) > len(seeds), "hardly anything was interrupted"
