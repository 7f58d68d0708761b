"""Which layer attends is what the model says; a model that says it wrongly is refused before its first wrong token."""

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from pagedkv.integrations.transformers import Engine, PagedCache, use_pagedkv

from .models import ALTERNATING, greedy, make_model, prompts

TEXT = prompts(20)[0]


def attends_twice(model):
    model.model.layers[1] = model.model.layers[0]


def attends_as(layer):
    def change(model):
        model.model.layers[1].self_attn.layer_idx = layer

    return change


def generate(model):
    greedy(model, [TEXT], 2, past_key_values=PagedCache(model, num_blocks=16))


def generate_batch(model):
    lengths = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=64)
    configs = {"generation_config": lengths, "continuous_batching_config": sizes}
    [done] = model.generate_batch([TEXT], **configs, progress_bar=False).values()
    raise ValueError(done.error)  # transformers catches what the model raises


def step(model):
    engine = Engine(model, num_blocks=16)
    engine.add(TEXT, 2)
    engine.step()


@pytest.mark.parametrize("run", [generate, generate_batch, step])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (attends_twice, "LlamaForCausalLM attends twice as layer 0 in one forward pass"),
        (attends_as(2), "attends as layer 2, and the cache has layers 0 to 1"),
        (attends_as(-1), "attends as layer -1, and the cache has layers 0 to 1"),
        (attends_as(None), "attends as layer None, and the cache has layers 0 to 1"),
    ],
    ids=["twice", "beyond", "before", "none"],
)
def test_layers_that_a_cache_has_no_room_for_are_refused(run, change, message):
    model = make_model("Llama")
    change(model)
    use_pagedkv(model)
    with pytest.raises(ValueError, match=rf"{message}.* pagedkv cannot run this model; what it says without"):
        run(model)


@pytest.mark.parametrize("run", [generate, generate_batch, step])
def test_a_layer_that_asks_for_another_window_than_its_mask_has_is_refused(run):
    model = make_model("Qwen3", layer_types=ALTERNATING[:2], sliding_window=8, use_sliding_window=True)
    model.model.layers[0].self_attn.sliding_window = None
    use_pagedkv(model)
    with pytest.raises(
        ValueError, match=r"mask of Qwen3Attention has a window of 8 tokens, and the layer asks .* None"
    ):
        run(model)


def test_a_mask_that_shows_later_tokens_is_refused():
    model = make_model("HrmText")
    use_pagedkv(model)
    ids = torch.tensor([TEXT])
    cache = PagedCache(model, num_blocks=64)
    with pytest.raises(ValueError, match="the mask of HrmTextAttention lets tokens see later ones"):
        model(ids, token_type_ids=torch.ones_like(ids), past_key_values=cache)
    model(ids, past_key_values=cache)
