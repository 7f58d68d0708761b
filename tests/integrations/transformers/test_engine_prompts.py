"""Prompts and stops of Engine.add."""

import threading

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from pagedkv.integrations.transformers import Engine

from .byte_tokenizer import byte_tokenizer
from .models import make_model

NEW = 12
PROMPT = [3, 1, 4, 1, 5]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}bot:{% endif %}"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Engine(make_model("Llama", vocab_size=256, eos_token_id=None), tokenizer, num_blocks=64)


@pytest.fixture(scope="module")
def said(engine):
    """The text that it generates after PROMPT."""
    return list(engine.tokens(PROMPT, NEW))


@pytest.mark.parametrize(
    "prompt",
    [
        np.array(PROMPT),
        torch.tensor(PROMPT),
        torch.tensor(PROMPT, dtype=torch.int32),
        torch.tensor([PROMPT]),
        BatchEncoding({"input_ids": PROMPT, "attention_mask": [1] * 5}),
        BatchEncoding({"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, 5)}),
        BatchEncoding({"input_ids": [PROMPT]}),
    ],
    ids=["array", "tensor", "int32 tensor", "a batch of one", "BatchEncoding", "of tensors", "of lists"],
)
def test_prompts_as_transformers_hands_them_out(engine, said, prompt):
    assert list(engine.tokens(prompt, NEW)) == said


def test_messages_go_through_the_chat_template(engine):
    encoding = engine._tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    expected = list(engine.stream("user:Hi;bot:", NEW))
    assert list(engine.stream(MESSAGES, NEW)) == list(engine.stream(encoding, NEW)) == expected


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (torch.tensor([PROMPT, PROMPT]), ValueError, "a prompt must be one text, got a batch of 2: add each"),
        ([PROMPT, PROMPT], ValueError, "a prompt must be one text, got a batch of 2: add each"),
        (
            {"role": "user"},
            ValueError,
            r"a prompt in a dict needs its input_ids, got \['role'\]: put messages in a list",
        ),
        (torch.tensor(PROMPT) > 2, TypeError, "tokens must have an integer dtype, got bool"),
        (torch.rand(3), TypeError, "tokens must have an integer dtype, got float32"),
        ({"input_ids": [0, 3], "attention_mask": [0, 1]}, ValueError, "the prompt has padding, by its attention_mask"),
    ],
)
def test_prompts_that_are_refused(engine, prompt, error, message):
    with pytest.raises(error, match=message):
        engine.add(prompt, NEW)
    assert engine.step() == []


def test_messages_without_a_template(engine, monkeypatch):
    monkeypatch.setattr(engine._tokenizer, "chat_template", None)
    with pytest.raises(
        ValueError, match=r"need a chat template, .*: set tokenizer\.chat_template, or write the messages into"
    ):
        engine.add(MESSAGES, NEW)


# -- stop
class Spoken:
    """An engine whose model says a text, token by token, whatever it is asked."""

    def __init__(self, monkeypatch, text, **options):
        tokenizer = byte_tokenizer()
        self.engine = Engine(make_model("Llama", vocab_size=256), tokenizer, num_blocks=64, **options)
        self.ids = tokenizer(text).input_ids

        def logits(model, cache, step, rows):
            places = step.batch.seq_lens.tolist()
            made = torch.zeros(len(places), 256)
            for row, place in zip(made, places, strict=True):
                row[self.ids[place - 1]] = 9
            return made

        monkeypatch.setattr("pagedkv.integrations.transformers.engine.last_logits", logits)

    def stream(self, **options):
        return "".join(self.engine.stream([1], len(self.ids), **options))

    def tokens(self, **options):
        """How many tokens come, and why the text ends."""
        self.engine.add([1], len(self.ids), **options)
        made = list(self.engine.run())
        return len(made), made[-1].reason


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (None, "one two three two"),
        ("two", "one "),
        (["three", "e t"], "on"),
        (["four", "two t"], "one "),
        ("three tw", "one two "),
        ("three twins", "one two three two"),
    ],
)
def test_the_text_ends_before_the_first_stop(monkeypatch, stop, text):
    assert Spoken(monkeypatch, "one two three two").stream(stop=stop) == text


def test_a_request_ends_with_the_token_that_completes_a_stop(monkeypatch):
    spoken = Spoken(monkeypatch, "one, two")
    assert spoken.tokens(stop=", ") == (5, "stop")
    assert spoken.tokens(stop="x") == (8, "length")
    assert spoken.engine.cache.stats().used == 0


def test_a_stop_inside_of_a_character_of_several_tokens(monkeypatch):
    assert Spoken(monkeypatch, "ab🙂cd").stream(stop="🙂c") == "ab"


def test_a_stop_in_what_is_left_of_a_character(monkeypatch):
    spoken = Spoken(monkeypatch, "ab🙂")
    del spoken.ids[-1]
    assert [spoken.tokens(stop="\ufffd", min_tokens=n) for n in (0, 5)] == [(5, "stop"), (5, "length")]
    assert [spoken.stream(stop="\ufffd", min_tokens=n) for n in (0, 5)] == ["ab", "ab\ufffd"]


