"""use_pagedkv: makes the attention layers of a model run on pagedkv."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ...errors import BackendUnavailableError
from ...memory.sizing import shapes_of
from ...operations.attention import decode_attention, prefill_attention
from ...operations.caches import write_kv
from .attention import ForwardPass, choose_pagedkv, choose_transformers, uses_pagedkv
from .cache import PagedCache
from .layers import let_layers_find
from .models import (
    CACHE_NAMES,
    cache_name,
    has_states,
    heads_divided_by,
    input_names,
    kv_shape,
    require_causal,
    require_supported,
    rotary_switch,
    text_config,
    uncompiled,
)
from .paged import AllocatorPages, PagedPass
from .running import LayerTurns, PassCache, running

_PAGES = "_pages_of_pagedkv"
_Cache = TypeVar("_Cache", PagedCache, PassCache)


def use_pagedkv(model: PreTrainedModel) -> None:
    """Make a model of transformers compute attention with pagedkv.

    From then on ``model.generate_batch`` and transformers' ContinuousBatchingManager read their own pages with
    pagedkv's kernels, ``model.generate`` takes a `PagedCache`, and the model itself takes a `forward_pass`. All other
    calls of the model compute attention as transformers does, with sdpa, or eager if the model had that or supports
    nothing else. ``model.set_attn_implementation("sdpa")`` undoes it; for Bloom, whose attention transformers does not
    set, use ``model.config._attn_implementation = "eager"``. If pagedkv has no kernels for the model's device, it warns
    and leaves the model as it is; generate_batch works with that as well.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder on the CPU or a CUDA device.

    Raises
    ------
    ValueError
        Paged attention does not compute what the model's layers compute.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from pagedkv.integrations.transformers import use_pagedkv
    >>> heads = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, intermediate_size=64, **heads)).eval()
    >>> use_pagedkv(model)
    >>> model.config._attn_implementation
    'pagedkv_flash'
    """
    model = uncompiled(model)  # generate calls this model, not the compiled module around it
    require_supported(model)
    try:
        _try_kernels(model)
    except (BackendUnavailableError, TypeError, ValueError) as error:
        name = choose_transformers(model)
        warnings.warn(f"pagedkv has no kernels for {model.device}, so attention is {name}: {error}", stacklevel=2)
        return
    set_attention(model)


def set_attention(model: PreTrainedModel) -> None:
    """Make the model's layers compute attention with pagedkv in calls that have a forward pass.

    `use_pagedkv` does this for a supported model on a device with kernels.
    """
    choose_pagedkv(model)
    if has_states(model):
        model.init_continuous_batching = partial(_refuse_continuous_batching, type(model).__name__)
    if _before_forward not in model._forward_pre_hooks.values():
        let_layers_find(model)
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        model.register_forward_hook(_after_success, with_kwargs=True)
        model.register_forward_hook(_after_any_end, always_call=True)


def _refuse_continuous_batching(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{name} has layers with a state, which transformers' continuous batching (generate_batch) does not keep: use "
        "pagedkv.integrations.transformers.Engine, or generate with a PagedCache"
    )


def _try_kernels(model: PreTrainedModel) -> None:
    """Write a token to caches of the model's shapes, dtype and device, and compute its attention."""
    where = {"dtype": model.dtype, "device": model.device}
    num_heads = text_config(model).num_attention_heads // heads_divided_by(model)
    table, length = torch.arange(2, dtype=torch.int32, device=model.device).split(1)
    for num_kv_heads, head_dim in {*shapes_of(*kv_shape(model))}:
        k_cache, v_cache, token = torch.zeros(3, 1, 1, num_kv_heads, head_dim, **where)
        q = torch.zeros(1, num_heads, head_dim, **where)
        write_kv(token[0], token[0], k_cache, v_cache, table.long())
        decode_attention(q, k_cache, v_cache, table[None], length)
        prefill_attention(q, k_cache, v_cache, table[None], length, torch.cat([table, length]))


