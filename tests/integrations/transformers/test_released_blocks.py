"""Models with windows: texts stay those of eager attention while the blocks that windows have passed come back."""

import random
from unittest import mock

import pytest
import torch

from pagedkv import kv_bytes
from pagedkv.integrations.transformers import Engine, PagedCache, use_pagedkv
from pagedkv.integrations.transformers.models import kv_shape, kv_windows
from pagedkv.stores import HostStore, StoredPrefixes

from .models import VOCAB, WINDOW, eager_model, greedy, make_model, prompts

FAMILIES = ["Gemma2", "Gemma3", "Gemma4 31B", "Gemma4 E4B", "GptOss", "Mistral"]
FAMILIES += [pytest.param(family, marks=pytest.mark.long) for family in ("Gemma3n", "Gemma4 26B-A4B")]
P, NEW = 4, 12
LONG = prompts(60)[0]
TEXTS = [LONG, *prompts(9, 33), *(LONG[:40] + more for more in prompts(5, 11))]  # ten blocks in common


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    model = make_model(family, eos_token_id=None)
    use_pagedkv(model)
    return model


@pytest.fixture(scope="module")
def expected(family):
    """The tokens of generate for each text alone, with eager attention."""
    return [greedy(eager_model(family), [text], NEW)[0] for text in TEXTS]


def paged_cache(model, **options):
    return PagedCache(model, num_blocks=200, block_size=P, **options)


def generate(model, ids, num_new=NEW, **options):
    options = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": None} | options
    return model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **options)


def finished(engine, texts, num_new):
    """The tokens that an engine generates after each text."""
    tokens = {engine.add(text, num_new): [] for text in texts}
    for request, token, reason, *_ in engine.run():
        tokens[request].append(token)
        if reason:
            engine.cache.check()
    assert engine.cache.stats().used == 0
    return list(tokens.values())


def test_an_engine_gives_the_texts_of_eager_attention(model, expected):
    engine = Engine(model, num_blocks=400, block_size=P, max_num_batched_tokens=16, eos_token_id=())
    # The second half finds what the first one committed.
    assert finished(engine, TEXTS[:3], NEW) + finished(engine, TEXTS[3:], NEW) == expected
    assert engine.cache.stats().hit_tokens >= 2 * 40


