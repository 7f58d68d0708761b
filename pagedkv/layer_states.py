"""The states of layers that keep one in place of K and V, as the configuration of a model says them.

Needs neither transformers nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .layer_windows import ATTENDING, OF_STATES, WITH_STATE, layer_types
from .memory.arguments import as_int

# How each family names heads, head_dim, groups, state and kernel of Mamba 2.
_MAMBA = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_MAMBA2 = {
    "bamba": _MAMBA,
    "falcon_h1": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "zamba2": ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
}
_DELTA_RULE = {"olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
_CONVOLUTION = {"lfm2", "lfm2_moe", "lfm3"}
_KNOWN = {*_MAMBA2, *_DELTA_RULE, *_CONVOLUTION}
_SCANS_FROM_ZERO = {"jamba", "zamba"}
_SEVERAL_STATES = {"inkling2_text", "inkling_text", "qwen4_exp_text"}


class LayerStates(NamedTuple):
    """Which layers of a model have a state, and what is in it.

    Attributes
    ----------
    layers : list of int
        The layers of the model that have one; none in most models.
    shapes : dict of str to tuple of int
        The shapes of a layer's state for a sequence: "conv", the last inputs of its convolution, (channels, kernel);
        "recurrent", the matrix of each head.
    """

    layers: list[int]
    shapes: dict[str, tuple[int, ...]]

    def arrays(self, dtype: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
        """The shape and dtype of the states of all layers, as PagedKVCache takes them, of a model of this dtype."""
        dtypes = {"conv": dtype, "recurrent": "float32"}
        return {name: ((len(self.layers), *shape), dtypes[name]) for name, shape in self.shapes.items()}


def layer_states(config: Mapping[str, Any], num_layers: int) -> LayerStates:
    """Read which layers of a model have a state, and its shapes.

    Parameters
    ----------
    config : mapping
        The configuration of the decoder: its config.json, or `to_dict()` of transformers' object.
    num_layers : int
        Of the model.

    Raises
    ------
    TypeError, ValueError
        An entry is missing or not as transformers has it, no layer attends, or the states are of a kind that pagedkv
        does not keep.
    """
    if reason := why_no_states(config):
        raise ValueError(f"it {reason}")
    types = layer_types(config, num_layers)
    layers = [layer for layer, kind in enumerate(types) if kind in WITH_STATE]
    if layers and not ATTENDING & {*types}:
        raise ValueError("it has no layer with keys and values")
    return LayerStates(layers, _shapes(config) if layers else {})


def why_no_states(config: Mapping[str, Any]) -> str | None:
    """Why pagedkv cannot keep the states of a model, as the end of a sentence; None if it can, or if there are none."""
    model_type = config.get("model_type")
    if model_type in _SCANS_FROM_ZERO:
        return "has layers with a state (Mamba 1) that begin each chunk of a text from zero, not from their state"
    if model_type in _SEVERAL_STATES:
        return "has layers with several states each"
    named = config.get("layer_types") or config.get("layers_block_type") or ()
    if model_type in _KNOWN:
        return None
    given = [name for name, value in config.items() if value is not None and name.startswith(OF_STATES)]
    if given or (WITH_STATE | {"mamba"}) & {*map(str, named)}:
        return "has layers with a state of a kind that pagedkv does not know" + (
            f" ({model_type})" if model_type else ""
        )
    return None


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    model_type = config["model_type"]
    if model_type in _CONVOLUTION:
        return {"conv": _sizes(config, "hidden_size", "conv_L_cache")}
    if model_type in _DELTA_RULE:
        names = [f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")]
        key_heads, heads, key_dim, value_dim, kernel = _sizes(config, *names, "linear_conv_kernel_dim")
        channels = 2 * key_heads * key_dim + heads * value_dim
        return {"conv": (channels, kernel), "recurrent": (heads, key_dim, value_dim)}
    of_mamba = _MAMBA2[model_type]
    if config.get(of_mamba[1]) in (None, "auto"):
        width = config.get("mamba_d_ssm") or math.prod(_sizes(config, "mamba_expand", "hidden_size"))
        config = {**config, of_mamba[1]: width // _sizes(config, of_mamba[0])[0]}
    heads, head_dim, groups, state, kernel = _sizes(config, *of_mamba)
    return {"conv": (heads * head_dim + 2 * groups * state, kernel), "recurrent": (heads, head_dim, state)}


def _sizes(config: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    if missing := [name for name in names if config.get(name) is None]:
        raise ValueError(f"it has no {', '.join(missing)}")
    return tuple(as_int(name, config[name], minimum=1) for name in names)
