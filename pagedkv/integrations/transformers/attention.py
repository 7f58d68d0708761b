"""The attention function that models of transformers call, and the record of a forward pass that it reads."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...arrays import host_view
from ...cache import PagedKVCache
from ...cached_property import cached_property
from ...memory.device.batch import Batch
from .models import text_config

# Names in transformers' AttentionInterface. Its continuous batching takes sdpa, eager, and names with "flash" in them.
NAME = "pagedkv_flash"
_OVER_EAGER = f"{NAME}_over_eager"  # for models that transformers does not run with sdpa
_REFUSED = {"output_attentions", "position_bias", "head_mask", "indices", "block_indices"}


class ForwardPass(Protocol):
    """What attention needs for one forward pass; pass it to the model as the keyword `forward_pass`."""

    def attend(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Write the keys and values of the new tokens of a layer, and compute attention of its queries.

        Parameters
        ----------
        layer : int
        q : (num_tokens, num_heads, head_dim) tensor
            The queries of the model's input, with the batch flattened.
        k, v : (num_tokens, num_kv_heads, head_dim) tensor
        **options
            Options of :func:`~pagedkv.prefill_attention` that the model asks for: scale, window, softcap, sinks,
            alibi_slopes.

        Returns
        -------
        (num_tokens, num_heads, head_dim) tensor
        """


@dataclass(frozen=True, eq=False)
class CachedPass:
    """A forward pass over sequences of a PagedKVCache: ``model(ids, position_ids=..., forward_pass=CachedPass(...))``.

    The model gets all new tokens in one row, in the order of the sequences, with `batch.positions` as position_ids and
    ``use_cache=False``. Every layer writes to `slots` and reads the tables of `batch`.

    Attributes
    ----------
    cache : PagedKVCache
        A cache of torch tensors on the model's device, with as many layers as the model.
    slots : (num_tokens,) or (num_groups, num_tokens) int64 tensor
        Where the new K and V go, from `PagedKVCache.append` or `PagedKVCache.slots`; negative for padding.
    batch : Batch
        From `PagedKVCache.batch`, with the number of new tokens of each sequence as query_lens.
    rows : (num_rows,) int64 tensor or None
        Which of the tokens are in `batch`, if not all; the others are padding and get zeros.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from pagedkv.integrations.transformers import CachedPass, use_pagedkv
    >>> heads = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, intermediate_size=64, **heads)).eval()
    >>> from pagedkv import PagedKVCache
    >>> use_pagedkv(model)
    >>> cache = PagedKVCache(1, 16, 16, 2, 64, array_module=torch, device="cpu")
    >>> seq, _ = cache.add(3)
    >>> batch = cache.batch([seq], 3)
    >>> forward_pass = CachedPass(cache, cache.slots(seq, 0, 3), batch)
    >>> with torch.no_grad():
    ...     out = model(
    ...         torch.tensor([[1, 5, 3]]),
    ...         position_ids=batch.positions[None],
    ...         use_cache=False,
    ...         forward_pass=forward_pass,
    ...     )
    >>> out.logits.shape
    torch.Size([1, 3, 64])
    """

    cache: PagedKVCache
    slots: torch.Tensor
    batch: Batch
    rows: torch.Tensor | None = None

    @cached_property
    def _slots(self) -> Any:
        return host_view(self.slots)  # once for all layers

    @cached_property
    def _writing(self) -> set[int]:
        """The layers with K and V of their own; others read those of an earlier layer."""
        return {layer for group in self.cache.groups for layer in group.layers}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `ForwardPass`."""
        if layer in self._writing:
            self.cache.write(layer, k, v, self._slots)
        if self.rows is None:
            return self.cache.attend(layer, q, self.batch, **options)
        out = torch.zeros_like(q)
        out[self.rows] = self.cache.attend(layer, q[self.rows], self.batch, **options)
        return out


class WatchedPass:
    """A `CachedPass` that records which rows are finite after the last layer, which any NaN or Inf reaches.

    Attributes
    ----------
    finite : (num_tokens,) bool tensor
        After the last layer.
    """

    finite: torch.Tensor

    def __init__(self, cache: PagedKVCache, slots: torch.Tensor, batch: Batch) -> None:
        self._pass, self._last_layer = CachedPass(cache, slots, batch), len(cache.k_caches) - 1

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `ForwardPass`."""
        out = self._pass.attend(layer, q, k, v, **options)
        if layer == self._last_layer:
            self.finite = out.isfinite().flatten(1).all(1)
        return out


class _Running(threading.local):
    """The forward pass in progress on this thread, and whether a layer has attended through it."""

    # torch calls no hook after an interrupt. With a weak reference only the forward itself keeps the pass alive, and
    # with it a cache that may fill most of a device.
    _pass: weakref.ref[ForwardPass] | None = None
    has_attended = False

    def begin(self, forward_pass: ForwardPass | None) -> None:
        """Set the pass that layers and masks on this thread find until the next `begin`; None without pagedkv."""
        self._pass = None if forward_pass is None else weakref.ref(forward_pass)
        self.has_attended = False

    @property
    def forward_pass(self) -> ForwardPass | None:
        return None if self._pass is None else self._pass()


