"""Windows, and layers that share K and V, of configurations; tests/integrations/transformers asks real models."""

import pytest

from pagedkv.layer_windows import layer_windows

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
    assert layer_windows(config, 4) == (windows, {})


def test_the_last_layers_read_the_last_layer_of_their_type_that_has_keys():
    config = {"layer_types": KINDS * 2, "sliding_window": 24, "num_kv_shared_layers": 3}
    assert layer_windows(config, 8) == ([24, None] * 4, {5: 3, 6: 4, 7: 3})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": KINDS[:3]}, r"^layer_types must have 4 entries, one for each layer, got 3$"),
        (
            {"layer_types": ["chunked_attention", "full_attention"] * 2},
            r"^layer_types must be full_attention or sliding_attention, got chunked_attention$",
        ),
        (
            {"layer_types": [["full_attention"], 7, None, "full_attention"]},
            r"^layer_types must be full_attention or sliding_attention, got 7, None, \['full_attention'\]$",
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
