"""generate: what streams give, for one prompt or many, and nothing left behind by an error or an interrupt."""

import io

import numpy as np
import pytest
import torch

from pagedkv.integrations.transformers import Engine

from .byte_tokenizer import byte_tokenizer
from .models import make_model, prompts

NEW = 6
TEXTS = prompts(3, 40, 17, 33)


@pytest.fixture(scope="module")
def model():
    return make_model("Llama", vocab_size=256, eos_token_id=None)


@pytest.fixture
def engine(model):
    return Engine(model, byte_tokenizer(), num_blocks=64)


def test_one_prompt_or_many(engine):
    expected = [list(engine.tokens(text, NEW)) for text in TEXTS]
    made = engine.generate(TEXTS, NEW)
    assert [one.tokens for one in made] == expected
    assert [one.text for one in made] == ["".join(engine.stream(text, NEW)) for text in TEXTS]
    assert [(one.finish_reason, one.num_cached > 0) for one in made] == [("length", len(text) > 16) for text in TEXTS]
    for prompt in (TEXTS[0], np.array(TEXTS[0]), torch.tensor(TEXTS[0]), {"input_ids": TEXTS[0]}):
        assert engine.generate(prompt, NEW).tokens == expected[0]
    assert engine.generate(torch.tensor([TEXTS[0]]), NEW)[0].tokens == expected[0]
    assert engine.generate([], NEW) == []
    assert [type(engine.generate(prompt, NEW)) for prompt in ("ab", ["ab"])] == [type(made[0]), list]
    assert engine.cache.stats().used == 0


def test_messages_are_one_prompt(engine):
    engine._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "ab"}]
    assert engine.generate(messages, NEW) == engine.generate([messages], NEW)[0] == engine.generate("ab", NEW)


def test_several_texts_of_a_prompt(engine):
    options = {"temperature": 2.0, "logprobs": 1}
    made = engine.generate(TEXTS[1], NEW, n=3, seed=5, prompt_logprobs=0, **options)
    alone = [engine.generate(TEXTS[1], NEW, seed=seed, **options) for seed in (5, 6, 7)]
    assert [one.tokens for one in made.choices] == [one.tokens for one in alone]
    assert made.tokens == made.choices[0].tokens
    assert [one.num_cached for one in made.choices] == [0, 32, 32]  # they wait for the blocks of the first
    assert [one.token for one in made.logprobs] == made.tokens
    assert len(made.prompt_logprobs) == len(TEXTS[1]) - 1
    assert len({tuple(one.tokens) for one in engine.generate(TEXTS[1], NEW, n=3, **options).choices}) == 3


def test_other_requests_go_on_beside_it(engine):
    request = engine.add(TEXTS[0], NEW)
    stream = engine.tokens(TEXTS[1], 3 * NEW)
    first = next(stream)
    engine.generate(TEXTS, NEW)
    assert {sampled.request for sampled in engine.run()} == {request}
    assert [first, *stream] == list(engine.tokens(TEXTS[1], 3 * NEW))


def test_without_a_tokenizer_there_is_no_text(model):
    assert Engine(model, num_blocks=64).generate(TEXTS[0], NEW).text is None


def test_a_text_that_is_not_finite_is_an_error_of_its_own():
    model = make_model("Llama", eos_token_id=None)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    bad, good = Engine(model, num_blocks=64).generate([[3, 7], [3, 5]], NEW)
    assert (bad.finish_reason, bad.tokens, bad.message.split(":")[0]) == (
        "error",
        [],
        "the model's logits are not finite",
    )
    assert good.finish_reason == "length"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_or_interrupt_aborts_its_requests_and_no_others(model, engine, monkeypatch, error):
    other = engine.add(TEXTS[0], 2 * NEW)
    calls = iter(range(100))

    def failing(*args):
        if next(calls) == 3:
            raise error

    with monkeypatch.context() as patch:
        hook = model.register_forward_pre_hook(failing)
        with pytest.raises(error):
            engine.generate(TEXTS, 50)
        hook.remove()
        patch.undo()
    made = list(engine.run())
    assert {sampled.request for sampled in made} == {other}
    assert len(made) == 2 * NEW
    assert engine.cache.stats().used == 0


def test_a_wrong_prompt_generates_nothing(engine):
    with pytest.raises(ValueError, match="tokens must have at least one token"):
        engine.generate([TEXTS[0], []], NEW)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        engine.generate(TEXTS, NEW, n=0)
    assert engine.step() == []
    assert engine.stats().num_finished == 0


def test_progress_is_shown_on_a_terminal_alone(engine, monkeypatch, capsys):
    engine.generate(TEXTS, NEW)
    assert capsys.readouterr().err == ""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    engine.generate(TEXTS, NEW)
    assert "4/4" in terminal.getvalue()


def test_stats(engine):
    engine.generate(TEXTS, NEW)
    for text in TEXTS:
        engine.add(text, NEW)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_finished, stats.num_preempted) == (4, 0, 4, 0)
    assert stats.cache == engine.cache.stats()


def test_stats_count_what_windows_save():
    engine = Engine(make_model("Mistral", eos_token_id=None), num_blocks=64, block_size=4)
    engine.add(TEXTS[1], NEW)
    engine.step()
    engine.step()
    stats = engine.stats().cache
    assert stats.passed_blocks == -(-(len(TEXTS[1]) + 1) // 4) - stats.used > 0
