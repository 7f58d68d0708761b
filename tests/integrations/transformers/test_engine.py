"""Engine: the same tokens as ``model.generate`` beside any other requests, and no lost blocks."""

import copy
from weakref import ref

import numpy as np
import pytest
import torch
import transformers

import pagedkv
from pagedkv.integrations.transformers import Engine, sampling, text, use_pagedkv
from pagedkv.memory import AllBlocksCleared

from .byte_tokenizer import byte_tokenizer, word_tokenizer
from .models import FAMILIES, SIZES, VOCAB, eager_model, make_model, prompts

NEW = 8
TEXTS = prompts(3, 40, 17, 33, 5)
TEXTS += [TEXTS[1][:32] + more for more in prompts(4, 6)]  # two blocks of another one


@pytest.fixture(scope="module")
def model():
    return make_model("Llama", eos_token_id=None)


@pytest.fixture(scope="module")
def expected(model):
    """The tokens of generate for each prompt alone, with transformers' own attention."""
    model.set_attn_implementation("eager")
    options = {"do_sample": False, "max_new_tokens": NEW}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in TEXTS]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def engine_for(model, num_blocks=64, **options):
    return Engine(model, num_blocks=num_blocks, **options)


def finish(engine):
    """Run all requests to the end; return their tokens and reasons, and check that the cache is empty and whole."""
    tokens, reasons = {}, {}
    for request, token, reason, *_ in engine.run():
        tokens.setdefault(request, []).append(token)
        if reason:
            reasons[request] = reason
            engine.cache.check()
    assert engine.cache.stats().used == 0
    assert not engine._requests
    assert not engine._dropped
    return tokens, reasons


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 10, "max_num_seqs": 4},
        {"num_blocks": 13, "block_size": 4, "prefix_cache": False},
        {"num_blocks": 13, "block_size": 4, "prefix_cache": False, "swap": "1MiB"},
    ],
    ids=["together", "in chunks", "in a pool that is too small for all", "in one and host memory"],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_greedy_tokens_are_those_of_generate(model, expected, options, device):
    engine = engine_for(model if device == "cpu" else copy.deepcopy(model).to(device), **options)
    requests = [engine.add(ids, NEW) for ids in TEXTS]
    tokens, reasons = finish(engine)
    assert [tokens[request] for request in requests] == expected
    assert set(reasons.values()) == {"length"}
    assert (engine.scheduler.num_preempted > 0) == (options.get("num_blocks") == 13)
    assert (engine.scheduler.num_swapped > 0) == ("swap" in options)
    assert (engine.cache.stats().hit_tokens > 0) == options.get("prefix_cache", True)


def test_a_closed_engine_keeps_no_memory_for_swaps(model):
    engine = engine_for(model, swap="1MiB")
    store = ref(engine._swap._patient._store)
    for _ in range(2):
        engine.close()
        assert store() is None


@pytest.mark.parametrize("family", ["Bloom", "StableLm"])
def test_models_whose_layers_get_no_keyword(family):
    options = {"do_sample": False, "max_new_tokens": NEW}
    expected = [
        eager_model(family).generate(torch.tensor([ids]), eos_token_id=None, **options)[0, len(ids) :].tolist()
        for ids in TEXTS[:3]
    ]
    engine = engine_for(make_model(family), eos_token_id=(), max_num_batched_tokens=20)
    requests = [engine.add(ids, NEW) for ids in TEXTS[:3]]
    tokens, _ = finish(engine)
    assert [tokens[request] for request in requests] == expected


def test_the_text_part_of_a_model_with_images():
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma4Config(
        text_config=SIZES | FAMILIES["Gemma4 E4B"],
        vision_config=vision | {"num_key_value_heads": 2, "head_dim": 16},
        audio_config=None,
        tie_word_embeddings=False,
        **{f"{name}_token_id": VOCAB - 1 for name in ("image", "boi", "eoi", "video", "audio")},
    )
    torch.manual_seed(7)
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    texts = [[token % (VOCAB - 2) + 1 for token in text] for text in TEXTS[:3]]
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    expected = [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in texts]
    engine = engine_for(model, eos_token_id=(), max_num_batched_tokens=20)
    requests = [engine.add(ids, NEW) for ids in texts]
    tokens, _ = finish(engine)
    assert [tokens[request] for request in requests] == expected


@pytest.mark.parametrize("ends", [0, 1], ids=["one of them", "a list of them"])
def test_end_tokens_end_a_text(model, expected, ends):
    token = expected[1][4]
    engine = engine_for(model, eos_token_id=[VOCAB - 1, token] if ends else token)
    stopped = engine.add(TEXTS[1], NEW)
    at_last = engine.add(TEXTS[1], expected[1].index(token) + 1)
    tokens, reasons = finish(engine)
    assert tokens[stopped] == tokens[at_last] == expected[1][: expected[1].index(token) + 1]
    assert reasons == {stopped: "stop", at_last: "stop"}
    assert list(engine.tokens(TEXTS[1], NEW)) == tokens[stopped][:-1]


