"""The attention function that models of transformers call, and the record of a forward pass that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from ...arrays import host_view
from ...cache import PagedKVCache
from ...memory.device.batch import Batch

# transformers builds no mask for a name that has no mask function. Its continuous batching takes sdpa, eager, and
# names with "flash" in them.
NAME = "pagedkv_flash"
_REFUSED = {"output_attentions", "position_bias", "head_mask", "indices", "block_indices"}


class ForwardPass(Protocol):
    """What attention needs to know about one forward pass; a model gets it as the keyword `forward_pass`."""

    def attend(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Write the keys and values of the new tokens of a layer, and let its queries attend.

        Parameters
        ----------
        layer : int
        q : (num_tokens, num_heads, head_dim) tensor
            Of the tokens that the model was given, its batch flattened.
        k, v : (num_tokens, num_kv_heads, head_dim) tensor
        **options
            Those of :func:`~pagedkv.prefill_attention` that the model asks for: scale, window, softcap, sinks,
            alibi_slopes.

        Returns
        -------
        (num_tokens, num_heads, head_dim) tensor
        """


@dataclass(frozen=True, eq=False)
class CachedPass:
    """A forward pass over sequences of a PagedKVCache: ``model(ids, position_ids=..., forward_pass=CachedPass(...))``.

    The model gets all new tokens in one row, those of the first sequence first, with `batch.positions` as position_ids
    and ``use_cache=False``. Every layer writes to `slots` and reads the tables of `batch`.

    Attributes
    ----------
    cache : PagedKVCache
        Of torch tensors on the model's device; one layer for each of the model's.
    slots : (num_tokens,) int64 tensor
        Where the new K and V go, of `PagedKVCache.append` or `PagedKVCache.slots`; negative for tokens without any.
    batch : Batch
        Of `PagedKVCache.batch`, with the number of new tokens of each sequence as query_lens: block tables, seq_lens
        and query_starts.
    rows : (num_rows,) int64 tensor or None
        Which of the tokens are in `batch`, if not all: the others, padding, get zeros.
    """

    cache: PagedKVCache
    slots: torch.Tensor
    batch: Batch
    rows: torch.Tensor | None = None

    @cached_property
    def _slots(self) -> Any:
        return host_view(self.slots)  # once for all layers

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `ForwardPass`."""
        self.cache.write(layer, k, v, self._slots)
        if self.rows is None:
            return self.cache.attend(layer, q, self.batch, **options)
        out = torch.zeros_like(q)
        out[self.rows] = self.cache.attend(layer, q[self.rows], self.batch, **options)
        return out


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    is_causal: bool | None = None,
    forward_pass: ForwardPass | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer, under the name `NAME` in transformers' AttentionInterface.

    Parameters
    ----------
    module : Module
        The attention layer; its `layer_idx` says which of the cache's it is.
    query : (batch_size, num_heads, length, head_dim) tensor
    key, value : (batch_size, num_kv_heads, length, head_dim) tensor
        Of the new tokens alone.
    attention_mask
        None: what a query sees is known from its sequence.
    scaling, sliding_window, softcap, s_aux, alibi_slopes
        scale, window, softcap, sinks and alibi_slopes of :func:`~pagedkv.prefill_attention`.
    forward_pass : ForwardPass
        What the caller of the model passed to it.

    Returns
    -------
    out : (batch_size, length, num_heads, head_dim) tensor
    weights : None

    Raises
    ------
    RuntimeError
        No forward pass has come this far.
    ValueError
        The layer asks for what paged attention cannot do.
    """
    if forward_pass is None:
        raise RuntimeError(
            f"no forward_pass came to {type(module).__name__}: call use_pagedkv(model) first, and then "
            "model.generate_batch(...), model.generate(..., past_key_values=PagedCache(model)) or Engine(model); "
            'model.set_attn_implementation("sdpa"), or model.config._attn_implementation = "eager" for Bloom, brings '
            "back what the model had, and is what is left where these were called and the model's layers do not hand "
            "the keyword forward_pass on; an assistant_model keeps its own attention, and guidance_scale needs the "
            "model's own, since it calls the model without the cache"
        )
    wrong = (
        (attention_mask is not None and "attention_mask")
        or (dropout > 0 and "dropout")
        or (module.training and _have_gradients(query, key, value) and "gradients in train mode")
        or (not ((is_causal is None or is_causal) and getattr(module, "is_causal", True)) and "is_causal=False")
        or (key.shape[-1] != value.shape[-1] and "a value of another head_dim than its key, as in MLA")
        or next((x for x in _REFUSED & others.keys() if others[x] is not None and others[x] is not False), None)
    )
    if wrong:
        raise ValueError(
            f"paged attention does not take {wrong}, which {type(module).__name__} asks for: model.eval() asks for no "
            'dropout and no gradients, and model.set_attn_implementation("eager") brings back attention that takes it'
        )
    batch_size, num_heads, length, head_dim = query.shape
    if length == 1:
        q, k, v = query.squeeze(2), key.squeeze(2), value.squeeze(2)
    else:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    options = {"scale": scaling, "window": sliding_window, "softcap": softcap, "alibi_slopes": alibi_slopes}
    options["sinks"] = None if s_aux is None else s_aux.float()
    # torch.compile cannot trace the host's part: it breaks its graph there.
    attend = _attend_eagerly if torch.compiler.is_compiling() else _attend
    out = attend(forward_pass, module.layer_idx, q, k, v, options)
    return out.view(batch_size, length, num_heads, head_dim), None


def _have_gradients(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _attend(forward_pass: ForwardPass, layer: int, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    return forward_pass.attend(layer, q, k, v, **options)


_attend_eagerly = torch.compiler.disable(_attend)
AttentionInterface.register(NAME, paged_attention)


def set_attention(model: PreTrainedModel) -> None:
    """Let the model's layers call `paged_attention` from now on.

    ``model.set_attn_implementation`` looks for a kernel on the hub where a name has "flash" in it; the configuration
    takes any name.
    """
    model.config._attn_implementation = NAME


def reset_attention(model: PreTrainedModel) -> str:
    """Let the model's layers compute attention as transformers does; returns how transformers calls that."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation("sdpa")
    else:  # Bloom, for which transformers only warns
        model.config._attn_implementation = "eager"
    name: str = model.config._attn_implementation
    return name
