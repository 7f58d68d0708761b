"""use_pagedkv: what it does to a model and what it leaves, on a device without kernels too."""

import copy
import gc
import io
import pickle
import threading
import weakref
from unittest import mock

import pytest
import torch
import transformers

from pagedkv import BackendUnavailableError
from pagedkv.integrations.transformers import NAME, Engine, PagedCache, use, use_pagedkv

from .models import SIZES, eager_model, greedy, logits, make_model, prompts

TEXT, OTHER = prompts(20, 7)


def test_twice_is_as_good_as_once():
    model = make_model("Llama")
    use_pagedkv(model)
    use_pagedkv(model)
    assert len(model._forward_pre_hooks) == 1
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("operation", ["write_kv", "decode_attention", "prefill_attention"])
def test_without_kernels_attention_is_sdpa(operation):
    model = make_model("Llama")
    error = BackendUnavailableError("GPU 0 has compute capability 7.5")
    with (
        mock.patch.object(use, operation, side_effect=error),
        pytest.warns(UserWarning, match="no kernels for cpu, so attention is sdpa: GPU 0 has compute capability 7.5"),
    ):
        use_pagedkv(model)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


def test_without_kernels_bloom_has_attention_of_its_own():
    """transformers sets no other one, and warns."""
    model = make_model("Bloom")
    use_pagedkv(model)
    with (
        mock.patch.object(use, "write_kv", side_effect=BackendUnavailableError("no GPU")),
        pytest.warns(UserWarning, match="no kernels for cpu, so attention is eager: no GPU"),
    ):
        use_pagedkv(model)
    assert torch.equal(logits(model, TEXT), logits(eager_model("Bloom"), TEXT))


def said(model):
    engine = Engine(model, num_blocks=16, eos_token_id=())
    engine.add(TEXT, 4)
    return [sampled.token for sampled in engine.run()]


@pytest.mark.parametrize("family", ["Llama", "Bloom", "StableLm"])
@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_a_model_keeps_nothing_of_a_pass(family, error):
    """Not the cache, which may be most of a device, and its layers do not write to one that is no longer theirs."""
    model = make_model(family)
    engine = Engine(model, num_blocks=16)
    engine.add(TEXT, 1)
    if error is not None:
        with mock.patch.object(model.lm_head, "forward", side_effect=error), pytest.raises(error):
            engine.step()
    else:
        engine.step()
    cache = weakref.ref(engine.cache)
    del engine
    gc.collect()
    assert cache() is None
    pickle.dumps(model)
    model.config._attn_implementation = "eager"
    ids = torch.tensor([OTHER])
    for ours, theirs in ((model, eager_model(family)), (model.base_model, eager_model(family).base_model)):
        assert torch.equal(ours(ids)[0], theirs(ids)[0])


def test_a_pass_that_somebody_keeps_has_ended():
    model, kept = make_model("Bloom"), []
    model.register_forward_pre_hook(lambda _, args, inputs: kept.append(inputs["forward_pass"]), with_kwargs=True)
    said(model)
    model.config._attn_implementation = "eager"
    ids = torch.tensor([OTHER])
    assert torch.equal(model.base_model(ids)[0], eager_model("Bloom").base_model(ids)[0])
    assert kept


@pytest.mark.parametrize("family", ["Llama", "Bloom", "StableLm"])
def test_without_a_pass_it_says_what_to_call(family):
    """Bloom's own attention would get no mask, and see tokens to come."""
    model = make_model(family)
    use_pagedkv(model)
    with pytest.raises(RuntimeError, match=r"no forward_pass came to .*Attention: call use_pagedkv\(model\) first"):
        model(torch.tensor([TEXT]))


def test_images_whose_tokens_see_all_of_them_are_refused():
    """Gemma 3 asks transformers for a mask that lets them, which pagedkv never sees; its text is like any other."""
    text = transformers.Gemma3TextConfig(**SIZES | {"vocab_size": 300})
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = transformers.SiglipVisionConfig(**vision)
    config = transformers.Gemma3Config(text_config=text, vision_config=tower, image_token_index=299)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    expected = greedy(model, [TEXT], 4)
    use_pagedkv(model)
    assert greedy(model, [TEXT], 4, past_key_values=PagedCache(model, num_blocks=16)) == expected
    pixels = torch.zeros(1, 3, 224, 224)
    for args, images in (
        ((), {"pixel_values": pixels}),
        ((pixels,), {}),
        ((), {"mm_encoder_outputs": {"image": pixels}}),
    ):
        with pytest.raises(ValueError, match=r"lets each token of an image see all of it.*: give it text alone"):
            model(torch.tensor([TEXT]), *args, past_key_values=PagedCache(model, num_blocks=16), **images)


@pytest.mark.parametrize("family", ["Bloom", "StableLm"])
def test_copies_have_passes_of_their_own(family):
    model = make_model(family)
    expected = said(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert said(twin) == expected


@pytest.mark.parametrize("family", ["Llama", "Bloom", "StableLm"])
def test_threads_share_a_model(family):
    """Another one runs a whole pass between two layers of this one."""
    model = make_model(family)
    expected, results = said(model), []

    def interrupt(*_):
        if not results:
            results.append(None)
            other = threading.Thread(target=lambda: results.append(said(model)))
            other.start()
            other.join()

    layers = model.transformer.h if family == "Bloom" else model.model.layers
    layers[1].register_forward_pre_hook(interrupt)
    assert said(model) == expected
    assert results == [None, expected]