def test_several_streams_are_read_in_turn(model, expected):
    engine = engine_for(model)
    streams = [engine.tokens(ids, NEW) for ids in TEXTS[:3]]
    assert [list(step) for step in zip(*streams, strict=True)] == [
        list(step) for step in zip(*expected[:3], strict=True)
    ]
    assert finish(engine) == ({}, {})


def test_a_stream_takes_no_token_of_other_requests(model, expected):
    """It runs steps of all; what these give to others waits for `step`, unless they are aborted."""
    engine = engine_for(model)
    request, other = (engine.add(ids, NEW) for ids in TEXTS[:2])
    assert list(engine.tokens(TEXTS[2], NEW)) == expected[2]
    assert not engine.abort(request)  # it has ended
    late = engine.add(TEXTS[1], NEW)
    stream = engine.tokens(TEXTS[0], NEW)
    next(stream)
    assert engine.abort(late)
    tokens, reasons = finish(engine)
    assert tokens == {request: expected[0], other: expected[1]}
    assert reasons == dict.fromkeys([request, other], "length")
    assert list(stream) == expected[0][1:]


def test_leaving_a_stream_and_abort_free_the_blocks(model, expected):
    engine = engine_for(model)
    left, aborted, stays = (engine.tokens(ids, NEW) for ids in TEXTS[:3])
    assert [next(left), next(aborted), next(stays)] == [tokens[0] for tokens in expected[:3]]
    left.close()
    assert engine.abort(1)
    assert engine.scheduler.num_running == 2
    assert list(aborted) == []
    assert next(left, None) is None
    assert list(stays) == expected[2][1:]
    assert finish(engine) == ({}, {})
    assert not engine.abort(1)
    with pytest.raises(KeyError, match="no request 3: it has ended or was never added"):
        engine.abort(3)


def test_a_stream_that_is_left_before_its_first_token_is_aborted(model, tokenizer):
    engine = engine_for(model, tokenizer=tokenizer)
    engine.tokens(TEXTS[0], NEW).close()
    engine.stream("!", NEW).close()
    dropped = engine.stream("!", NEW)
    del dropped
    assert engine.step() == []
    assert engine.scheduler.num_waiting == 0
    assert finish(engine) == ({}, {})


def test_a_stream_closed_during_a_step_ends_after_it(model, expected):
    """The garbage collector may close a stream in a reference cycle at any time."""
    engine = engine_for(model)
    stays, left = (engine.tokens(ids, NEW) for ids in TEXTS[:2])
    hook = model.register_forward_pre_hook(lambda *_: left.close())
    try:
        assert list(stays) == expected[0]
    finally:
        hook.remove()
    assert finish(engine) == ({}, {})


def test_a_stream_closed_during_a_cache_call_ends_with_the_next_step(model, expected):
    engine = engine_for(model, events=lambda event: isinstance(event, AllBlocksCleared) and left.close())
    left = engine.tokens(TEXTS[0], 3 * NEW)
    next(left)
    engine.cache.reset()
    assert list(engine.tokens(TEXTS[1], NEW)) == expected[1]
    assert finish(engine) == ({}, {})


def test_a_request_that_is_aborted_in_the_middle_of_its_prompt(model, expected):
    engine = engine_for(model, max_num_batched_tokens=8)
    request, other = engine.add(TEXTS[1], NEW), engine.add(TEXTS[0], NEW)
    assert engine.step() == []
    assert engine.cache.stats().used > 0
    engine.abort(request)
    assert finish(engine)[0] == {other: expected[0]}


def test_after_a_reset_nothing_of_earlier_weights_is_found():
    model = make_model("Llama")
    engine = engine_for(model)
    list(engine.tokens(TEXTS[1], NEW))
    with torch.no_grad():
        model.model.embed_tokens.weight.neg_()
    expected = list(engine_for(model).tokens(TEXTS[1], NEW))
    assert list(engine.tokens(TEXTS[1], NEW)) != expected
    engine.cache.reset()
    assert list(engine.tokens(TEXTS[1], NEW)) == expected


def test_a_step_that_fails_can_be_made_again(model, expected, monkeypatch):
    engine = engine_for(model)
    request = engine.add(TEXTS[1], NEW)
    first = engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", lambda x: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.cache.check()
    tokens, _ = finish(engine)
    assert [first[0].token, *tokens[request]] == expected[1]


