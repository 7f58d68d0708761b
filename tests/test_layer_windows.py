"""Layers that attend, windows, and layers that share K and V, of configurations.

tests/integrations/transformers asks real models.
"""

import pytest

from pagedkv.layer_windows import layer_shapes, layer_windows, unequal_layers

KINDS = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, [None] * 4),
        ({"sliding_window": 24, "model_type": "mistral"}, [24] * 4),
        ({"sliding_window": None, "model_type": "mistral"}, [None] * 4),
        ({"sliding_window": 24, "model_type": "llama"}, [None] * 4),
        ({"sliding_window": 24, "layer_types": KINDS}, [24, None] * 2),
        ({"sliding_window": 24, "layer_types": KINDS, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 24, "model_type": "gemma3_text"}, [24] * 4),
        ({"sliding_window": 24, "model_type": "gemma3_text", "sliding_window_pattern": 3}, [24, 24, None, 24]),
        ({"sliding_window": 24, "model_type": "qwen2", "max_window_layers": 1}, [None] * 4),
        ({"sliding_window": 24, "model_type": "qwen2", "use_sliding_window": True}, [None] * 4),
        (
            {"sliding_window": 24, "model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1},
            [None] + [24] * 3,
        ),
    ],
)
def test_windows(config, windows):
    assert layer_windows(config, 4) == ([0, 1, 2, 3], windows, {})


@pytest.mark.parametrize(
    ("config", "layers", "windows"),
    [
        ({"model_type": "qwen3_next", "full_attention_interval": 2}, [1, 3], [None, None]),
        ({"model_type": "olmo_hybrid"}, [3], [None]),
        ({"model_type": "falcon_h1"}, [0, 1, 2, 3], [None] * 4),
        ({"model_type": "bamba", "attn_layer_indices": [2]}, [2], [None]),
        ({"model_type": "bamba", "attn_layer_indices": None}, [], []),
        ({"model_type": "lfm2", "full_attn_idxs": [0, 3]}, [0, 3], [None, None]),
        ({"hybrid_override_pattern": "ME*-"}, [2], [None]),
        ({"layers_block_type": ["mamba", "hybrid", "attention", "moe"]}, [1, 2], [None, None]),
        (
            {"layer_types": ["conv", "sliding_attention", "mlp", "full_attention"], "sliding_window": 24},
            [1, 3],
            [24, None],
        ),
    ],
)
def test_layers_without_keys_take_no_place(config, layers, windows):
    assert layer_windows(config, 4) == (layers, windows, {})


def test_the_last_layers_read_the_last_layer_of_their_type_that_has_keys():
    config = {"layer_types": KINDS * 2, "sliding_window": 24, "num_kv_shared_layers": 3}
    assert layer_windows(config, 8) == ([*range(8)], [24, None] * 4, {5: 3, 6: 4, 7: 3})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": KINDS[:3]}, r"^layer_types must have 4 entries, one for each layer, got 3$"),
        (
            {"layer_types": ["chunked_attention", "full_attention"] * 2},
            r"^layer_types must be of conv, full_attention, .*, moe, sliding_attention, got chunked_attention$",
        ),
        (
            {"layer_types": [["full_attention"], 7, None, "full_attention"]},
            r"^layer_types must be of conv, .*, got 7, None, \['full_attention'\]$",
        ),
        ({"layer_types": KINDS, "sliding_window": -1}, r"^sliding_window must be at least 1, got -1$"),
        (
            {"layer_types": KINDS, "num_kv_shared_layers": 3},
            r"^num_kv_shared_layers must leave a layer of full_attention with K and V$",
        ),
    ],
)
def test_configurations_that_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        layer_windows(config, 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": 5}, r"^layer_types must be a list with a name for each layer, got int$"),
        ({"layer_types": "full_attention"}, r"^layer_types must be a list with a name for each layer, got str$"),
        ({"layer_types": {"full_attention": 4}}, r"^layer_types must be a list with a name for each layer, got dict$"),
        ({"model_type": ["gemma2"]}, r"^model_type must be a str, got list$"),
    ],
)
def test_entries_of_another_type_are_refused(config, message):
    with pytest.raises(TypeError, match=message):
        layer_windows(config, 4)


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}


