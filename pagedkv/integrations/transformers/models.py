"""Facts about models of transformers, and which of them paged attention can run."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

from ...layer_states import LayerStates, layer_states, why_no_states
from ...layer_windows import LAYER_TYPES, WITH_STATE, LayerWindows, layer_shapes, layer_windows, unequal_layers

CACHE_NAMES = "cache", "past_key_values"  # of a model's input; the second one before transformers 5.24
_SHAPE = {"num_key_value_heads", "head_dim"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj"}
# Keys and values of other heads, masks, or keywords of theirs do not come to attention as others' do.
_ATTEND_ON_THEIR_OWN = {"doge", "jetmoe", "mimo_v2_flash", "nemotron"}
_HAND_ON_SHARED = {"gemma3n_text", "gemma4_text", "gemma4_unified_text"}
_SEE_ALL_OF_AN_IMAGE = {"gemma3", "gemma4", "gemma4_unified", "molmo2"}


def uncompiled(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside the module that ``torch.compile(model)`` returns; other models are returned as they are."""
    return getattr(model, "_orig_mod", model)


def input_names(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of a model's positional inputs, from the first forward in its MRO without ``*args``."""
    of_classes = [vars(kind)["forward"].__get__(model) for kind in type(model).__mro__ if "forward" in vars(kind)]
    for forward in (model.forward, *of_classes):
        parameters = signature(forward).parameters
        if all(parameter.kind != Parameter.VAR_POSITIONAL for parameter in parameters.values()):
            return tuple(parameters)
    return ()


def cache_name(model: PreTrainedModel) -> str:
    """The name of the input of a model that is a cache of transformers."""
    return next((name for name in CACHE_NAMES if name in input_names(model)), CACHE_NAMES[-1])


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the model's decoder.

    Raises
    ------
    TypeError
        It is no model.
    """
    if not hasattr(model, "config"):
        raise TypeError(f"model must be a model of transformers, as from_pretrained returns it, got {model!r}")
    return model.config.get_text_config(decoder=True)


def num_layers(model: PreTrainedModel) -> int:
    """All layers of a model, those that neither attend nor have a state among them."""
    layers: int = text_config(model).num_hidden_layers
    return layers


def kv_shape(model: PreTrainedModel) -> tuple[int, int | list[int], int | list[int]]:
    """(num_layers, num_kv_heads, head_dim) of a supported model: layers that attend, and heads of this rank.

    The last two are lists with one for each of these layers where they differ.
    """
    config, count = text_config(model), len(kv_windows(model).layers)
    if _has_shapes(config):
        said = config.to_dict()
        shapes = layer_shapes(said, num_layers(model), said["num_key_value_heads"], said["head_dim"])
        return count, shapes["num_kv_heads"], shapes["head_dim"]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return count, _num_kv_heads(config) // heads_divided_by(model), head_dim


def _has_shapes(config: Any) -> bool:
    """Whether the layers of a decoder differ in the shape of their K and V; its configuration has none for all then."""
    return not _SHAPE.isdisjoint(config.per_layer_attributes or ())


def kv_windows(model: PreTrainedModel) -> LayerWindows:
    """Which layers of a supported model attend, to which tokens, and which have no K and V of their own."""
    config = text_config(model)
    return layer_windows(config.to_dict(), num_layers(model))


def kv_states(model: PreTrainedModel) -> LayerStates:
    """Which layers of a supported model have a state, and its shapes."""
    config = text_config(model)
    return layer_states(config.to_dict(), num_layers(model))


def has_states(model: PreTrainedModel) -> bool:
    """Whether layers of a model have a state, by their types alone."""
    return not WITH_STATE.isdisjoint(getattr(text_config(model), "layer_types", None) or ())


def heads_divided_by(model: PreTrainedModel) -> int:
    """How many ranks divide the heads of a supported model among them: 1 if each rank has all of them."""
    if num_ranks(model) == 1:
        return 1
    num_kv_heads = _num_kv_heads(text_config(model))
    return num_kv_heads // (_kv_heads_of_rank(model, num_kv_heads) or num_kv_heads)


def _num_kv_heads(config: Any) -> int:
    """The KV heads of all ranks together."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def num_ranks(model: PreTrainedModel) -> int:
    """Over how many ranks the weights of a model are sharded."""
    return getattr(model, "tp_size", None) or 1


def _kv_heads_of_rank(model: PreTrainedModel, num_kv_heads: int) -> int | None:
    """The KV heads that a rank of the model computes; None if transformers cannot divide them evenly."""
    size = num_ranks(model)
    return num_kv_heads if size == 1 else get_kv_heads_per_rank(model.tp_plan, num_kv_heads, size)


def require_supported(model: PreTrainedModel) -> None:
    """Raise unless paged attention computes what the layers of a model compute.

    Raises
    ------
    ValueError
        The model is not a decoder whose layers all attend to all tokens before, or to the last of them.
    """
    config, name = text_config(model), type(model).__name__
    if reason := _what_is_missing(model, config):
        raise ValueError(f'{name} {reason}: pagedkv cannot run it; keep model.set_attn_implementation("sdpa")')


def require_causal(model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    """Raise if inputs of a model need a mask other than the causal one.

    Raises
    ------
    ValueError
        The inputs include images whose tokens attend to later ones.
    """
    images = [inputs.get("pixel_values"), *(inputs.get("mm_encoder_outputs") or {}).values()]
    if model.config.model_type in _SEE_ALL_OF_AN_IMAGE and any(image is not None for image in images):
        raise ValueError(
            f"{type(model).__name__} lets each token of an image see all of it, and pagedkv only what comes before it: "
            "give it text alone, or call it without a PagedCache"
        )


def require_positions(model: PreTrainedModel) -> None:
    """Raise unless a model takes the positions of its tokens as an input.

    Raises
    ------
    ValueError
        It counts positions itself, or not from 0, which would be wrong for several sequences in one row.
    """
    model = uncompiled(model)
    if model.config.model_type == "bloom":  # it has none
        return
    counts = any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
    if counts or "position_ids" not in input_names(model):
        raise ValueError(
            f"{type(model).__name__} counts positions itself, and an Engine has several requests in one row: use "
            "model.generate with a PagedCache"
        )


def dtype_of_values(model: PreTrainedModel) -> torch.dtype:
    """The dtype in which the model's layers make values: that of its weights, or of torch.autocast where it is on."""
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


def rotary_switch(model: PreTrainedModel) -> int | None:
    """How many tokens a sequence may have before transformers rotates its whole pass by other frequencies.

    It takes those of the largest position for all sequences. None if frequencies never change.
    """
    config, model = text_config(model), uncompiled(model)
    parameters = getattr(config, "rope_parameters", None) or {}
    switches: list[int] = [
        x["original_max_position_embeddings"] if x["rope_type"] == "longrope" else config.max_position_embeddings
        for x in (parameters, *parameters.values())
        if isinstance(x, dict) and _may_change(x.get("rope_type"))
    ]
    switch = min(switches, default=None)
    if switch is None or not any(_changes(module, 2 * switch) for module in model.modules()):
        return None
    return switch


def _may_change(rope_type: str | None) -> bool:
    return rope_type is not None and (rope_type == "longrope" or "dynamic" in rope_type)


@torch.no_grad()
def _changes(module: torch.nn.Module, position: int) -> bool:
    """Whether a module rotates position 1 in another way if its pass has this position, too."""
    kinds = getattr(module, "rope_type", None)
    of_layers = kinds if isinstance(kinds, dict) else {None: kinds}
    for layer_type in [x for x, kind in of_layers.items() if _may_change(kind)]:
        which = {} if layer_type is None else {"layer_type": layer_type}
        x = torch.zeros(1, device=next(module.buffers()).device)
        alone, beside = (torch.tensor([ids], device=x.device) for ids in ([1], [1, position]))
        # The last pass leaves the module as it was.
        tables = [torch.stack(module(x, ids, **which))[:, :, 0] for ids in (alone, beside, alone)]
        if not torch.equal(tables[0], tables[1]):
            return True
    return False


def require_one_rotation(model: PreTrainedModel, max_seq_len: int, block_size: int) -> None:
    """Raise unless sequences of at most so many tokens are rotated in the same way, whatever runs beside them.

    Raises
    ------
    ValueError
        One long sequence would change the frequencies of all.
    """
    switch = rotary_switch(model)
    if switch is not None and max_seq_len > switch:
        raise ValueError(
            f"{type(model).__name__} rotates all requests of a step by other frequencies once one of them has more "
            f"than {switch} tokens, and the engine has room for {max_seq_len}: pass "
            f"max_seq_len={switch - switch % block_size}. For longer ones with rope_type longrope, load the model with "
            "short_factor = long_factor in config.rope_parameters; model.generate with a PagedCache takes it as it is"
        )


def _what_is_missing(model: PreTrainedModel, config: Any) -> str | None:
    """Why paged attention cannot run a model; None if it can."""
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder, whose cross-attention sees tokens that are no part of its sequence"
    if "num_attention_heads" in (config.per_layer_attributes or ()):
        return "has layers of several num_attention_heads"
    if not hasattr(config, "num_attention_heads"):
        return "has layers with a state in place of keys and values (Mamba)"
    if reason := why_no_states(config.to_dict()):
        return reason
    if others := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        return f"has layers of types {', '.join(sorted(others))}"
    if has_states(model):
        try:
            kv_states(model)
        except ValueError as error:
            return f"has layers with a state, and {error}"
    elif model._is_stateful:
        return "has layers with a state in place of keys and values"
    # The masks of these have it, and nothing else.
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if (
        (config.model_type in ("olmoe", "phimoe") and getattr(config, "sliding_window", None))
        or (config.model_type == "qwen2_moe" and slides)
        or (config.model_type == "smollm3" and slides and not config.use_sliding_window)
    ):
        return "has a sliding window that its layers do not ask attention for"
    if config.model_type == "gpt_bigcode" and _num_kv_heads(config) != (1 if config.multi_query else config.n_head):
        return f"has multi_query={config.multi_query} and num_key_value_heads={config.num_key_value_heads}"
    if config.model_type == "diffusion_gemma_text":
        return "generates by diffusion, with tokens that see later ones"
    if config.model_type == "diffllama":
        return "attends twice in each layer, to two parts of its values"
    # Of these, Gemma 3n and 4 alone hand the keys and values of another layer to attention.
    if getattr(config, "num_kv_shared_layers", 0) and config.model_type not in _HAND_ON_SHARED:
        return "has layers that read the keys and values of other layers"
    if config.model_type in _ATTEND_ON_THEIR_OWN or not (
        model._can_set_attn_implementation() or config.model_type == "bloom"
    ):
        return "computes attention in its own layers, not by transformers' AttentionInterface"
    if reason := unequal_layers(config.to_dict()):
        return reason
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    if causal and not any(causal):
        return "is an encoder, whose tokens see later ones"
    if reason := _why_not_on_ranks(model, config):
        return reason
    head_dims = kv_shape(model)[2]
    for head_dim in head_dims if isinstance(head_dims, list) else [head_dims]:
        if head_dim % 8 or not 8 <= head_dim <= 512:
            return f"has head_dim {head_dim}, which is no multiple of 8 from 8 to 512"
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"has dtype {model.dtype}, which is none of float32, float16 and bfloat16"
    return None


def _why_not_on_ranks(model: PreTrainedModel, config: Any) -> str | None:
    """Why paged attention cannot run a model that is sharded over ranks as this one is; None if it can."""
    sharded = getattr(model.config, "distributed_config", None)
    sizes = {name: getattr(sharded, name, None) or 1 for name in ("pp_size", "fsdp_size", "dp_replicate_size")}
    if others := [f"{name}={size}" for name, size in sizes.items() if size > 1]:
        return f"is sharded with {', '.join(others)}, and not by heads alone (tp_size)"
    if (size := num_ranks(model)) == 1:
        return None
    if has_states(model):
        return f"has layers with a state, which pagedkv does not divide over {size} ranks"
    if _has_shapes(config):
        return f"has layers of several shapes, whose heads pagedkv does not divide over {size} ranks"
    num_kv_heads = _num_kv_heads(config)
    if _kv_heads_of_rank(model, num_kv_heads) is None:
        return f"has {num_kv_heads} KV heads, which {size} ranks cannot divide evenly (take a tp_size that does)"
    divided = {name.rsplit(".", 1)[-1] for name, style in model.tp_plan.items() if style == "colwise"}
    if divided & _PROJECTIONS not in (set(), _PROJECTIONS):
        return "has a tp_plan that shards some of q_proj, k_proj and v_proj and not all"
    return None
