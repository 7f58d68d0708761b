"""use_pagedkv: what it changes in a model and what it leaves alone, also without kernels."""

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

from .models import FAMILIES, SIZES, eager_model, greedy, logits, make_model, prompts

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


def test_without_kernels_bloom_keeps_its_attention():
    """transformers cannot set its attention, and warns."""
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
    """A cache may fill most of a device, so no model may keep it alive or write to it later."""
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


def test_a_pass_that_is_kept_alive_has_ended():
    model, kept = make_model("Bloom"), []
    model.register_forward_pre_hook(lambda _, args, inputs: kept.append(inputs["forward_pass"]), with_kwargs=True)
    said(model)
    model.config._attn_implementation = "eager"
    ids = torch.tensor([OTHER])
    assert torch.equal(model.base_model(ids)[0], eager_model("Bloom").base_model(ids)[0])
    assert kept


PADDED = torch.tensor([TEXT, [0] * 13 + OTHER])
SHOWN = (PADDED > 0).long()


def perplexity(model):
    with torch.no_grad():
        return model(PADDED, attention_mask=SHOWN, labels=PADDED.masked_fill(SHOWN == 0, -100)).loss


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_pass_the_model_computes_as_before(family):
    """To the bit, with the masks of transformers: windows, softcap, sinks; before and after an engine has used it."""
    model = make_model(family)
    ways = [{}, {"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "static"}]
    expected = perplexity(model), [greedy(model, [TEXT, OTHER], 3, **way) for way in ways]
    use_pagedkv(model)
    assert (perplexity(model), [greedy(model, [TEXT, OTHER], 3, **way) for way in ways]) == expected
    said(model)
    assert perplexity(model) == expected[0]


def test_eager_attention_is_kept_where_the_model_had_it():
    model = make_model("Llama")
    model.set_attn_implementation("eager")
    use_pagedkv(model)
    assert torch.equal(logits(model, TEXT), logits(eager_model("Llama"), TEXT))
    use_pagedkv(model)
    with (
        mock.patch.object(use, "write_kv", side_effect=BackendUnavailableError("no GPU")),
        pytest.warns(UserWarning, match="so attention is eager: no GPU"),
    ):
        use_pagedkv(model)
    assert model.config._attn_implementation == "eager"


def test_without_a_pass_the_model_can_be_trained():
    ours, theirs = make_model("Llama").train(), make_model("Llama").train()
    use_pagedkv(ours)
    for model in (ours, theirs):
        model(PADDED, attention_mask=SHOWN, labels=PADDED).loss.backward()
    for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(our.grad, their.grad)


@pytest.mark.filterwarnings("default")  # those of torch's own modules, which a compilation imports
@pytest.mark.parametrize("family", ["Llama", "GptOss"])
def test_without_a_pass_the_model_can_be_compiled(family):
    """torch keeps graphs with and without pagedkv separate."""
    model = make_model(family)
    expected = perplexity(model)
    use_pagedkv(model)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(perplexity(compiled), expected)
    cache = PagedCache(model, num_blocks=16)
    with torch.no_grad():
        paged = compiled(PADDED, attention_mask=SHOWN, past_key_values=cache).logits
        theirs = eager_model(family)(PADDED, attention_mask=SHOWN).logits
    torch.testing.assert_close(paged[SHOWN == 1], theirs[SHOWN == 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(perplexity(compiled), expected)


def test_layers_without_a_pass_are_an_error():
    """Their layers attend only to new tokens, which is wrong after the first pass."""
    model = make_model("Llama")
    use_pagedkv(model)
    cache = PagedCache(model, num_blocks=16)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _, args, inputs: (args, inputs | {"forward_pass": None}), with_kwargs=True
        )
    with pytest.raises(RuntimeError, match=r"the layers of LlamaForCausalLM do not hand the keyword forward_pass on"):
        model(torch.tensor([TEXT]), past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert perplexity(model) == perplexity(make_model("Llama"))


def test_a_part_of_a_model_does_not_fill_a_cache():
    model = make_model("Llama")
    use_pagedkv(model)
    cache = PagedCache(model, num_blocks=16)
    with torch.no_grad():
        model(torch.tensor([TEXT]), past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"does not fill a PagedCache: call use_pagedkv\(model\) first"):
            model.model(torch.tensor([OTHER]), past_key_values=cache)


def test_images_whose_tokens_see_all_of_them_are_refused():
    """Gemma 3 asks transformers for a mask that lets them, which pagedkv never sees; its text is like any other."""
    text = transformers.Gemma3TextConfig(**SIZES | {"vocab_size": 300})
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = transformers.SiglipVisionConfig(**vision)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=tower, image_token_index=299, mm_tokens_per_image=49
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    expected = greedy(model, [TEXT], 4)
    image = {"input_ids": torch.tensor([[299] * 49 + TEXT]), "pixel_values": torch.ones(1, 3, 224, 224)}
    with torch.no_grad():
        seen = model(**image).logits
        use_pagedkv(model)
        assert torch.equal(model(**image).logits, seen)
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
