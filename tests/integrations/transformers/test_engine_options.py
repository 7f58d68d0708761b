"""Options that change logits: biases, penalties and a processor of the caller."""

import numpy as np
import pytest
import torch

from pagedkv.integrations.transformers import Engine

from .models import VOCAB, make_model, prompts

NEW = 8
[TEXT] = prompts(20)


@pytest.fixture(scope="module")
def model():
    return make_model("Llama", eos_token_id=None)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, num_blocks=64)


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


def expected(model, change):
    """The text of a loop that changes the logits of each step itself."""
    tokens = []
    for _ in range(NEW):
        tokens.append(int(change(tokens, logits_of(model, TEXT + tokens)).argmax()))
    return tokens


def test_biases_change_what_is_most_probable(model, engine):
    biases = {3: 100.0, 4: 50.0}
    assert list(engine.tokens(TEXT, NEW, logit_bias=biases)) == [3] * NEW
    [banned] = engine.tokens(TEXT, 1)

    def change(tokens, logits):
        return logits.index_fill(0, torch.tensor([banned]), -torch.inf)

    assert list(engine.tokens(TEXT, NEW, logit_bias={banned: -3e38})) == expected(model, change)


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 2.0), (1.0, -0.5)])
def test_penalties_are_those_of_openai(model, engine, presence, frequency):
    """They count the tokens of the text, and not those of the prompt."""
    scale = 4 * torch.eye(VOCAB)[[5, 6]].sum(0)  # two tokens that would come again and again

    def change(tokens, logits):
        counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=VOCAB)
        return logits + scale - frequency * counts - presence * (counts > 0)

    options = {"presence_penalty": presence, "frequency_penalty": frequency, "logit_bias": {5: 4.0, 6: 4.0}}
    assert list(engine.tokens(TEXT, NEW, **options)) == expected(model, change)


def test_a_processor_gets_the_text_and_a_copy_of_the_logits(model, engine):
    seen = []

    def last_but(tokens, logits):
        seen.append(tokens.copy())
        tokens.append(0)  # its own list
        logits[:3] = -torch.inf
        return -logits.clamp(min=-50)

    made = []
    engine.add(TEXT, NEW, logits_processor=last_but, logprobs=0)
    other = engine.add(TEXT, NEW)
    for sampled in engine.run():
        made += [] if sampled.request == other else [sampled]
    tokens = [sampled.token for sampled in made]

    def change(tokens, logits):
        logits[:3] = -torch.inf
        return -logits.clamp(min=-50)

    assert tokens == expected(model, change)
    assert seen == [tokens[:i] for i in range(NEW)]
    row = logits_of(model, TEXT).log_softmax(-1)
    np.testing.assert_allclose(made[0].logprob, row[tokens[0]], atol=1e-4)


@pytest.mark.parametrize(
    ("processor", "error", "message"),
    [
        (lambda tokens, logits: 1 // 0, ZeroDivisionError, "division"),
        (lambda tokens, logits: None, TypeError, "must return a tensor as the one that it gets, .* got None"),
        (
            lambda tokens, logits: logits[:3],
            TypeError,
            r"\(97,\) torch.float32 on cpu, got \(3,\) torch.float32 on cpu",
        ),
        (lambda tokens, logits: logits.double(), TypeError, r"got \(97,\) torch.float64 on cpu"),
        (lambda tokens, logits: logits - torch.inf, ValueError, "must leave a token to draw"),
    ],
    ids=["raises", "returns nothing", "another shape", "another dtype", "no token left"],
)
def test_a_processor_that_fails_changes_nothing(model, processor, error, message):
    engine = Engine(model, num_blocks=64)
    other, bad = engine.add(TEXT, NEW), engine.add(TEXT, NEW, logits_processor=processor)
    made = []
    for _ in range(2):
        with pytest.raises(error, match=message) as raised:
            made.extend(engine.run())
        assert raised.value.__notes__ == [f"in request {bad}: abort it to go on with the others"]
    assert engine.abort(bad)
    made.extend(engine.run())
    assert [sampled.token for sampled in made] == list(engine.tokens(TEXT, NEW))
    assert {sampled.request for sampled in made} == {other}
    engine.cache.check()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"presence_penalty": 2.5}, ValueError, "presence_penalty must be from -2 to 2, got 2.5"),
        ({"frequency_penalty": "1"}, TypeError, "frequency_penalty must be a number, got str"),
        ({"logit_bias": [1]}, TypeError, "logit_bias must be a dict of tokens to numbers, got list"),
        ({"logit_bias": {"5": 1}}, TypeError, "a token of logit_bias must be an int, got str"),
        ({"logit_bias": {97: 1}}, ValueError, "a token of logit_bias must be less than the 97 of LlamaForCausalLM"),
        ({"logit_bias": {5: float("inf")}}, ValueError, "logit_bias must be finite in float32"),
        ({"logits_processor": 1}, TypeError, "logits_processor must be a function"),
    ],
)
def test_refusals(engine, options, error, message):
    with pytest.raises(error, match=message):
        engine.add([1], 5, **options)
    assert list(engine.run()) == []