def test_a_request_of_a_step_that_failed_can_be_aborted(model, monkeypatch):
    engine = engine_for(model)
    request = engine.add(TEXTS[1], NEW)
    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", lambda x: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.abort(request)
    assert engine.cache.stats().used == 0


def test_a_step_interrupted_after_planning_is_planned_again(model, expected, monkeypatch):
    engine = engine_for(model)
    request, schedule = engine.add(TEXTS[1], NEW), engine.scheduler.schedule

    def interrupted():
        schedule()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert finish(engine)[0] == {request: expected[1]}


def test_a_step_whose_listener_fails_can_be_made_again(model, expected):
    """Events of the cache come at the end of a step, too."""
    stored = []

    def listen(event):
        stored.append(event)
        if len(stored) == 1:
            raise ConnectionError

    engine = engine_for(model, events=listen)
    request = engine.add(TEXTS[1], NEW)
    with pytest.raises(ConnectionError):
        engine.step()
    engine.cache.check()
    assert finish(engine)[0] == {request: expected[1]}
    assert stored


def test_a_step_needs_the_attention_of_pagedkv(model, expected):
    """Other attention would see only the new tokens, and mix those of all requests."""
    engine = engine_for(model)
    requests = [engine.add(ids, NEW) for ids in TEXTS[:2]]
    first = [sampled.token for sampled in engine.step()]
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match=r"is eager now, which reads no PagedKVCache: call use_pagedkv\(model\)"):
        engine.step()
    use_pagedkv(model)
    tokens = finish(engine)[0]
    assert [[one, *tokens[request]] for one, request in zip(first, requests, strict=True)] == expected[:2]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "tokens must have at least one token"),
        ([1] * 500, {"max_tokens": 500}, "a request can have 512 tokens"),
        ("text", {}, "text needs a tokenizer"),
        ([1, VOCAB], {}, "a token of the prompt is 97, and LlamaForCausalLM has 97: it needs its own tokenizer"),
        ([1], {"temperature": -1.0}, "temperature must be at least 0"),
        ([1], {"temperature": float("nan")}, "temperature must be finite in float32, got nan"),
        ([1], {"temperature": 10**400}, "temperature must be finite in float32, got 1000"),
        ([1], {"top_k": -1}, "top_k must be at least 0"),
        ([1], {"top_p": 1.5}, "top_p must be from 0 to 1"),
        ([1], {"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_refusals_leave_nothing(model, prompt, options, message):
    engine = engine_for(model)
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, **{"max_tokens": 5} | options)
    assert finish(engine) == ({}, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "1"}, "temperature must be a number, got str"),
        ({"top_k": 1.5}, "top_k must be an int, got float"),
        ({"top_p": None}, "top_p must be a number, got NoneType"),
        ({"seed": True}, "seed must be an int, got bool"),
    ],
)
def test_options_of_another_type(model, options, message):
    engine = engine_for(model)
    with pytest.raises(TypeError, match=message):
        engine.add([1], 5, **options)
    assert finish(engine) == ({}, {})


@pytest.mark.parametrize(
    ("family", "options"),
    [("PLBart", {"d_model": 64, "decoder_layers": 1, "decoder_attention_heads": 4}), ("Roberta", {"is_decoder": True})],
    ids=["it takes none", "its first one is not 0"],
)
def test_a_model_that_counts_positions_itself_is_refused(family, options):
    """Otherwise their tokens would be silently wrong."""
    with pytest.raises(ValueError, match=f"{family}ForCausalLM counts positions itself, .* use model.generate with"):
        engine_for(make_model(family, **options))


def test_an_engine_needs_a_pool_and_a_decoder(model):
    with pytest.raises(ValueError, match="either num_blocks or memory must be given"):
        Engine(model)
    for block_size in (0, 513):  # the model has 512 positions
        with pytest.raises(ValueError, match=f"block_size must be .*, got {block_size}$"):
            Engine(model, num_blocks=4, block_size=block_size)
    with pytest.raises(ValueError, match="LlamaModel has no head that gives logits: load it with AutoModelForCausalLM"):
        Engine(model.model, num_blocks=4)
    with pytest.raises(TypeError, match="eos_token_id must be an int, got str"):
        Engine(model, num_blocks=4, eos_token_id="<eos>")
    assert Engine(model, memory="1MiB").cache.pool.num_blocks == 2**20 // (2 * 2 * 16 * 2 * 16 * 4)


def test_draws_depend_on_the_seed_alone(model):
    options = {"max_tokens": NEW, "temperature": 1.5, "top_k": 50, "top_p": 0.9}

    def drawn(beside, seeds):
        engine = engine_for(model)
        requests = [engine.add(TEXTS[0], **options, seed=seed) for seed in seeds]
        for ids in beside:
            engine.add(ids, NEW)
        tokens = finish(engine)[0]
        return [tokens[request] for request in requests]

    alone = [drawn([], [seed])[0] for seed in (1, 2)]
    assert alone[0] != alone[1]
    assert drawn(TEXTS[1:], [2, 1, None])[:2] == alone[::-1]