@torch.compiler.disable
def _before_forward(
    model: PreTrainedModel, args: tuple[Any, ...], inputs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before a model's forward: adds the forward pass that the caches among its inputs imply.

    In all of them the model updates a cache of ours, which says which layer attends next.
    """
    made, named = inputs.get("forward_pass"), _inputs_by_name(model, args, inputs)
    cache = _cache_of(named, PagedCache)
    if uses_pagedkv(model):
        made = made or _pass_of_continuous_batching(model, inputs)
        if made is not None or cache is not None:
            require_causal(model, named)
        if made is None and cache is not None:
            made = _pass_of_generate(model, cache, named)
    elif made is not None or cache is not None:
        # Other attention would see the new tokens alone.
        raise RuntimeError(
            f"the attention of {type(model).__name__} is {model.config._attn_implementation} now, which reads no "
            "PagedKVCache: call use_pagedkv(model) again"
        )
    if made is None:
        running.begin(None, None)
        return None
    own = cache or _cache_of(named, PassCache)
    if own is None:
        if has_states(model):
            raise ValueError(
                f"{type(model).__name__} has layers with a state, which a forward_pass does not keep: use a PagedCache "
                "or an Engine"
            )
        own = PassCache()
        inputs = inputs | {cache_name(model): own}
    own.turns = LayerTurns(type(model).__name__)
    running.begin(made, own.turns)
    return args, inputs | {"forward_pass": made}


@torch.compiler.disable
def _after_success(model: PreTrainedModel, args: tuple[Any, ...], inputs: dict[str, Any], outputs: Any) -> None:
    """Hook after a model's forward, unless that fails."""
    if running.turns is not None:
        running.turns.require_attended()
    if (cache := _cache_of(_inputs_by_name(model, args, inputs), PagedCache)) is not None:
        cache.end()


@torch.compiler.disable
def _after_any_end(model: PreTrainedModel, args: tuple[Any, ...], outputs: Any) -> None:
    """Hook after a model's forward, even if that fails."""
    running.begin(None, None)


def _pass_of_continuous_batching(model: PreTrainedModel, inputs: dict[str, Any]) -> ForwardPass | None:
    """The pass of transformers' continuous batching, if that calls the model."""
    cache = inputs.get("cache")
    if not isinstance(cache, PagedAttentionCache):
        return None
    kept = vars(cache)  # stored in the cache itself, since a reference elsewhere would keep its memory alive
    if _PAGES not in kept:
        if (switch := rotary_switch(model)) is not None:
            warnings.warn(
                f"transformers rotates all requests of {type(model).__name__} by other frequencies once one of a step "
                f"has more than {switch} tokens, which changes what generate_batch says: keep all of them shorter",
                stacklevel=2,
            )
        kept[_PAGES] = [AllocatorPages.of(allocator) for allocator in cache.cache_allocators.values()]
    return PagedPass(kept[_PAGES], inputs)


def _inputs_by_name(model: PreTrainedModel, args: tuple[Any, ...], inputs: dict[str, Any]) -> dict[str, Any]:
    """All inputs by name, positional ones too."""
    return dict(zip(input_names(model), args, strict=False)) | inputs if args else inputs


def _cache_of(inputs: dict[str, Any], kind: type[_Cache]) -> _Cache | None:
    return next((inputs[name] for name in CACHE_NAMES if isinstance(inputs.get(name), kind)), None)


def _pass_of_generate(model: PreTrainedModel, cache: PagedCache, inputs: dict[str, Any]) -> ForwardPass:
    """The pass of a call of ``generate`` with a PagedCache."""
    cache.require_suits(model)
    if inputs.get("use_cache") is False:
        raise ValueError(
            "with use_cache=False generate would write the whole text anew in each step: leave it out, of the "
            "generation_config too, with a PagedCache"
        )
    tokens = inputs.get("input_ids")
    num_rows, length = (inputs["inputs_embeds"] if tokens is None else tokens).shape[:2]
    mask = inputs.get("attention_mask")
    cache.require_positions(inputs.get("position_ids"), num_rows, length, mask)
    return cache.begin(num_rows, length, mask)
