"""use_pagedkv: one call after which a model's layers run on pagedkv."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ...errors import BackendUnavailableError
from ...operations.attention import decode_attention, prefill_attention
from ...operations.caches import write_kv
from .attention import NAME, ForwardPass, reset_attention, set_attention
from .cache import PagedCache
from .layers import Layers
from .models import input_names, kv_shape, require_causal, require_supported, text_config, uncompiled
from .paged import PagedPass, Pages

_PAGES = "_pages_of_pagedkv"


def use_pagedkv(model: PreTrainedModel) -> None:
    """Let a model of transformers compute attention with pagedkv.

    After it ``model.generate_batch`` and transformers' ContinuousBatchingManager read their own pages with pagedkv's
    kernels, ``model.generate`` takes a `PagedCache`, and a `forward_pass` may be given to the model itself.
    ``model.set_attn_implementation("sdpa")`` takes it back; transformers does not set that of Bloom, for which it is
    ``model.config._attn_implementation = "eager"``. Where the model's device has no kernels, it warns, and the model
    gets that, with which generate_batch works as well.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder; on the CPU or a CUDA device.

    Raises
    ------
    ValueError
        Paged attention is not what the model's layers do.
    """
    model = uncompiled(model)  # whose generate calls it, and not what is around it
    require_supported(model)
    try:
        _try_kernels(model)
    except (BackendUnavailableError, TypeError, ValueError) as error:
        name = reset_attention(model)
        warnings.warn(f"pagedkv has no kernels for {model.device}, so attention is {name}: {error}", stacklevel=2)
        return
    set_attention(model)
    if not any(isinstance(hook, _Passes) for hook in model._forward_pre_hooks.values()):
        passes = _Passes(model)
        model.register_forward_pre_hook(passes, with_kwargs=True)
        model.register_forward_hook(_end, with_kwargs=True)
        model.register_forward_hook(passes.end, always_call=True)


def _try_kernels(model: PreTrainedModel) -> None:
    """Write one token to a cache of the model's shapes, dtype and device, and let it attend."""
    _, num_kv_heads, head_dim = kv_shape(model)
    where = {"dtype": model.dtype, "device": model.device}
    k_cache, v_cache, token = torch.zeros(3, 1, 1, num_kv_heads, head_dim, **where)
    q = torch.zeros(1, text_config(model).num_attention_heads, head_dim, **where)
    table, length = torch.arange(2, dtype=torch.int32, device=model.device).split(1)
    write_kv(token[0], token[0], k_cache, v_cache, table.long())
    decode_attention(q, k_cache, v_cache, table[None], length)
    prefill_attention(q, k_cache, v_cache, table[None], length, torch.cat([table, length]))


class _Passes:
    """Called before a model's forward: adds what the caches among its inputs say of this forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = Layers(model)

    @torch.compiler.disable
    def __call__(
        self, model: PreTrainedModel, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        made = inputs.get("forward_pass")
        if model.config._attn_implementation == NAME:
            require_causal(model, _named(model, args, inputs))
            made = made or _paged(inputs) or _cached(model, _named(model, args, inputs))
        elif made is not None or _cache_of(_named(model, args, inputs)) is not None:
            # Other attention would see the new tokens alone.
            raise RuntimeError(
                f"the attention of {type(model).__name__} is {model.config._attn_implementation} now, which reads no "
                "PagedKVCache: call use_pagedkv(model) again"
            )
        self._layers.begin(made)
        return None if made is None else (args, inputs | {"forward_pass": made})

    @torch.compiler.disable
    def end(self, model: PreTrainedModel, args: tuple[Any, ...], outputs: Any) -> None:
        """Called after a model's forward, even if it fails."""
        self._layers.end()


def _paged(inputs: dict[str, Any]) -> ForwardPass | None:
    """The pass of transformers' continuous batching, if that is what calls the model."""
    cache = inputs.get("cache")
    if not isinstance(cache, PagedAttentionCache):
        return None
    kept = vars(cache)  # by the cache itself: whoever else kept them would keep its memory
    if _PAGES not in kept:
        kept[_PAGES] = [Pages.of(allocator) for allocator in cache.cache_allocators.values()]
    return PagedPass(kept[_PAGES], inputs)


def _named(model: PreTrainedModel, args: tuple[Any, ...], inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs by their names, those too that came by their place."""
    return dict(zip(input_names(model), args, strict=False)) | inputs if args else inputs


def _cache_of(inputs: dict[str, Any]) -> PagedCache | None:
    cache = inputs.get("past_key_values")
    return cache if isinstance(cache, PagedCache) else None


def _cached(model: PreTrainedModel, inputs: dict[str, Any]) -> ForwardPass | None:
    """The pass of ``generate`` with a PagedCache, if there is one."""
    cache = _cache_of(inputs)
    if cache is None:
        return None
    cache.require_suits(model)
    if inputs.get("use_cache") is False:
        raise ValueError(
            "with use_cache=False generate would write the whole text anew in each step: leave it out, of the "
            "generation_config too, with a PagedCache"
        )
    tokens = inputs.get("input_ids")
    num_rows, length = (inputs["inputs_embeds"] if tokens is None else tokens).shape[:2]
    return cache.begin(num_rows, length, inputs.get("attention_mask"))


@torch.compiler.disable
def _end(model: PreTrainedModel, args: tuple[Any, ...], inputs: dict[str, Any], outputs: Any) -> None:
    """Called after a model's forward, unless it fails."""
    if (cache := _cache_of(_named(model, args, inputs))) is not None:
        cache.end()