def test_draws_follow_the_distribution():
    p = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
    logits = torch.tensor(np.log(p), dtype=torch.float32)
    cases = [
        ({}, p),
        ({"temperature": 0.5}, p**2),
        ({"top_k": 2}, [0, 0.4, 0, 0.25, 0]),
        ({"top_p": 0.6}, [0, 0.4, 0, 0.25, 0]),
        ({"top_p": 0.7}, [0, 0.4, 0, 0.25, 0.2]),
        ({"top_k": 3, "top_p": 0.7}, [0, 0.4, 0, 0.25, 0]),
        ({"top_p": 0.0}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.4}, [0, 0.4, 0, 0.25, 0.2]),
        ({"min_p": 0.3, "temperature": 0.5}, [0, 0.16, 0, 0.0625, 0]),
        ({"min_p": 0.5, "top_p": 0.7}, [0, 0.4, 0, 0.25, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0, 0]),
    ]
    for options, left in cases:
        left = np.array(left) / np.sum(left)
        samplings = [sampling.Sampling(**{"temperature": 1.0} | options, seed=seed) for seed in range(1000)]
        tokens = sampling.choose(logits.expand(len(samplings), -1), samplings, [5] * len(samplings))
        counts = np.bincount(tokens, minlength=5) / len(samplings)
        assert (counts[left == 0] == 0).all(), options
        assert np.abs(counts - left).max() < 0.06, options


def test_rows_are_chosen_each_in_its_way():
    logits = torch.tensor([[0.0, 5.0, 1.0]] * 3)
    greedy, one, drawn = sampling.Sampling(), sampling.Sampling(3.0, top_k=1), sampling.Sampling(1000.0, seed=3)
    assert [sampling.choose(logits, [greedy, one, drawn], [i] * 3)[:2] for i in range(20)] == [[1, 1]] * 20
    assert len({sampling.choose(logits[:1], [drawn], [i])[0] for i in range(50)}) == 3
    assert sampling.choose(logits[:0], [], []) == []


def test_draws_of_one_request_are_uniform():
    drawn = sampling.Sampling(1.0, seed=5)
    draws = np.sort([drawn.draw(i) for i in range(1000)])
    assert np.abs(draws - np.arange(1000) / 1000).max() < 0.05  # Kolmogorov-Smirnov


def test_a_step_that_fails_late_is_made_again_with_the_same_draws(model, monkeypatch):
    def drawn(fails):
        engine = engine_for(model)
        request, texts = engine.add(TEXTS[0], NEW, temperature=1.5, seed=1), []
        update = engine.scheduler.update
        while len(texts) < NEW:
            if fails:
                monkeypatch.setattr(engine.scheduler, "update", lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    engine.step()
                monkeypatch.setattr(engine.scheduler, "update", update)
            texts += [sampled.token for sampled in engine.step() if sampled.request == request]
        return texts

    assert drawn(fails=True) == drawn(fails=False)


@pytest.mark.parametrize("words", ["plain words", "naïve café, 中文 🙂 end", "🙂"])
def test_text_comes_in_whole_characters(tokenizer, words):
    decoder = text.TextDecoder(tokenizer)
    pieces = [decoder.push(token) for token in tokenizer(words).input_ids]
    assert "".join(pieces) == words
    assert text.INCOMPLETE not in "".join(pieces)
    decoder = text.TextDecoder(tokenizer)
    *most, _ = tokenizer("é").input_ids
    assert [decoder.push(token) for token in most] == [""]
    assert decoder.finish() == text.INCOMPLETE


def test_a_special_token_leaves_the_space_of_the_next_word():
    words = word_tokenizer("one", "two")
    many = 20 * [words.bos_token_id]
    ids = [*many, *words("one").input_ids, *many, *words("two").input_ids]
    decoder = text.TextDecoder(words)
    assert [*map(decoder.push, ids), decoder.finish()] == [*20 * [""], "one", *20 * [""], " two", ""]
    assert words.decode(ids, skip_special_tokens=True) == "one two"


def test_a_text_is_streamed_in_three_lines(tokenizer):
    model = make_model("Llama", vocab_size=256, eos_token_id=None)
    engine = Engine(model, tokenizer, memory="1MiB")
    pieces = list(engine.stream("def main(", max_tokens=9))
    tokens = list(engine.tokens("def main(", max_tokens=9))
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert isinstance(engine.scheduler, pagedkv.Scheduler)
