"""transformers' continuous batching on pagedkv's kernels, which read its pages in place."""

import gc
import weakref
from unittest import mock

import pytest
import torch

from pagedkv.integrations.transformers import paged, use_pagedkv
from pagedkv.integrations.transformers.paged import AllocatorPages

from .models import WINDOW, eager_model, greedy, greedy_batch, make_model, prompts

TEXTS = prompts(5, 33, 1, 90)


@pytest.fixture(scope="module")
def models():
    models = {family: make_model(family) for family in ("Llama", "Gemma3")}
    for model in models.values():
        use_pagedkv(model)
    return models


def calls(owner, name):
    return mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


@pytest.fixture(scope="module")
def expected():
    return {family: greedy(eager_model(family), TEXTS, 10) for family in ("Llama", "Gemma3")}


# Chunks of prompts behind cached tokens, or whole prompts at once.
@pytest.mark.parametrize("max_batch_tokens", [32, 200])
def test_rings_are_read_in_place_where_no_chunk_wraps_around_them(models, expected, max_batch_tokens):
    with calls(paged._Gathered, "attend") as gathered, calls(paged, "decode_attention") as decode:
        said = greedy_batch(models["Gemma3"], TEXTS, 10, max_batch_tokens=max_batch_tokens)
    assert said == expected["Gemma3"]
    assert {call.args[1] for call in gathered.call_args_list} == {0, 2}  # the sliding layers, in some passes
    in_place = [call for call in decode.call_args_list if call.args[4].max() == WINDOW]
    assert len(in_place) > 5
    assert all(call.kwargs["window"] is None for call in in_place)


def test_pages_of_another_size(models, expected):
    """A window of 24 fills one page of 20 and a part of another."""
    assert greedy_batch(models["Gemma3"], TEXTS, 10, page_size=20, max_batch_tokens=200) == expected["Gemma3"]


def test_tables_are_made_once_for_all_layers_and_nothing_is_copied(models, expected):
    with (
        calls(AllocatorPages, "tables") as tables,
        calls(paged, "write_kv") as write,
        calls(paged.PagedPass, "__init__") as passes,
    ):
        assert greedy_batch(models["Llama"], TEXTS, 10) == expected["Llama"]
    assert tables.call_count == passes.call_count > 10
    assert write.call_count == 2 * passes.call_count
    caches = [cache for call in write.call_args_list for cache in call.args[2:4]]
    assert len({cache.untyped_storage().data_ptr() for cache in caches}) == 1
    assert len({cache.data_ptr() for cache in caches}) == 4


def test_the_pages_go_with_their_cache(models):
    """Those of a large model take most of a device, and the next call of generate_batch asks what is free."""
    of, kept = AllocatorPages.of, []

    def watched(allocator):
        pages = of(allocator)
        kept.extend((weakref.ref(allocator.cache_tensor), weakref.ref(pages)))  # whose views have the same memory
        return pages

    with mock.patch.object(AllocatorPages, "of", watched):
        greedy_batch(models["Llama"], TEXTS[:1], 2)
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_padding_has_no_slot():
    pages = AllocatorPages(0, "full_attention", {}, block_size=4, stride=16, window=None, unused=32)
    assert pages.slots(torch.tensor([0, 3, 16, 50, 32, 32])).tolist() == [0, 3, 4, 14, -1, -1]


def test_sdpa_comes_back(models, expected):
    models["Llama"].set_attn_implementation("sdpa")
    with calls(paged.PagedPass, "__init__") as passes:
        assert greedy_batch(models["Llama"], TEXTS[:1], 2) == [expected["Llama"][0][:2]]
    assert not passes.called
    use_pagedkv(models["Llama"])
