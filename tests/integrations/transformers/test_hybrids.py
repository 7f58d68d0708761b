"""Models whose layers have states: the texts of eager attention, whatever happens to the states meanwhile."""

import copy
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from pagedkv import CapacityError
from pagedkv.integrations.transformers import CachedPass, Engine, PagedCache, use_pagedkv
from pagedkv.integrations.transformers.models import kv_states, kv_windows
from pagedkv.layer_states import LayerStates

from .byte_tokenizer import byte_tokenizer
from .models import HYBRIDS, eager_model, greedy, make_model, prompts

NEW = 8
TEXTS = prompts(21, 2, 40, 1, 33, 17)
# One of each kind: the delta rule, Mamba 2 in layers that attend, and convolutions alone.
SHORT = {"Qwen3_5", "FalconH1", "Lfm2"}
families = pytest.mark.parametrize(
    "family", [pytest.param(x, marks=() if x in SHORT else pytest.mark.long) for x in HYBRIDS]
)


@pytest.fixture(scope="module")
def model():
    model = make_model("Qwen3_5", eos_token_id=None)
    use_pagedkv(model)
    return model


@pytest.fixture(scope="module")
def expected():
    return alone("Qwen3_5", TEXTS)


def alone(family, texts):
    """The greedy tokens of each text alone, with eager attention."""
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    return [eager_model(family).generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in texts]


def finish(engine):
    """The tokens of each request; the cache must be whole in each step, and empty in the end."""
    said = {}
    while engine._requests:
        for made in engine.step():
            said.setdefault(made.request, []).append(made.token)
        engine.cache.check()
    stats = engine.cache.stats()
    assert (stats.used, stats.used_states) == (0, 0)
    return said


