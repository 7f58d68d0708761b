"""What the layers of a model keep, as its configuration for transformers says it; needs neither it nor torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

from .memory.arguments import as_int

_FULL, _SLIDING, _LINEAR, _HYBRID = "full_attention", "sliding_attention", "linear_attention", "hybrid"
ATTENDING = {_FULL, _SLIDING, _HYBRID}
WITH_STATE = {_LINEAR, _HYBRID, "conv"}  # a hybrid layer has both
LAYER_TYPES = ATTENDING | WITH_STATE | {"mlp", "moe"}
_OLDER_NAMES = {"attention": _FULL, "mamba": _LINEAR}
# What a letter of Nemotron-H's pattern stands for.
_OF_PATTERN = {"M": _LINEAR, "*": _FULL, "E": "moe", "-": "mlp"}
# What the layers are where `layer_types` is missing, as in config.json of older models: every n-th layer sees all
# tokens, or none does. Layers of other models see all, whatever `sliding_window` says.
_FULL_EVERY = {
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gemma4_unified_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
    "vaultgemma": 2,
}
_ALL_SLIDE = {"ministral", "ministral3", "mistral", "mixtral", "phi3", "phi4_multimodal", "qwen3_moe", "starcoder2"}
_FIRST_LAYERS_FULL = {"qwen2", "qwen3"}
_LINEAR_BUT_EVERY_FOURTH = {"olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
# The key of the layers that attend, and the type of the others.
_ATTENDING_LAYERS = {"bamba": ("attn_layer_indices", _LINEAR), "lfm2": ("full_attn_idxs", "conv")}
_SLIDE_ON_REQUEST = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
# Whose layers without a window have KV heads and a head size of their own, and whose last layer has no window.
_FULL_DIFFER = {"gemma4_text", "gemma4_unified_text"}
_OF_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
# Entries that say that layers keep something else than K and V of each KV head.
_OTHERWISE = {
    "attention_chunk_size": "has layers that attend in chunks",
    "block_configs": "has layers of several shapes",
    "cross_attention_layers": "has layers that attend to an image",
    "kv_lora_rank": "caches latent keys and values (MLA)",
    "use_cla": "has layers that read the keys and values of other layers",
}
# How the names of entries begin that describe states.
OF_STATES = ("attn_type_list", "conv_L_cache", "linear_", "lru_", "mamba_", "ssm_")
_SHAPE = {
    "head_dim": re.compile(r"head_dim$|head_size$|^kv_channels$"),
    "num_key_value_heads": re.compile(r"key_value_heads|kv_heads"),
}


class LayerWindows(NamedTuple):
    """Which K and V the layers of a model need.

    Attributes
    ----------
    layers : list of int
        The layers of the model that attend. A cache counts these alone.
    windows : list of int or None
        For each of these, the tokens that a query sees, its own among them; None for all.
    same_as : dict of int to int
        Which of these read the K and V of another one, and of which.
    """

    layers: list[int]
    windows: list[int | None]
    same_as: dict[int, int]

    @property
    def options(self) -> dict[str, Any]:
        """The options of PagedKVCache and `kv_bytes`."""
        return {"windows": self.windows, "same_as": self.same_as}


def unequal_layers(config: Mapping[str, Any]) -> str | None:
    """Why not all layers of a model that attend keep K and V of shapes that `layer_shapes` can tell; None if they do.

    Any entry that names a head size or a number of KV heads counts as one of some layers: a model that nobody knows yet
    is rather refused than counted wrongly.

    Parameters
    ----------
    config : mapping
        As for `layer_windows`.

    Returns
    -------
    str or None
        A sentence without its subject, the model.
    """
    config = {name: value for name, value in config.items() if value is not None}
    for name, reason in _OTHERWISE.items():
        if config.get(name):
            return reason
    config = {name: value for name, value in config.items() if not name.startswith(OF_STATES)}
    if config.get("model_type") == "zamba2":  # whose attention reads two hidden sizes, and no layer kv_channels
        config["kv_channels"] = config["head_dim"] = config.get("attention_head_dim")
    if config.get("use_bidirectional_attention") == "all":
        return "lets tokens see later ones"
    num_heads = config.get("num_attention_heads")
    if config.get("multi_query") and "num_key_value_heads" not in config:
        return "has multi_query, with which num_attention_heads does not say how many KV heads there are"
    usual = {"num_key_value_heads": num_heads} | config
    if "head_dim" not in config and num_heads and "hidden_size" in config:
        usual["head_dim"] = config["hidden_size"] // num_heads
    known = set(_OF_FULL.values()) if config.get("model_type") in _FULL_DIFFER else set()
    for name, value in config.items():
        for ours, pattern in _SHAPE.items():
            if pattern.search(name) and name not in known and value != usual.get(ours):
                return f"has more than one {ours} ({name} = {value}, elsewhere {usual.get(ours)})"
    for layer, own in _entries_of_layers(config).items():
        for name in own.keys() - _OF_FULL.keys():
            if any(pattern.search(name) for pattern in _SHAPE.values()) or "window" in name:
                return f"has a {name} of layer {layer} alone"
    return None


def layer_shapes(
    config: Mapping[str, Any], num_layers: int, num_kv_heads: int, head_dim: int
) -> dict[str, int | list[int]]:
    """Read the shape of K and V of each layer.

    Parameters
    ----------
    config, num_layers
        As for `layer_windows`.
    num_kv_heads, head_dim : int
        Those of layers of which nothing else is said.

    Returns
    -------
    dict
        num_kv_heads and head_dim for `PagedKVCache` and `kv_bytes`: an int, or a list with one for each layer that
        attends.

    Raises
    ------
    TypeError, ValueError
        An entry is not as transformers has it.
    """
    of_layers, (layers, windows, _) = _entries_of_layers(config), layer_windows(config, num_layers)
    if "per_layer_config" not in config and config.get("model_type") in _FULL_DIFFER:
        own = {"head_dim": config.get("global_head_dim", 512)}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = config["num_global_key_value_heads"]
        of_layers = {layer: own for layer, window in zip(layers, windows, strict=True) if window is None}
    shapes: dict[str, int | list[int]] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for ours, theirs, usual in (
        ("num_kv_heads", "num_key_value_heads", num_kv_heads),
        ("head_dim", "head_dim", head_dim),
    ):
        if any(own.get(theirs) not in (None, usual) for own in of_layers.values()):
            shapes[ours] = [as_int(theirs, of_layers.get(layer, {}).get(theirs) or usual) for layer in layers]
    return shapes


def _entries_of_layers(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """What a configuration says of single layers, as transformers saves it."""
    of_layers = config.get("per_layer_config") or {}
    if not isinstance(of_layers, Mapping) or not all(isinstance(own, Mapping) for own in of_layers.values()):
        raise TypeError("per_layer_config must have an object for each of some layers, by their numbers")
    return {int(layer): own for layer, own in of_layers.items()}


def layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Read the type of each layer of a model, by its name in transformers.

    Parameters
    ----------
    config : mapping
        The configuration of the decoder: its config.json, or `to_dict()` of transformers' object.
    num_layers : int
        Of the model.

    Raises
    ------
    TypeError, ValueError
        An entry is not as transformers has it.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, (str, NoneType)):
        raise TypeError(f"model_type must be a str, got {type(model_type).__name__}")
    types = config.get("layer_types") or config.get("layers_block_type")
    types = types or _usual_types(config, model_type, num_layers)
    if not isinstance(types, (list, tuple)):
        raise TypeError(f"layer_types must be a list with a name for each layer, got {type(types).__name__}")
    if model_type in _FULL_DIFFER:
        types = [*types[:-1], _FULL]
    if len(types) != num_layers:
        raise ValueError(f"layer_types must have {num_layers} entries, one for each layer, got {len(types)}")
    return [_OLDER_NAMES.get(str(one), str(one)) for one in types]


def layer_windows(config: Mapping[str, Any], num_layers: int) -> LayerWindows:
    """Read which K and V the layers of a model need; parameters and errors as of `layer_types`.

    Raises
    ------
    ValueError
        Also if layers attend in another way, such as in chunks.
    """
    types = layer_types(config, num_layers)
    if others := set(types) - LAYER_TYPES:
        known = ", ".join(sorted(LAYER_TYPES))
        raise ValueError(f"layer_types must be of {known}, got {', '.join(sorted(others))}")
    layers = [layer for layer, kind in enumerate(types) if kind in ATTENDING]
    kinds = [_SLIDING if types[layer] == _SLIDING else _FULL for layer in layers]
    model_type, window = config.get("model_type"), config.get("sliding_window")
    if not window or not config.get("use_sliding_window", model_type not in _SLIDE_ON_REQUEST):
        window = None
    else:
        window = as_int("sliding_window", window, minimum=1)
    windows = [window if kind == _SLIDING else None for kind in kinds]
    num_own = len(kinds) - as_int("num_kv_shared_layers", config.get("num_kv_shared_layers") or 0)
    last = {kind: place for place, kind in enumerate(kinds[: max(0, num_own)])}
    if missing := set(kinds) - set(last):
        raise ValueError(f"num_kv_shared_layers must leave a layer of {', '.join(sorted(missing))} with K and V")
    return LayerWindows(layers, windows, {place: last[kinds[place]] for place in range(num_own, len(kinds))})


def _usual_types(config: Mapping[str, Any], model_type: str | None, num_layers: int) -> list[str]:
    """The types of layers that the configuration class of a model makes."""
    if model_type in _ALL_SLIDE:
        return [_SLIDING] * num_layers
    if model_type in _FIRST_LAYERS_FULL:
        num_full = as_int("max_window_layers", config.get("max_window_layers", 28))
        return [_FULL if layer < num_full else _SLIDING for layer in range(num_layers)]
    if model_type in _FULL_EVERY:
        every = as_int("sliding_window_pattern", config.get("sliding_window_pattern") or _FULL_EVERY[model_type])
        return [_SLIDING if (layer + 1) % every else _FULL for layer in range(num_layers)]
    if model_type == "falcon_h1":
        return [_HYBRID] * num_layers
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        return [_OF_PATTERN.get(letter, letter) for letter in pattern]
    if model_type in _ATTENDING_LAYERS:
        key, others = _ATTENDING_LAYERS[model_type]
        return [_FULL if layer in (config.get(key) or ()) else others for layer in range(num_layers)]
    if model_type in _LINEAR_BUT_EVERY_FOURTH:
        every = as_int("full_attention_interval", config.get("full_attention_interval", 4), minimum=1)
        return [_LINEAR if (layer + 1) % every else _FULL for layer in range(num_layers)]
    return [_FULL] * num_layers
