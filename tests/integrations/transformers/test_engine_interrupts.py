"""Interrupts at any instant of an engine change no text and lose no block."""

import random
from contextlib import suppress
from unittest import mock

import pytest

from pagedkv.integrations.transformers import Engine

from ...support.interrupts import Interrupt
from .models import make_model

ROOMS = [f"pagedkv/integrations/transformers/{name}" for name in ("engine", "hybrid", "request", "stream")]
ROOMS += ["pagedkv/scheduling", "pagedkv/memory", "pagedkv/cache.py", "pagedkv/stores/swap.py"]
COMMON = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture(
    scope="module", params=["Llama", *(pytest.param(x, marks=pytest.mark.long) for x in ("Gemma2", "Lfm2"))]
)
def model(request):
    options = {"Llama": {"num_hidden_layers": 1}, "Gemma2": {"sliding_window": 5}}.get(request.param, {})
    return make_model(request.param, **options, eos_token_id=[5, 11])


@pytest.fixture(scope="module")
def undisturbed(model):
    """The (token, reason) of each step of a request that nobody interrupts."""
    engine, known = Engine(model, num_blocks=24, block_size=4), {}

    def of(prompt, max_tokens):
        if (prompt, max_tokens) not in known:
            engine.add(list(prompt), max_tokens)
            known[prompt, max_tokens] = [(made.token, made.reason) for made in engine.run()]
        return known[prompt, max_tokens]

    return of


class Disturbed:
    """An engine, every other call of which is interrupted at a random instant, and what it has said."""

    def __init__(self, model, seed):
        self.random = random.Random(seed)
        budget = self.random.choice([4, 64])
        options = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": budget}
        if model.config.model_type == "llama":  # the others have windows or states
            options |= {"num_blocks": 8, "swap": self.random.choice([None, "1MiB"])}
        self.engine = Engine(model, **options)
        self.asked, self.said, self.streams, self.interrupts = {}, {}, [], []

    def call(self, method, *args):
        """Its result, or None if it is interrupted."""
        if self.random.random() < 0.5:
            return method(*args)
        try:
            with Interrupt(int(10 ** self.random.uniform(0, 3.3)), ROOMS) as interrupt:
                return method(*args)
        except KeyboardInterrupt:
            self.interrupts.append(interrupt.came_at)
            self.engine.cache.check()
        return None

    def new_request(self):
        start = COMMON[: self.random.randint(0, 8)]
        return (*start, self.random.randint(20, 25)), self.random.randint(2, 8)

    def add(self):
        prompt, max_tokens = self.new_request()
        number = self.call(self.engine.add, list(prompt), max_tokens)
        if number is not None:
            self.asked[number], self.said[number] = (prompt, max_tokens), []

    def step(self):
        self.hear(self.call(self.engine.step) or [])

    def hear(self, steps):
        for made in steps:
            self.said.setdefault(made.request, []).append((made.token, made.reason))

    def abort(self):
        if self.asked:
            number = self.random.choice([*self.asked])
            request = self.asked.pop(number)
            try:
                self.call(self.engine.abort, number)
            except KeyError:  # it has ended
                self.asked[number] = request

    def open_stream(self):
        prompt, max_tokens = self.new_request()
        self.streams.append((prompt, max_tokens, self.engine.tokens(list(prompt), max_tokens), []))

    def read(self):
        if self.streams:
            *_, stream, said = self.random.choice(self.streams)
            with suppress(StopIteration):
                token = self.call(stream.__next__)
                said += [] if token is None else [token]

    def close_stream(self):
        if self.streams:
            *_, stream, _ = self.streams.pop(self.random.randrange(len(self.streams)))
            stream.close()


def disturb(model, undisturbed, seed):
    """Where interrupts came, after all texts were compared."""
    one = Disturbed(model, seed)
    kinds = [(one.open_stream, one.read, one.close_stream), (one.add, one.step, one.abort)]
    num_free = one.engine.cache.num_free
    for _ in range(4):
        one.random.choice(kinds)[0]()
    for _ in range(14):
        begin, goes_on, ends = one.random.choice(kinds)
        one.random.choices([goes_on, begin, ends], [6, 2, 1])[0]()
    for prompt, max_tokens, stream, said in one.streams:
        said += stream
        expected = [token for token, reason in undisturbed(prompt, max_tokens) if reason != "stop"]
        assert said == expected, one.interrupts
    one.hear(one.engine.run())
    for number, request in one.asked.items():
        assert one.said[number] == undisturbed(*request), (number, one.interrupts)
    assert one.engine.cache.num_free == num_free, one.interrupts
    assert one.engine.cache.num_seqs == 0
    if (swapping := one.engine.scheduler._swapping) is not None:
        swapping._swap._patient.flush()
        assert len(swapping._swap._patient._store._slots) == 0, one.interrupts
    return one.interrupts


@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 2000), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_an_interrupted_engine_generates_the_same_text(model, undisturbed, seeds):
    places = {place for seed in seeds for place in disturb(model, undisturbed, seed)}
    assert len(places) > 24, "hardly anything was interrupted"


def test_run_recovers_where_no_request_is_left(model):
    """An abort that was interrupted, and then its recovery, leave a sequence behind until another call."""
    engine = Engine(model, num_blocks=24, block_size=4)
    number = engine.add(COMMON, 8)
    engine.step()
    for method, call in (("abort", lambda: engine.abort(number)), ("restart", engine.step)):
        interrupted = mock.patch.object(engine.scheduler, method, side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            call()
    assert list(engine.run()) == []
    assert engine.cache.stats().used == 0
