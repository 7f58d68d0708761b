"""Logits that are not finite end only their request, whose keys are never found."""

from contextlib import contextmanager

import pytest
import torch

from pagedkv.integrations.transformers import Engine
from pagedkv.integrations.transformers.stream import Stream

from .byte_tokenizer import byte_tokenizer
from .models import VOCAB, make_model, prompts

NEW = 6
LONG, SHORT = prompts(40, 5)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model():
    return make_model("Llama", eos_token_id=None)


@contextmanager
def spoiled(model, value, row):
    """Within the block, the model writes a value to a row of its logits."""

    def spoil(module, args, out):
        out[0, row] = value
        return out

    hook = model.lm_head.register_forward_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


def run(engine):
    """(token, reason) of each step, by request; the cache must be empty then."""
    said = {}
    for made in engine.run():
        said.setdefault(made.request, []).append((made.token, made.reason))
        assert bool(made.message) == (made.reason == "error")
    assert engine.cache.stats().used == 0
    assert not engine._requests
    return said


@pytest.mark.parametrize("budget", [64, 16], ids=["at once", "in chunks"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_keys_that_are_not_finite_are_never_found(model, budget, value):
    """A fault of the model while it computes the first tokens of a prompt."""
    engine = Engine(model, num_blocks=64, max_num_batched_tokens=budget)
    expected = list(Engine(model, num_blocks=64).tokens([*LONG, 5], NEW))
    request = engine.add(LONG, NEW)
    weight = model.model.layers[0].self_attn.k_proj.weight
    healthy = weight[0, 0].item()
    with torch.no_grad():
        weight[0, 0] = value
        try:
            [made] = engine.step()
        finally:
            weight[0, 0] = healthy
    assert made[:3] == (request, -1, "error")
    assert "the model's logits are not finite: look for NaN in its weights" in made.message
    assert engine.cache.find(LONG) == 0
    assert engine.cache.num_free == 64
    assert list(engine.tokens([*LONG, 5], NEW)) == expected
    assert engine.cache.stats().hit_tokens == 0


def test_keys_that_are_not_finite_behind_a_window_are_never_found():
    """The last row of a prompt, whose logits are asked for, sees none of the rows that are not finite."""
    model = make_model("Mistral", eos_token_id=None, sliding_window=8)
    text = [96, *([5, 6] * 200)]
    expected = list(Engine(model, num_blocks=64).tokens(text[:40], NEW))
    engine = Engine(model, num_blocks=64)
    request = engine.add(text, NEW)
    weight = model.get_input_embeddings().weight
    healthy = weight[96].clone()
    with torch.no_grad():
        weight[96] = NAN
        try:
            [made] = engine.step()
        finally:
            weight[96] = healthy
    assert made[:3] == (request, -1, "error")
    assert list(engine.tokens(text[:40], NEW)) == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 3, "min_p": 0.1}])
def test_the_others_go_on(model, options):
    """One of two requests has a token that the model knows nothing of."""
    alone = Engine(model, num_blocks=64)
    request = alone.add(SHORT, NEW, **options)
    expected = run(alone)[request]
    unknown = min({*range(1, VOCAB)} - {*SHORT, *(token for token, _ in expected)})
    other = make_model("Llama", eos_token_id=None)
    with torch.no_grad():
        other.get_input_embeddings().weight[unknown] = NAN
    engine = Engine(other, num_blocks=64)
    bad, good = engine.add([unknown, 96], NEW, **options), engine.add(SHORT, NEW, **options)
    assert run(engine) == {bad: [(-1, "error")], good: expected}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_rows_that_no_token_can_be_chosen_from(model, value):
    engine = Engine(model, num_blocks=64)
    first, last = engine.add(SHORT, 3), engine.add(LONG, 3)
    tokens = {made.request: made.token for made in engine.step()}
    with spoiled(model, value, 1):
        made = engine.step()
    assert [(one.request, one.reason) for one in made] == [(first, ""), (last, "error")]
    said = run(engine)
    assert said.keys() == {first}
    assert [tokens[first], made[0].token, said[first][0][0]] == list(engine.tokens(SHORT, 3))


def test_single_logits_of_minus_infinity_are_no_error(model):
    mask = torch.full((VOCAB,), -INF)
    mask[7] = 0
    engine = Engine(model, num_blocks=64)
    with spoiled(model, mask, 0):
        assert list(engine.tokens(SHORT, 2)) == list(engine.tokens(SHORT, 2, temperature=1.0)) == [7, 7]


def test_a_stream_says_what_is_wrong(model):
    engine = Engine(model, num_blocks=64)
    stream = engine.tokens(SHORT, NEW)
    assert 0 <= next(stream) < VOCAB
    with spoiled(model, NAN, 0):
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="the model's logits are not finite"):
                next(stream)
    assert run(engine) == {}


@pytest.mark.parametrize("kind", ["tokens", "stream"])
def test_a_stream_that_an_interrupt_keeps_from_its_caller_is_aborted(model, monkeypatch, kind):
    engine = Engine(model, byte_tokenizer(), num_blocks=64)

    def interrupted(self, *args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(engine, kind)(SHORT, NEW)
    assert engine.step() == []
    assert run(engine) == {}