@pytest.mark.parametrize("family", HYBRIDS)
def test_configurations_say_which_states_layers_make(family):
    model = make_model(family).bfloat16()
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.arange(1, 8)[None], past_key_values=cache, use_cache=True)
    with_state = {i: x for i, x in enumerate(cache.layers) if isinstance(x, LinearAttentionCacheLayerMixin)}
    made = {i: x for i, x in with_state.items() if x.conv_states[0] is not None}  # in transformers 5.20 MLPs have one
    read = kv_states(model)
    assert read.layers == [*made]
    assert kv_windows(model).layers == [i for i, x in enumerate(cache.layers) if getattr(x, "keys", None) is not None]
    for layer in made.values():
        states = {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
        assert read.shapes == {name: x.shape[1:] for name, x in states.items() if x is not None}
        assert all(x is None or str(x.dtype)[6:] == str(read.arrays("bfloat16")[name][1]) for name, x in states.items())


@families
def test_generate_gives_the_text_of_eager_attention(family):
    model = make_model(family)
    use_pagedkv(model)
    cache, texts = PagedCache(model, num_blocks=64), prompts(40, 70, 9)
    for ways in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        assert greedy(model, texts, NEW, past_key_values=cache, **ways) == greedy(
            eager_model(family), texts, NEW, **ways
        )
        cache.kv.check()
        cache.reset()
    assert cache.kv.stats().used_states == 0


class Float64(SimpleNamespace):
    """torch for the file of a model, whose layers compute in float32 whatever the weights are."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def logits_in_chunks(model, texts, chunk, cache):
    """The logits of texts of equal length that come in chunks."""
    parts, length = [], texts.shape[1]
    with torch.inference_mode():
        for start in range(0, length, chunk):
            positions = torch.arange(start, min(start + chunk, length))[None].expand(len(texts), -1)
            ids = texts[:, start : start + chunk]
            parts.append(model(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits)
    return torch.cat(parts, dim=1)


@families
@pytest.mark.parametrize(
    "chunk", [pytest.param(70, marks=pytest.mark.long), 64, pytest.param(16, marks=pytest.mark.long), 7, 1]
)
def test_logits_are_within_the_error_bound(family, chunk):
    """The bound is twice the largest error of eager attention over the same chunks, with 8 texts.

    Nemotron-H and Zamba 2 compute a token alone in another way than in a chunk, so that other chunks are no reference.
    """
    texts = torch.tensor(prompts(*[70] * 8))
    model, eager = make_model(family), eager_model(family)
    exact, file = copy.deepcopy(eager).double(), sys.modules[type(eager).__module__]
    with mock.patch.object(file, "torch", Float64()), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        right = logits_in_chunks(exact, texts, chunk, DynamicCache(config=exact.config))
    error = (logits_in_chunks(eager, texts, chunk, DynamicCache(config=eager.config)) - right).abs().max()
    use_pagedkv(model)
    ours = logits_in_chunks(model, texts, chunk, PagedCache(model, num_blocks=80))
    assert (ours - right).abs().max() <= 2 * error


@families
@pytest.mark.parametrize("budget", [256, pytest.param(20, marks=pytest.mark.long), 7])
def test_requests_that_come_while_others_run(family, budget):
    expected = alone(family, TEXTS)
    engine, requests, said = Engine(make_model(family), num_blocks=96, max_num_batched_tokens=budget), [], {}
    for ids in TEXTS:
        requests.append(engine.add(ids, NEW, ignore_eos=True))
        for made in engine.step() + engine.step():
            said.setdefault(made.request, []).append(made.token)
    for request, tokens in finish(engine).items():
        said.setdefault(request, []).extend(tokens)
    assert [said[request] for request in requests] == expected


# -- Engine
def test_requests_that_begin_and_go_on_in_one_step(model):
    """The second step has 10 tokens of each: all of one prompt, then the rest of the other."""
    texts = [TEXTS[2][:30], TEXTS[4][:10]]
    engine = Engine(model, num_blocks=64, max_num_batched_tokens=20, prefix_cache=False)
    first = engine.add(texts[0], NEW)
    assert engine.step() == []
    second = engine.add(texts[1], NEW, priority=-1)
    said = finish(engine)
    assert [said[first], said[second]] == alone("Qwen3_5", texts)


def test_few_states_and_blocks_for_many_requests(model, expected):
    stats = Engine(model, num_blocks=8).cache.stats()
    engine = Engine(model, num_blocks=34, block_size=4, state_memory=8 * stats.state_bytes // stats.num_states)
    assert engine.cache.max_seqs == engine.cache.stats().num_states == 8
    requests = [engine.add(ids, NEW) for ids in TEXTS * 4]
    said = finish(engine)
    assert [said[request] for request in requests] == expected * 4
    stats = engine.cache.stats()
    assert engine.scheduler.num_preempted > 0
    assert stats.preempted_tokens > stats.preempted_hit_tokens > 0
    assert (stats.used_states, stats.num_states) == (0, 8)


@pytest.mark.parametrize("swap", [None, "16MiB"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_preempted_requests_go_on(model, expected, kv_dtype, prefix_cache, swap):
    engine = Engine(model, num_blocks=15, block_size=4, prefix_cache=prefix_cache, swap=swap, kv_dtype=kv_dtype)
    if kv_dtype is not None:
        expected = [x.tokens for x in Engine(model, num_blocks=64, kv_dtype=kv_dtype).generate(TEXTS, NEW)]
    requests = [engine.add(ids, NEW) for ids in TEXTS]
    said = finish(engine)
    assert [said[request] for request in requests] == expected
    assert engine.scheduler.num_preempted > 0
    assert (engine.scheduler.num_swapped > 0) == (swap is not None)
    engine.close()


@pytest.mark.parametrize("place", ["model", "choice", "stored states"])
def test_a_step_that_fails_is_made_again(model, expected, monkeypatch, place):
    engine = Engine(model, num_blocks=64, max_num_batched_tokens=16)
    requests = [engine.add(ids, NEW) for ids in TEXTS[:3]]
    said = {}
    for number in range(60):
        if number % 2:
            with monkeypatch.context() as patch:
                error = mock.Mock(side_effect=RuntimeError("no power"))
                if place == "model":
                    patch.setattr(model.model.norm, "forward", error)
                elif place == "choice":
                    patch.setattr("pagedkv.integrations.transformers.results.choose", error)
                else:
                    patch.setattr(engine.cache, "write_states", error)
                if engine._requests:
                    with pytest.raises(RuntimeError, match="no power"):
                        engine.step()
        else:
            for made in engine.step():
                said.setdefault(made.request, []).append(made.token)
        engine.cache.check()
    assert not engine._requests
    assert [said[request] for request in requests] == expected[:3]


@pytest.mark.parametrize("place", ["embed_tokens", "layers.3.self_attn.k_proj", "layers.2.linear_attn"])
def test_what_is_not_finite_ends_its_request_alone(model, expected, place):
    """A fault while one of two requests computes a chunk of its prompt."""
    engine = Engine(model, num_blocks=64, max_num_batched_tokens=16, block_size=4)
    other = engine.add(TEXTS[1], NEW)
    made = engine.step()
    spoiled = engine.add(TEXTS[2], NEW)

    def spoil(module, args, out):
        if out.shape[1] > 1:  # not the token of the other request
            out[:, 1:3] = float("nan")

    hook = model.get_submodule(f"model.{place}").register_forward_hook(spoil)
    made += engine.step()
    hook.remove()
    assert [x.reason for x in made if x.request == spoiled] == ["error"]
    assert engine.cache.stats().cached_states == 0
    said = finish(engine)
    assert [x.token for x in made if x.request == other] + said[other] == expected[1]
    assert engine.cache.find(TEXTS[2]) == 0
    assert list(engine.tokens(TEXTS[2], NEW)) == expected[2]


def test_a_state_that_is_not_finite_is_no_snapshot(model):
    """A fault of a kernel that the logits of the step do not show."""
    engine = Engine(model, num_blocks=64, max_num_batched_tokens=16, block_size=4)

    def spoil(cache, states, layer, *args):
        return cache.layers[layer].recurrent_states[0].copy_(states * float("nan"))

    request = engine.add(TEXTS[2], NEW)
    with mock.patch.object(Cache, "update_recurrent_state", spoil):
        [made] = engine.step()
    assert (made.request, made.reason) == (request, "error")
    assert (engine.cache.find(TEXTS[2]), engine.cache.stats().cached_states) == (0, 0)


def test_aborted_requests_free_their_states(model):
    engine = Engine(model, num_blocks=64, max_num_batched_tokens=8)
    stream = engine.tokens(TEXTS[1], NEW)
    request = engine.add(TEXTS[2], NEW)
    next(stream)
    assert engine.cache.stats().used_states == 2
    engine.abort(request)
    del stream
    engine.step()
    assert finish(engine) == {}


# -- prefixes
def test_a_repeated_prompt_goes_on_from_its_last_full_block(model, expected):
    engine = Engine(model, num_blocks=64, block_size=4)
    for cached in (0, 36):  # a block less than the 40 tokens, since the last one is computed in any case
        request = engine.add(TEXTS[2], NEW)
        made = list(engine.run())
        assert [x.token for x in made] == expected[2]
        assert {(x.request, x.num_cached) for x in made} == {(request, cached)}


def test_prompts_find_where_others_have_parted(model):
    common, ends = prompts(52)[0], prompts(*[10] * 8)
    texts = [common + end for end in ends]
    expected = alone("Qwen3_5", texts)
    engine = Engine(model, num_blocks=128, block_size=4)
    requests = [engine.add(ids, NEW) for ids in texts]
    made = list(engine.run())
    assert [[x.token for x in made if x.request == request] for request in requests] == expected
    cached = {x.request: x.num_cached for x in made}
    assert [cached[request] for request in requests] == [0, 0, *[52] * 6]


def test_a_chat_computes_its_new_tokens(model):
    engine, text, more = Engine(model, num_blocks=64, block_size=4), [], TEXTS[0]
    for turn in range(3):
        text = text + more
        expected = alone("Qwen3_5", [text])[0]
        request, made = engine.add(text, NEW), []
        while engine._requests:
            made += engine.step()
            engine.cache.check()
        assert [x.token for x in made] == expected
        # The last token of a turn is not computed, and at most a block before it is again.
        assert len(text) - made[0].num_cached <= len(more) + 1 + 3
        assert {x.request for x in made} == {request}
        text, more = text + expected, TEXTS[4][turn : turn + 5]


def test_a_snapshot_stays_where_a_caller_asks_for_it(model):
    engine, text = Engine(model, num_blocks=64, block_size=4), TEXTS[2]
    for wanted, found in (((), 0), ((13,), 12)):
        engine.add(text, 1, snapshot_at=wanted, salt=str(wanted))
        list(engine.run())
        assert engine.cache.find(text[:15] + TEXTS[0], str(wanted)) == found


def test_a_snapshot_stays_where_messages_end(model):
    def templated(messages, *, add_generation_prompt, return_dict):
        return [*messages[0]["content"], *([9] * 10 if add_generation_prompt else [])]

    tokenizer = mock.Mock(chat_template="a template", apply_chat_template=templated)
    engine = Engine(model, tokenizer, num_blocks=64, block_size=4)
    engine.add([{"role": "user", "content": TEXTS[0]}], 1)
    list(engine.run())
    assert engine.cache.find([*TEXTS[0], 9, 9, 8, 8, 8]) == 20  # of 21


@pytest.mark.parametrize("dropped", ["", "[thinking]"])
def test_a_chat_finds_its_messages_again(dropped):
    """Where the template ends a prompt with what is in no later one, too."""
    tokenizer, vocab = byte_tokenizer(), 94  # of them the first are the printable characters of ASCII
    tokenizer.chat_template = (
        "{% for message in messages %}({{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}" + dropped + "({% endif %}"
    )
    model = make_model("Qwen3_5", vocab_size=vocab, eos_token_id=None)
    use_pagedkv(model)
    engine, messages, known = Engine(model, tokenizer, num_blocks=128, block_size=4), [], 0
    for turn in range(3):
        messages.append({"role": "user", "content": "xyz"[turn] * 9})
        request, made = engine.add(messages, NEW), []
        prompt = engine.scheduler.tokens(request).tolist()
        while engine._requests:
            made += engine.step()
            engine.cache.check()
        assert len(prompt) - made[0].num_cached <= len(prompt) - known + 3
        known = len(prompt) - len(dropped) - 1 if dropped else len(prompt) + NEW - 1  # the last token is not computed
        messages.append({"role": "assistant", "content": tokenizer.decode([x.token for x in made])})
    assert made[0].num_cached > 2 * 9


# -- PagedCache
def test_a_pass_that_fails_leaves_the_states_as_they_were(model, expected):
    cache, ids = PagedCache(model, num_blocks=48), torch.tensor([TEXTS[2]])
    with torch.inference_mode():
        model(ids[:, :20], past_key_values=cache)
        before = {name: states.clone() for name, states in cache.kv.states.items()}
        for chunk in (ids[:, 20:], ids[:, 20:21]):
            fails = mock.patch.object(model.model.norm, "forward", side_effect=RuntimeError("no power"))
            with fails, pytest.raises(RuntimeError, match="no power"):
                model(chunk, past_key_values=cache)
        assert all(torch.equal(states, before[name]) for name, states in cache.kv.states.items())
    said = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    assert said[0, 40:].tolist() == expected[2]


def test_an_interrupt_while_states_are_stored_asks_for_a_reset(model, expected):
    cache, ids = PagedCache(model, num_blocks=48), torch.tensor([TEXTS[2]])
    with torch.inference_mode():
        model(ids[:, :20], past_key_values=cache)
        interrupts = mock.patch.object(cache.kv._state_arrays, "write", side_effect=KeyboardInterrupt)
        with interrupts, pytest.raises(KeyboardInterrupt):
            model(ids[:, 20:], past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"interrupted while it stored .* call reset\(\) before another text"):
            model(ids[:, 20:], past_key_values=cache)
    cache.reset()
    said = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    assert said[0, 40:].tolist() == expected[2]


def test_rows_are_repeated_and_selected(model):
    cache, ids = PagedCache(model, num_blocks=64), torch.tensor([TEXTS[2][:20], TEXTS[4][:20]])
    ends = torch.tensor([[5], [6], [7]])
    with torch.inference_mode():
        right = [
            eager_model("Qwen3_5")(torch.cat([ids[i], ends[j]])[None]).logits[0, -1] for j, i in enumerate((1, 1, 0))
        ]
        model(ids, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 2, 0]))
        made = model(ends, past_key_values=cache).logits[:, -1]
        cache.reorder_cache(torch.tensor([1, 1, 2]))
        again = model(ends, past_key_values=cache).logits[:, -1]
    assert torch.allclose(made, torch.stack(right), rtol=0, atol=1e-3)
    assert torch.allclose(again[0], again[1]) == torch.equal(ends[0], ends[1])
    cache.kv.check()


def test_too_few_states_for_the_rows(model):
    stats = Engine(model, num_blocks=8).cache.stats()
    cache = PagedCache(model, num_blocks=48, state_memory=2 * stats.state_bytes // stats.num_states)
    with pytest.raises(CapacityError, match="state_memory") as caught:
        greedy(model, TEXTS[:3], NEW, past_key_values=cache)
    assert "a state_memory for them if layers have a state" in caught.value.__notes__[0]
    assert greedy(model, TEXTS[:2], NEW, past_key_values=cache) == greedy(eager_model("Qwen3_5"), TEXTS[:2], NEW)


# -- refusals
def test_drafts_are_refused():
    model, text = make_model("Lfm2"), torch.tensor([TEXTS[2]])  # transformers refuses others itself
    use_pagedkv(model)
    cache = PagedCache(model, num_blocks=16)
    with pytest.raises(ValueError, match=r"has layers with a state, .*: generate without drafts"):
        model.generate(text, past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=NEW)
    model.generate(text, past_key_values=cache, max_new_tokens=2)
    cache.crop(0)
    with pytest.raises(ValueError, match="has layers with a state, which cannot go back to fewer tokens"):
        cache.crop(-1)


def test_generate_batch_says_what_to_use(model):
    with pytest.raises(ValueError, match=r"Qwen3_5ForCausalLM has layers with a state, .*: use .*Engine"):
        model.generate_batch([TEXTS[0]])


def test_a_forward_pass_keeps_no_states(model):
    kv = Engine(model, num_blocks=8).cache
    seq, _ = kv.add(3)
    forward_pass = CachedPass(kv, kv.slots(seq, 0, 3), kv.batch([seq], 3))
    with pytest.raises(ValueError, match="which a forward_pass does not keep: use a PagedCache or an Engine"):
        model(torch.tensor([[1, 5, 3]]), forward_pass=forward_pass)


def test_states_of_another_shape_than_the_configuration_says(model):
    cache = PagedCache(model, num_blocks=8)
    wrong = LayerStates(kv_states(model).layers, {"conv": (128, 4), "recurrent": (4, 16, 8)})
    with mock.patch("pagedkv.integrations.transformers.cache.kv_states", return_value=wrong):
        cache = PagedCache(model, num_blocks=8)
        with pytest.raises(ValueError, match=r"keeps a conv state of shape \(96, 4\) .* configuration \(128, 4\)"):
            model(torch.tensor([[1, 5, 3]]), past_key_values=cache)


def test_states_are_not_for_ranks(model):
    ranks = mock.patch("pagedkv.integrations.transformers.models.num_ranks", return_value=2)
    with ranks, pytest.raises(ValueError, match="has layers with a state, which pagedkv does not divide over 2 ranks"):
        Engine(model, num_blocks=8)