def test_nothing_ends_a_text_before_min_tokens(monkeypatch):
    spoken = Spoken(monkeypatch, "abcabcabcabc")
    a, _, c, *_ = spoken.ids
    assert [spoken.tokens(stop="bc", min_tokens=n)[0] for n in (0, 2, 3, 5, 6)] == [3, 3, 6, 6, 9]
    assert spoken.tokens(stop=["ab", "abcx"], min_tokens=2)[0] == 5
    # Before, another token is chosen in the place of an end token.
    assert [spoken.tokens(stop_token_ids=[c], min_tokens=n)[0] for n in (0, 2, 3, 6)] == [3, 3, 6, 9]
    assert [spoken.tokens(stop_token_ids=[a, c], min_tokens=n)[0] for n in (0, 1, 12)] == [1, 3, 12]


def test_ends_of_the_model_and_of_a_request(monkeypatch):
    spoken = Spoken(monkeypatch, "abcdef", eos_token_id=byte_tokenizer()("d").input_ids)
    *_, e, f = spoken.ids
    assert spoken.tokens() == (4, "stop")
    assert spoken.tokens(stop_token_ids=[e]) == (4, "stop")
    assert spoken.tokens(ignore_eos=True) == (6, "length")
    assert spoken.tokens(ignore_eos=True, stop_token_ids=np.array([e, f])) == (5, "stop")
    assert spoken.stream(ignore_eos=True, stop_token_ids=[f]) == "abcde"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stop": ""}, ValueError, "stop must not hold an empty text"),
        ({"stop": [3]}, TypeError, "stop must be a str, or a sequence of them, got int in it"),
        ({"stop": 3}, TypeError, "stop must be a str, or a sequence of them, got int$"),
        ({"stop_token_ids": ["a"]}, TypeError, "stop_token_ids must have an integer dtype"),
        ({"min_tokens": 6}, ValueError, "min_tokens must be at most 5, got 6"),
        ({"min_p": 2}, ValueError, "min_p must be from 0 to 1, got 2.0"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be positive and finite in float32, got 0"),
        ({"repetition_penalty": 1e-300}, ValueError, "repetition_penalty must be positive and finite in float32"),
        (
            {"stop_token_ids": range(256), "min_tokens": 1},
            ValueError,
            "stop_token_ids must leave a token to draw before min_tokens = 1, got all 256",
        ),
        ({"priority": 2**40}, ValueError, "priority must be at most"),
    ],
)
def test_options_that_are_refused(engine, options, error, message):
    with pytest.raises(error, match=message):
        engine.add(PROMPT, 5, **options)
    assert engine.step() == []


def test_an_option_that_an_engine_does_not_have():
    with pytest.raises(
        TypeError, match=r"^Engine has no option max_len, only model, tokenizer, memory, .*, kv_dtype, "
    ):
        Engine(make_model("Llama", vocab_size=256), num_blocks=4, max_len=9)


@pytest.mark.parametrize("tokenizer", ["gpt2", str])
def test_a_wrong_tokenizer_is_refused(tokenizer):
    with pytest.raises(TypeError, match=r"^tokenizer must be one of transformers, such as .*, got (str|type)$"):
        Engine(make_model("Llama", vocab_size=256), tokenizer, num_blocks=4)


def test_a_refused_request_disturbs_no_other(engine, said):
    stream = engine.tokens(PROMPT, NEW)
    assert next(stream) == said[0]
    with pytest.raises(ValueError, match="a request can have"):
        engine.add(PROMPT, 10**6)
    assert engine.scheduler.num_running == 1
    assert list(stream) == said[1:]


def test_a_penalty_ends_repetitions(engine):
    drawn = list(engine.tokens(PROMPT, 40, repetition_penalty=1e6))
    assert len({*PROMPT, *drawn}) == len({*PROMPT}) + 40


def test_a_penalty_that_makes_logits_infinite_repeats(engine):
    [drawn] = engine.tokens(PROMPT, 1, repetition_penalty=1e-44, temperature=1.0)
    assert drawn in PROMPT


# -- one call at a time
def test_a_call_in_the_middle_of_another_one(engine, said):
    errors = []

    def call(*_):
        for method in (lambda: engine.add(PROMPT, 1), engine.step, lambda: engine.abort(0)):
            with pytest.raises(RuntimeError, match="in the middle of another call of this Engine") as error:
                method()
            errors.append(error)

    def call_from_a_thread(*_):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    for hook in (call, call_from_a_thread):
        handle = engine._model.register_forward_pre_hook(hook)
        try:
            assert list(engine.tokens(PROMPT, 2)) == said[:2]
        finally:
            handle.remove()
    assert len(errors) == 12


def test_leaving_run_loses_no_token(engine):
    requests = [engine.add(PROMPT, 3) for _ in range(3)]
    seen = []
    while engine.scheduler.num_running or engine.scheduler.num_waiting or engine._results:
        for made in engine.run():
            seen.append(made)
            break
    assert [sum(made.request == request for made in seen) for request in requests] == [3, 3, 3]