running = _Running()


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    forward_pass: ForwardPass | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention of a layer; registered as `NAME` in transformers' AttentionInterface.

    Without a forward pass it computes attention as transformers does.

    Parameters
    ----------
    module : Module
        The attention layer; its `layer_idx` selects the layer of the cache.
    query : (batch_size, num_heads, length, head_dim) tensor
    key, value : (batch_size, num_kv_heads, length, head_dim) tensor
        Keys and values of the new tokens alone.
    attention_mask
        Must be None: the sequence of a query determines what it sees.
    forward_pass : ForwardPass
        The forward pass that the caller of the model passed.
    **options
        Options of transformers: `scaling`, `sliding_window`, `softcap`, `s_aux` and `alibi_slopes` become scale,
        window, softcap, sinks and alibi_slopes of :func:`~pagedkv.prefill_attention`.

    Returns
    -------
    out : (batch_size, length, num_heads, head_dim) tensor
    weights : None

    Raises
    ------
    ValueError
        The layer asks for what paged attention cannot do.

    Examples
    --------
    >>> from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    >>> from pagedkv.integrations.transformers import NAME, paged_attention
    >>> ALL_ATTENTION_FUNCTIONS[NAME] is paged_attention
    True
    """
    if forward_pass is None:
        return _attention_without_pagedkv(module)(module, query, key, value, attention_mask, **options)
    _require_possible(module, query, key, value, attention_mask, options)
    batch_size, num_heads, length, head_dim = query.shape
    if length == 1:
        q, k, v = query.squeeze(2), key.squeeze(2), value.squeeze(2)
    else:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    sinks = options.get("s_aux")
    asked = {
        "scale": options.get("scaling"),
        "window": options.get("sliding_window"),
        "softcap": options.get("softcap"),
        "alibi_slopes": options.get("alibi_slopes"),
        "sinks": None if sinks is None else sinks.float(),
    }
    # torch.compile cannot trace the part on the host, so the graph breaks here.
    attend = _attend_eagerly if torch.compiler.is_compiling() else _attend
    out = attend(forward_pass, module.layer_idx, q, k, v, asked)
    return out.view(batch_size, length, num_heads, head_dim), None


def _require_possible(
    module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, options: dict[str, Any]
) -> None:
    """Raise ValueError if a layer asks for what paged attention cannot do."""
    is_causal = options.get("is_causal")
    wrong = (
        (attention_mask is not None and "attention_mask")
        or (options.get("dropout", 0.0) > 0 and "dropout")
        or (module.training and _have_gradients(query, key, value) and "gradients in train mode")
        or (not ((is_causal is None or is_causal) and getattr(module, "is_causal", True)) and "is_causal=False")
        or (key.shape[-1] != value.shape[-1] and "a value of another head_dim than its key, as in MLA")
        or next((x for x in _REFUSED & options.keys() if options[x] is not None and options[x] is not False), None)
    )
    if wrong:
        raise ValueError(
            f"paged attention does not take {wrong}, which {type(module).__name__} asks for: model.eval() asks for no "
            "dropout and no gradients, and a call of the model without a forward_pass or a PagedCache takes it"
        )


def _attention_without_pagedkv(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The function that a layer calls without pagedkv: sdpa, or the eager function of the model's file."""
    if implementation(module.config) == "sdpa":
        sdpa: Callable[..., tuple[torch.Tensor, None]] = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa
    of_files = (vars(sys.modules[kind.__module__]).get("eager_attention_forward") for kind in type(module).__mro__)
    return next(filter(None, of_files))


def mask(*, config: Any, **arguments: Any) -> torch.Tensor | None:
    """Make the mask of a model's layers; registered as `NAME` in transformers' AttentionMaskInterface.

    None in a forward pass of pagedkv, otherwise the mask that transformers makes.
    """
    if _is_paged():
        return None
    made: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[implementation(config)](config=config, **arguments)
    return made


@torch.compiler.disable
def _is_paged() -> bool:
    return running.forward_pass is not None


def _have_gradients(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _attend(forward_pass: ForwardPass, layer: int, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    running.has_attended = True
    return forward_pass.attend(layer, q, k, v, **options)


_attend_eagerly = torch.compiler.disable(_attend)
for _name in (NAME, _OVER_EAGER):
    AttentionInterface.register(_name, paged_attention)
    AttentionMaskInterface.register(_name, mask)


def uses_pagedkv(model: PreTrainedModel) -> bool:
    """Whether the model's layers call `paged_attention`."""
    return model.config._attn_implementation in (NAME, _OVER_EAGER)


def implementation(config: Any) -> str:
    """The name in transformers of the attention that layers with this configuration compute without pagedkv."""
    name: str = config._attn_implementation
    return {NAME: "sdpa", _OVER_EAGER: "eager"}.get(name, name)


def choose_pagedkv(model: PreTrainedModel) -> None:
    """Make the model's layers call `paged_attention`.

    ``model.set_attn_implementation`` looks for a kernel on the hub if a name contains "flash", so the name goes into
    the configuration directly.
    """
    theirs = implementation(text_config(model))
    _set_implementation(model, _OVER_EAGER if theirs == "eager" or not model._supports_sdpa else NAME)


def choose_transformers(model: PreTrainedModel) -> str:
    """Make the model's layers compute attention as transformers does; return the name of that attention."""
    name = implementation(text_config(model))
    _set_implementation(model, name)
    return name


def _set_implementation(model: PreTrainedModel, name: str) -> None:
    for config in (model.config, text_config(model)):
        config._attn_implementation = {"": name}  # the configurations of images and sound keep theirs