# What published configurations of these models have, besides their shape.
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            HEADS | {"global_head_dim": 512},
            "has more than one head_dim (global_head_dim = 512, elsewhere 256)",
        ),
        (
            HEADS | {"global_head_dim": 256, "num_global_key_value_heads": 4},
            "has more than one num_key_value_heads (num_global_key_value_heads = 4, elsewhere 2)",
        ),
        (HEADS | {"per_layer_config": {"5": {"v_head_dim": 512}}}, "has a v_head_dim of layer 5 alone"),
        (HEADS | {"per_layer_config": {"5": {"sliding_window": 8}}}, "has a sliding_window of layer 5 alone"),
        (HEADS | {"use_bidirectional_attention": "all"}, "lets tokens see later ones"),
        (HEADS | {"v_head_dim": 128}, "has more than one head_dim (v_head_dim = 128, elsewhere 256)"),  # MiMo V2
        (
            {"num_attention_heads": 32, "num_key_value_heads": 16, "hidden_size": 2048, "kv_channels": 128},  # JetMoE
            "has more than one head_dim (kv_channels = 128, elsewhere 64)",
        ),
        (
            HEADS | {"num_key_value_heads_per_layer": [2, 1]},
            "has more than one num_key_value_heads (num_key_value_heads_per_layer = [2, 1], elsewhere 2)",
        ),
        (
            {"num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8},  # Falcon 40B
            "has more than one num_key_value_heads (num_kv_heads = 8, elsewhere 128)",
        ),
        (
            {"num_attention_heads": 71, "hidden_size": 4544, "num_kv_heads": 71, "multi_query": True},  # Falcon 7B
            "has multi_query, with which num_attention_heads does not say how many KV heads there are",
        ),
        (HEADS | {"kv_lora_rank": 512}, "caches latent keys and values (MLA)"),
        (HEADS | {"block_configs": [{}]}, "has layers of several shapes"),  # Nemotron NAS
        (HEADS | {"use_cla": True}, "has layers that read the keys and values of other layers"),  # Hunyuan
        (HEADS | {"attention_chunk_size": 8192}, "has layers that attend in chunks"),  # Llama 4
        (HEADS | {"cross_attention_layers": [3, 8]}, "has layers that attend to an image"),  # Llama 3.2
        (HEADS | {"global_head_dim": 256, "kv_channels": None, "multi_query": False, "use_cla": False}, None),
        (HEADS | {"per_layer_config": {"1": {"intermediate_size": 64, "head_dim": 512}}}, None),
        (HEADS | {"model_type": "gemma4_text", "global_head_dim": 512, "num_global_key_value_heads": 4}, None),
        ({"num_attention_heads": 32, "hidden_size": 4096, "kv_channels": 128}, None),  # Qwen 1
        (HEADS | {"linear_key_head_dim": 128, "mamba_head_dim": 64}, None),  # of states
        (
            {"num_attention_heads": 32, "hidden_size": 2560, "kv_channels": 80}
            | {"model_type": "zamba2", "attention_head_dim": 160},
            None,
        ),
        (HEADS | {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10}, None),  # Gemma 3n
    ],
)
def test_layers_that_are_not_all_alike(config, reason):
    assert unequal_layers(config) == reason


OF_SOME = {"per_layer_config": {"02": {"head_dim": 512}, "5": {"head_dim": 512, "num_key_value_heads": 1}}}
GEMMA_4 = {"model_type": "gemma4_text", "num_global_key_value_heads": 1}


@pytest.mark.parametrize(
    ("config", "num_kv_heads", "head_dim"),
    [
        ({}, 2, 256),
        (OF_SOME, [2, 2, 2, 2, 2, 1], [256, 256, 512, 256, 256, 512]),
        ({"per_layer_config": {"0": {"head_dim": 256}}}, 2, 256),
        (GEMMA_4, 2, [256] * 5 + [512]),  # by the defaults of the class
        (GEMMA_4 | {"attention_k_eq_v": True, "global_head_dim": 256}, [2] * 5 + [1], 256),
        (GEMMA_4 | OF_SOME, [2, 2, 2, 2, 2, 1], [256, 256, 512, 256, 256, 512]),
        (GEMMA_4 | {"layer_types": ["full_attention", "sliding_attention"] * 3}, 2, [512, 256, 512, 256, 512, 512]),
    ],
)
def test_the_shapes_of_layers(config, num_kv_heads, head_dim):
    config = {"sliding_window": 8} | config
    assert layer_shapes(config, 6, 2, 256) == {"num_kv_heads": num_kv_heads, "head_dim": head_dim}


@pytest.mark.parametrize("value", [5, {"1": 8}])
def test_entries_of_layers_that_are_none(value):
    with pytest.raises(TypeError, match=r"^per_layer_config must have an object for each of some layers, by their"):
        unequal_layers(HEADS | {"per_layer_config": value})
