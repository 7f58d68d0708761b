"""Log-probabilities: those of the model's own logits for the same text, however the engine computes it."""

import numpy as np
import pytest
import torch

from pagedkv.integrations.transformers import Engine
from pagedkv.integrations.transformers.logprobs import token_logprobs

from .models import SIZES, VOCAB, error_bound, make_model, prompts

NEW = 8
TEXTS = prompts(3, 40, 17, 33, 5)
TEXTS += [TEXTS[1][:32] + more for more in prompts(4, 6)]  # two blocks of another one
SMALL_POOL = {"num_blocks": 13, "block_size": 4}


@pytest.fixture(scope="module")
def model():
    return make_model("Llama", eos_token_id=None)


def finish(engine, texts, **options):
    """What each request gets, by steps."""
    requests = [engine.add(text, NEW, **options) for text in texts]
    made = {request: [] for request in requests}
    for sampled in engine.run():
        made[sampled.request].append(sampled)
    engine.cache.check()
    assert engine.cache.stats().used == 0
    return list(made.values())


def assert_right(model, text, made, num_top):
    """Compare with a pass of transformers over the prompt and what was generated."""
    tokens = [sampled.token for sampled in made]
    exact, bound = error_bound(model, text + tokens)
    exact = exact.log_softmax(-1)
    got = [*made[0].prompt_logprobs, *((one.token, one.logprob, one.top_logprobs) for one in made)]
    assert [one[0] for one in got] == (text + tokens)[1:]
    for row, (token, logprob, top) in zip(exact, got, strict=False):
        assert abs(logprob - row[token]) <= 2 * bound
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert np.abs([value for _, value in top] - row.topk(num_top).values.numpy()).max() <= 2 * bound
    assert all(one.prompt_logprobs is None for one in made[1:])


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 10, "max_num_seqs": 4}, SMALL_POOL, SMALL_POOL | {"swap": "1MiB"}],
    ids=["together", "in chunks", "in a pool that is too small for all", "in one and host memory"],
)
def test_they_are_those_of_the_model(model, options):
    engine = Engine(model, **{"num_blocks": 64} | options)
    for _ in range(2):  # the prefix cache has all of the second round
        texts = finish(engine, TEXTS, logprobs=3, prompt_logprobs=3, temperature=2.0, top_k=5, seed=1)
    for text, made in zip(TEXTS, texts, strict=True):
        assert_right(model, text, made, 3)
        assert made[0].num_cached == 0
    assert (engine.scheduler.num_preempted > 0) == ("block_size" in options)
    assert (engine.scheduler.num_swapped > 0) == ("swap" in options)


def test_of_a_model_whose_layers_have_states():
    model = make_model("Lfm2", eos_token_id=None)
    engine = Engine(model, num_blocks=64, max_num_batched_tokens=24)
    for _ in range(2):
        texts = finish(engine, TEXTS, logprobs=2, prompt_logprobs=2)
    for text, made in zip(TEXTS, texts, strict=True):
        assert_right(model, text, made, 2)


def test_the_blocks_of_such_a_request_are_found_by_others(model):
    engine = Engine(model, num_blocks=64)
    [[first, *_], [second, *_]] = finish(engine, TEXTS[1:2], prompt_logprobs=0) + finish(engine, TEXTS[1:2], logprobs=0)
    assert (first.num_cached, second.num_cached) == (0, 32)
    assert (first.logprob, first.top_logprobs, second.top_logprobs, second.prompt_logprobs) == (None, (), [], None)
    assert [one.top_logprobs for one in first.prompt_logprobs] == [[]] * 39


def test_penalties_and_draws_leave_them_as_they_are(model):
    engine = Engine(model, num_blocks=64)
    [plain], [other] = (
        finish(engine, TEXTS[:1], logprobs=VOCAB + 1, **options)
        for options in ({}, {"temperature": 9.0, "repetition_penalty": 50.0, "min_tokens": NEW, "seed": 3})
    )
    assert plain[0].top_logprobs == other[0].top_logprobs
    assert other[0].logprob == dict(plain[0].top_logprobs)[other[0].token]
    assert len(plain[0].top_logprobs) == VOCAB


def test_of_equal_ones_the_smaller_token_comes_first():
    logits = torch.zeros(2, 300).index_fill(1, torch.tensor([7, 290, 8]), 1.0)
    logits[1, 299] = 2.0
    made = token_logprobs(logits, [7, 300], 2)
    assert [[token for token, _ in one.top_logprobs] for one in made] == [[7, 8], [299, 7]]
    assert [one.logprob for one in made] == [made[0].top_logprobs[0][1], -np.inf]  # no row gives token 300


def test_a_prompt_of_one_token_has_none(model):
    [[first, *_]] = finish(Engine(model, num_blocks=64), [[5]], prompt_logprobs=1)
    assert first.prompt_logprobs == []


def test_a_long_prompt_takes_several_pieces(model, monkeypatch):
    [whole] = finish(Engine(model, num_blocks=64), TEXTS[1:2], prompt_logprobs=2)
    monkeypatch.setattr("pagedkv.integrations.transformers.logprobs._MOST_LOGITS", 7 * SIZES["vocab_size"])
    [pieces] = finish(Engine(model, num_blocks=64), TEXTS[1:2], prompt_logprobs=2)
    assert pieces == [sampled._replace(request=0) for sampled in whole]


def test_a_request_that_is_not_finite_has_none():
    model = make_model("Llama", eos_token_id=None)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    bad, good = [3, 7, 4], [3, 5, 4]
    [[failed], made] = finish(Engine(model, num_blocks=64), [bad, good], logprobs=1, prompt_logprobs=1)
    assert (failed.reason, failed.logprob, failed.prompt_logprobs) == ("error", None, None)
    assert len(made[0].prompt_logprobs) == 2


def test_a_step_that_fails_late_keeps_one_of_each(model, monkeypatch):
    [expected] = finish(Engine(model, num_blocks=64, max_num_batched_tokens=16), TEXTS[1:2], prompt_logprobs=0)
    engine = Engine(model, num_blocks=64, max_num_batched_tokens=16)
    engine.add(TEXTS[1], NEW, prompt_logprobs=0)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "update", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    made = list(engine.run())
    assert [one.logprob for one in made[0].prompt_logprobs] == [one.logprob for one in expected[0].prompt_logprobs]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"logprobs": -1}, ValueError, "logprobs must be at least 0, got -1"),
        ({"prompt_logprobs": True}, TypeError, "prompt_logprobs must be an int, got bool"),
        ({"logprob": 1}, TypeError, r"a request has no option logprob, only temperature, .*; did you mean logprobs\?"),
    ],
)
def test_refusals(model, options, error, message):
    engine = Engine(model, num_blocks=4)
    with pytest.raises(error, match=message):
        engine.add([1], 5, **options)
    assert list(engine.run()) == []
