"""The attention function that models of transformers call, and the record of a forward pass that it reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
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
from .running import LayerTurns, running

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
        A cache of torch tensors on the model's device, with as many layers as attend in the model.
    slots : (num_tokens,) or (num_groups, num_tokens) int64 tensor
        Where the new K and V go, from `PagedKVCache.append` or `PagedKVCache.slots`; negative for padding.
    batch : Batch
        From `PagedKVCache.batch`, with the number of new tokens of each sequence as query_lens.
    rows : (num_rows,) int64 tensor or None
        Which of the tokens are in `batch`, if not all; the others are padding and get zeros.
    layers : list of int or None
        The layers of the model that attend, in the order of those of `cache`, if not all.

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
    layers: Sequence[int] | None = None

    @cached_property
    def _slots(self) -> Any:
        return host_view(self.slots)  # once for all layers

    @cached_property
    def _places(self) -> Mapping[int, int]:
        """The layer of the cache for each layer of the model that attends."""
        layers = range(len(self.cache.k_caches)) if self.layers is None else self.layers
        return {layer: place for place, layer in enumerate(layers)}

    @cached_property
    def _writing(self) -> set[int]:
        """The layers with K and V of their own; others read those of an earlier layer."""
        return {layer for group in self.cache.groups for layer in group.layers}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `ForwardPass`."""
        require_layer(layer, self._places)
        place = self._places[layer]
        if place in self._writing:
            try:
                self.cache.write(place, k, v, self._slots)
            except TypeError as error:
                if torch.is_autocast_enabled(v.device.type):
                    error.add_note(f"torch.autocast is on: make the cache with dtype={v.dtype}, or where it is on")
                raise
        if self.rows is None:
            return self.cache.attend(place, q, self.batch, **options)
        out = torch.zeros_like(q)
        out[self.rows] = self.cache.attend(place, q[self.rows], self.batch, **options)
        return out


class WatchedPass:
    """A `CachedPass` that keeps the result of the last layer that has attended, which any NaN or Inf reaches."""

    def __init__(
        self, cache: PagedKVCache, slots: torch.Tensor, batch: Batch, layers: Sequence[int] | None = None
    ) -> None:
        self._pass = CachedPass(cache, slots, batch, layers=layers)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `ForwardPass`."""
        self._last = self._pass.attend(layer, q, k, v, **options)
        return self._last

    def are_finite(self) -> torch.Tensor:
        """Whether each row is finite after the last layer, (num_tokens,) bool."""
        return self._last.isfinite().flatten(1).all(1)


def require_layer(layer: Any, layers: Collection[int]) -> None:
    """Raise ValueError unless a pass has room for the K and V of a layer."""
    if layer not in layers:
        raise ValueError(
            f"a module of this model attends as layer {layer}, and the cache has layers 0 to {len(layers) - 1}: "
            "pagedkv cannot run this model; what it says without one is right"
        )


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
        The attention layer. The layer of the cache is the one that the model has updated before, or else its
        `layer_idx`.
    query : (batch_size, num_heads, length, head_dim) tensor
    key, value : (batch_size, num_kv_heads, length, head_dim) tensor
        Keys and values of the new tokens alone.
    attention_mask : MaskRequest or None
        What `mask` has made; the sequence of a query determines what it sees.
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
        if isinstance(attention_mask, MaskRequest) and running.turns is not None:
            running.turns.require_attended()
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
    out = attend(forward_pass, module, q, k, v, asked)
    return out.view(batch_size, length, num_heads, head_dim), None


def _require_possible(
    module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, options: dict[str, Any]
) -> None:
    """Raise ValueError if a layer asks for what paged attention cannot do."""
    is_causal = options.get("is_causal")
    wrong = (
        (not isinstance(attention_mask, MaskRequest | None) and "attention_mask")
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
    if attention_mask is not None:
        attention_mask.require_as_asked(options.get("sliding_window"), module)


def _attention_without_pagedkv(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The function that a layer calls without pagedkv: sdpa, or the eager function of the model's file."""
    if implementation(module.config) == "sdpa":
        sdpa: Callable[..., tuple[torch.Tensor, None]] = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa
    of_files = (vars(sys.modules[kind.__module__]).get("eager_attention_forward") for kind in type(module).__mro__)
    return next(filter(None, of_files))


@dataclass(frozen=True)
class MaskRequest:
    """What stands for the mask of some layers in a forward pass of pagedkv, which computes none.

    Attributes
    ----------
    is_causal : bool
        Whether each token sees those before it, or the last of them, and no others.
    window : int or None
        How many tokens a query sees, its own among them; None for all before it.
    """

    is_causal: bool
    window: int | None

    def require_as_asked(self, window: int | None, module: torch.nn.Module) -> None:
        """Raise ValueError if the mask shows other tokens than the layer asks attention for, with its window."""
        name = type(module).__name__
        if not self.is_causal:
            raise ValueError(
                f"the mask of {name} lets tokens see later ones or hides some before them, as for images or with "
                "token_type_ids, and paged attention is causal: call the model without a forward_pass or a PagedCache"
            )
        if window != self.window:
            raise ValueError(
                f"the mask of {name} has a window of {self.window} tokens, and the layer asks attention for {window}: "
                "pagedkv cannot run this model; what it says without one is right"
            )


def mask(*, config: Any, **arguments: Any) -> torch.Tensor | MaskRequest | None:
    """Make the mask of a model's layers; registered as `NAME` in transformers' AttentionMaskInterface.

    In a forward pass of pagedkv a `MaskRequest`, otherwise the mask that transformers makes.
    """
    if _is_paged():
        # transformers allows it for the masks that are causal, or have a window, and nothing else.
        return MaskRequest(bool(arguments.get("allow_is_causal_skip")), arguments.get("local_size"))
    made: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[implementation(config)](config=config, **arguments)
    return made


@torch.compiler.disable
def _is_paged() -> bool:
    return running.forward_pass is not None


def _have_gradients(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _attend(forward_pass: ForwardPass, module: torch.nn.Module, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    turns = running.turns or LayerTurns(type(module).__name__)  # none runs where a layer is called alone
    return forward_pass.attend(turns.take(module), q, k, v, **options)


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
