"""Rotary frequencies that depend on the longest sequence of a pass never leak from one request to another."""

import pytest

from pagedkv.integrations.transformers import Engine, PagedCache, use_pagedkv

from .models import greedy, greedy_batch, make_model, prompts

SHORT, LONG = prompts(20, 200)
SWITCH = 64
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SWITCH}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MODELS = {
    "longrope": ("Phi3", {"original_max_position_embeddings": SWITCH, "rope_parameters": LONGROPE}),
    "dynamic": ("Llama", {"max_position_embeddings": SWITCH, "rope_parameters": DYNAMIC}),
    "of layers": (
        "Gemma3",
        {"rope_parameters": {"sliding_attention": LONGROPE, "full_attention": {"rope_type": "default"}}},
    ),
}


def made(kind, **rope):
    family, options = MODELS[kind]
    options = options | {"rope_parameters": options["rope_parameters"] | rope}
    return make_model(family, eos_token_id=None, **options)


@pytest.mark.parametrize("kind", MODELS)
def test_an_engine_stays_below_the_switch(kind):
    model = made(kind)
    expected = greedy(model, [SHORT], 6)[0]
    with pytest.raises(ValueError, match=r"more than 64 tokens, and the engine has room for 256: pass max_seq_len=64"):
        Engine(model, num_blocks=16, max_seq_len=256)
    engine = Engine(model, num_blocks=16, max_seq_len=SWITCH)
    one, other = engine.tokens(SHORT, 6), engine.tokens(LONG[: SWITCH - 6], 6)
    assert [list(one), len(list(other))] == [expected, 6]
    use_pagedkv(model)
    assert greedy(model, [LONG], 6, past_key_values=PagedCache(model, num_blocks=64)) == greedy(made(kind), [LONG], 6)


def test_an_engine_takes_the_long_side_alone():
    expected = greedy(made("longrope"), [LONG], 6)[0]
    engine = Engine(made("longrope", short_factor=LONGROPE["long_factor"]), num_blocks=32, max_seq_len=256)
    other, one = engine.tokens(SHORT, 6), engine.tokens(LONG, 6)
    assert [list(one), len(list(other))] == [expected, 6]
    changed_too_late = made("longrope")
    changed_too_late.config.rope_parameters["short_factor"] = LONGROPE["long_factor"]
    with pytest.raises(ValueError, match="pass max_seq_len=64"):
        Engine(changed_too_late, num_blocks=32, max_seq_len=256)


def test_generate_batch_warns():
    model = made("longrope")
    use_pagedkv(model)
    with pytest.warns(UserWarning, match=r"rotates all requests of Phi3ForCausalLM .* more than 64 tokens"):
        greedy_batch(model, [SHORT], 2)
