"""The windows of a configuration are those that the layers of its model ask attention for."""

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pagedkv.integrations.transformers.models import kv_shape
from pagedkv.layer_windows import layer_shapes, layer_windows

from .models import FAMILIES, SIZES, make_model

SOME = {"num_hidden_layers": 4, "sliding_window": 24}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
LATER = {"use_sliding_window": True, "max_window_layers": 1}
OTHERS = {
    "Cohere2": {},
    "Exaone4": {},
    "Gemma3n": {
        "layer_types": None,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 3,
    },
    "Gemma4": {"num_hidden_layers": 8, "hidden_size_per_layer_input": 0, "global_head_dim": 32},
    "Ministral": {},
    "Mixtral": EXPERTS,
    "Olmo3": {},
    "Phi3": {"eos_token_id": None},
    "Qwen2": LATER,
    "Qwen3Moe": EXPERTS | LATER,
    "Starcoder2": {},
    "VaultGemma": {},
}
# The modules of these two do not ask for a window by the index of a layer.
CASES = [(family, {}) for family in FAMILIES if family not in ("Bloom", "HrmText")]
CASES += [(family, SOME | options) for family, options in OTHERS.items()]
CASES += [("Qwen3", SOME), ("Qwen3", SOME | LATER), ("Llama", SOME), ("Gemma3", SOME | {"layer_types": None})]


@pytest.fixture
def asked(monkeypatch):
    """The windows that layers ask for, by their index, once a model runs with the attention "recording"."""
    windows = {}

    def record(module, q, k, v, attention_mask, **options):
        windows[module.layer_idx] = options.get("sliding_window")
        return sdpa_attention_forward(module, q, k, v, None, scaling=options.get("scaling"))

    monkeypatch.setitem(AttentionInterface._global_mapping, "recording", record)
    return windows


@pytest.mark.parametrize(("family", "options"), CASES, ids=lambda x: x if type(x) is str else "")
def test_windows_are_those_that_layers_ask_for(asked, family, options):
    model = make_model(family, **options)
    model.set_attn_implementation("recording")
    with torch.inference_mode():
        model(torch.arange(1, 5)[None])
    config = model.config.get_text_config(decoder=True)
    read = layer_windows(config.to_dict(), config.num_hidden_layers)
    assert dict(enumerate(read.windows)) == asked
    stores = {m.layer_type: m.layer_idx for m in model.modules() if getattr(m, "store_full_length_kv", False)}
    shared = {m.layer_idx: stores[m.layer_type] for m in model.modules() if getattr(m, "is_kv_shared_layer", False)}
    assert read.same_as == shared
    if "layer_types" not in FAMILIES.get(family, {}) | options or options.get("layer_types", "") is None:
        without = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
        assert layer_windows(without, config.num_hidden_layers) == read


@pytest.mark.parametrize("family", [family for family in FAMILIES if "Gemma" in family])
def test_shapes_are_those_of_the_layers(family):
    """As transformers says them, and as published files do."""
    model, options = make_model(family), SIZES | FAMILIES[family]
    num_layers, *shapes = kv_shape(model)
    published = options | {"model_type": model.config.model_type}
    assert [*layer_shapes(published, num_layers, 2, 16).values()] == shapes
    for module in model.modules():
        if hasattr(module, "k_proj"):
            heads, dim = (x[module.layer_idx] if isinstance(x, list) else x for x in shapes)
            assert (module.head_dim, module.k_proj.out_features) == (dim, heads * dim)
