"""The attention function of transformers' models, over sequences of a PagedKVCache."""

import copy

import pytest
import torch

import pagedkv
from pagedkv.integrations.transformers import CachedPass, paged_attention, set_attention

from .models import eager_model, error_bound, make_model, prompts


@pytest.fixture(scope="module")
def model():
    model = make_model("Llama")
    set_attention(model)
    return model


def test_logits_of_a_ragged_batch(model):
    texts = prompts(20, 33)
    cache = pagedkv.PagedKVCache(2, 16, 16, 2, 16, array_module=torch)
    seqs, logits = [cache.add(0).seq for _ in texts], [[], []]
    for start, stop in [(0, 19), (19, 20), (20, 33)]:
        chunks = [text[start:stop] for text in texts]
        lens = [len(chunk) for chunk in chunks]
        slots, batch = cache.append(seqs, lens), cache.batch(seqs, lens)
        ids = torch.tensor([[token for chunk in chunks for token in chunk]])
        with torch.inference_mode():
            inputs = {"position_ids": batch.positions[None], "use_cache": False}
            out = model(ids, forward_pass=CachedPass(cache, slots, batch), **inputs).logits[0]
        for rows, part in zip(logits, out.split(lens), strict=True):
            rows.append(part)
    for rows, text in zip(logits, texts, strict=True):
        exact, bound = error_bound(eager_model("Llama"), text)
        assert (torch.cat(rows) - exact).abs().max() <= bound


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention_mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal=False"),
        ({"output_attentions": True}, "output_attentions"),
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, "position_bias"),
        ({"block_indices": torch.zeros(3)}, "block_indices"),
        ({"value": torch.zeros(1, 2, 3, 8)}, "a value of another head_dim than its key, as in MLA"),
    ],
)
def test_unsupported_requests_of_a_layer_are_refused(model, options, what):
    layer = model.model.layers[0].self_attn
    q, kv = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    arguments = {"query": q, "key": kv, "value": kv, "attention_mask": None, "forward_pass": object()} | options
    with pytest.raises(ValueError, match=f"does not take {what}, which LlamaAttention asks for: model.eval"):
        paged_attention(layer, **arguments)


def test_training_is_refused(model):
    """The projections of queries, keys and values would get no gradients."""
    layer = copy.copy(model.model.layers[0].self_attn)
    layer.training = True
    cache = pagedkv.PagedKVCache(2, 1, 4, 2, 16, array_module=torch)
    seqs = [cache.add(0).seq]
    one = CachedPass(cache, cache.append(seqs, 3), cache.batch(seqs, 3))
    q, kv = torch.ones(1, 4, 3, 16), torch.ones(1, 2, 3, 16)
    for trained in (q, kv):
        trained.requires_grad = True
        with pytest.raises(ValueError, match=r"does not take gradients in train mode, .* model\.eval"):
            paged_attention(layer, q, kv, kv, None, forward_pass=one)
        trained.requires_grad = False
    q.requires_grad = True
    with torch.no_grad():
        assert paged_attention(layer, q, kv, kv, None, forward_pass=one)[0].shape == (1, 3, 4, 16)