def test_an_engine_goes_on_with_prompts_that_another_has_stored(family, model, expected):
    store, options = HostStore(2**24, 2**16), {"max_num_batched_tokens": 16, "eos_token_id": ()}
    first = Engine(model, num_blocks=400, block_size=P, **options)
    if family == "Mistral":  # all of its layers have the window
        with pytest.raises(ValueError, match="cache must have layers without a window"):
            StoredPrefixes(first.cache, store, family)
        return
    assert finished(first, TEXTS, NEW) == expected
    with StoredPrefixes(first.cache, store, family, block_tokens=8) as prefixes:
        assert [prefixes.store(text) for text in TEXTS] == [len(text) // 8 * 8 for text in TEXTS]
    second = Engine(model, num_blocks=200, block_size=2 * P, **options)
    with StoredPrefixes(second.cache, store, family, block_tokens=8) as prefixes:
        assert [prefixes.load(text) for text in TEXTS] == [len(text) // 8 * 8 for text in TEXTS]
    assert finished(second, TEXTS, NEW) == expected
    assert second.cache.stats().hit_tokens >= sum(len(text) // 8 * 8 for text in TEXTS) - 8


def test_texts_stay_the_same_under_preemption(family, model):
    texts, num_new = prompts(9, 13, 6, 11), 2 * WINDOW
    options = {"block_size": P, "max_num_batched_tokens": 16, "eos_token_id": ()}
    groups = Engine(model, num_blocks=400, **options).cache.layer_groups
    engine = Engine(model, num_blocks=groups.peak(13 + num_new, 16) + len(groups.groups), **options)
    expected = [greedy(eager_model(family), [text], num_new)[0] for text in texts]
    assert finished(engine, texts, num_new) == expected
    assert engine.scheduler.num_preempted > 0


def test_an_engine_holds_what_windows_need(model):
    engine = Engine(model, num_blocks=400, block_size=P, max_num_batched_tokens=16, eos_token_id=())
    groups, cache = engine.cache.layer_groups, engine.cache
    engine.add(LONG, NEW)
    while not engine.step():
        assert 0 < cache.stats().used <= groups.peak(len(LONG), 16)
    for num_new in range(1, NEW - 1):
        engine.step()
        num_tokens = len(LONG) + num_new
        held = kv_bytes(num_tokens, *kv_shape(model), block_size=P, **kv_windows(model).options)
        # The commit of a full block gives one back that kv_bytes still counts.
        at_most_one_each = len(groups.groups) * cache.stats().num_bytes // cache.pool.num_blocks
        assert held - at_most_one_each <= cache.stats().used_bytes <= held
        assert held < kv_bytes(num_tokens, *kv_shape(model), block_size=P)


WAYS = {
    "in chunks": {"prefill_chunk_size": 8},
    "beams": {"num_beams": 3},
    "drafts from the prompt": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate_gives_the_text_of_eager_attention(family, model, way):
    ids = LONG[:20] * 3 if "drafts" in way else LONG
    cache = paged_cache(model)
    said = generate(model, ids, past_key_values=cache, **WAYS[way])
    assert torch.equal(said, generate(eager_model(family), ids, **({} if "drafts" in way else WAYS[way])))
    cache.kv.check()
    if way == "in chunks":  # the last token that was drawn is not written
        assert cache.kv.stats().used == cache.kv.layer_groups.held(len(LONG) + NEW - 1)


def test_an_assistant_drafts_past_the_window(family, model):
    drafts = make_model("Llama", num_hidden_layers=1, eos_token_id=None)
    cache = paged_cache(model)
    said = generate(model, LONG, 2 * WINDOW, past_key_values=cache, assistant_model=drafts)
    assert torch.equal(said, generate(eager_model(family), LONG, 2 * WINDOW))
    cache.kv.check()


def test_padded_rows_and_a_text_that_goes_on(family, model):
    cache = paged_cache(model)
    assert greedy(model, TEXTS, NEW, past_key_values=cache) == greedy(eager_model(family), TEXTS, NEW)
    cache.reset()
    first = generate(model, LONG, past_key_values=cache)[0].tolist()
    more = first + LONG[:9]
    assert torch.equal(generate(model, more, past_key_values=cache), generate(eager_model(family), more))


def test_going_back_behind_released_blocks_is_refused(model):
    cache = paged_cache(model)
    for start in (0, 30):
        model(torch.tensor([LONG[start : start + 30]]), past_key_values=cache)
    cache.crop(-30)
    with pytest.raises(ValueError, match=r"length must be 0 or at least 27 .*, since what lies before the window"):
        cache.crop(-26)
    assert cache.get_seq_length() == 30
    cache.crop(-30)
    assert cache.kv.stats().used == 0


def test_a_cache_of_other_windows_is_refused(model, family):
    other = make_model(family, sliding_window=WINDOW + 8)
    use_pagedkv(other)
    with pytest.raises(ValueError, match=r"^this PagedCache is for layers of other windows than .* has: each model"):
        generate(other, LONG, past_key_values=paged_cache(model))


def test_windows_can_be_turned_off(model, expected):
    cache = paged_cache(model, windows=None)
    said = generate(model, LONG, past_key_values=cache)
    assert said[0, len(LONG) :].tolist() == expected[0]
    assert cache.kv.stats().used == len(cache.kv.groups) * -(-(len(LONG) + NEW - 1) // P)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_passes_crops_forks_and_interrupts_at_random(family, model, seed):
    """After any of them a pass gives the logits of eager attention; a crop that goes back too far changes nothing."""
    draw = random.Random(seed)
    cache, rows = PagedCache(model, num_blocks=600, block_size=draw.choice([3, 4, 16])), [[]]
    for _ in range(25):
        length, do = len(rows[0]), draw.random()
        if do < 0.7 or not length:
            n = draw.choice([1, 1, 2, 5, 20, 33])
            new = [[draw.randrange(1, VOCAB) for _ in range(n)] for _ in rows]
            if do < 0.1:
                interrupted = mock.patch.object(model.model.norm, "forward", side_effect=KeyboardInterrupt)
                with interrupted, pytest.raises(KeyboardInterrupt), torch.inference_mode():
                    model(torch.tensor(new), past_key_values=cache)
            rows = [row + more for row, more in zip(rows, new, strict=True)]
            with torch.inference_mode():
                paged = model(torch.tensor(new), past_key_values=cache).logits
                expected = eager_model(family)(torch.tensor(rows)).logits[:, -n:]
            torch.testing.assert_close(paged, expected, rtol=1e-3, atol=1e-3)
        elif do < 0.85:
            back = draw.randint(0, min(40, length))
            try:
                cache.crop(-back)
                rows = [row[: length - back] for row in rows]
            except ValueError as error:
                assert "length must be 0 or at least" in str(error)  # noqa: PT017
        elif do < 0.92 and len(rows) < 4:
            cache.batch_repeat_interleave(2)
            rows = [row for row in rows for _ in range(2)]
        else:
            parents = [draw.randrange(len(rows)) for _ in rows]
            cache.reorder_cache(torch.tensor(parents))
            rows = [rows[parent] for parent in parents]
        assert cache.get_seq_length() == len(rows[0])
        cache.kv.check()
