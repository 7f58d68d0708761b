"""The layers of the caches that models of transformers get: what attends, and states that a pass changes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from .models import kv_states, kv_windows, num_layers


class HasLength(Protocol):
    """A cache that knows how many tokens of each row it has."""

    length: int  # as transformers counts them, with padding


class AttentionLayer(CacheLayerMixin):
    """The interface that transformers expects of a layer that attends; `paged_attention` does the work."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: HasLength) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the PagedKVCache exists already."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("the cache takes the K and V of all layers")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return -1


class StateLayer(LinearAttentionLayer):
    """A layer with a state: tensors that someone else keeps, and that the model changes in place."""

    is_croppable = False

    def begin(self, states: Mapping[str, torch.Tensor], *, is_continued: bool) -> None:
        """Take the state of each row of the next pass.

        Parameters
        ----------
        states : dict of str to (num_rows, ...) tensor
            By the names of `LayerStates`; none, to let go of them.
        is_continued : bool
            Whether they stand for any tokens.
        """
        conv, recurrent = states.get("conv"), states.get("recurrent")
        self.conv_states[0], self.recurrent_states[0] = conv, recurrent
        self.is_conv_states_initialized[0] = conv is not None
        self.is_recurrent_states_initialized[0] = recurrent is not None
        self.conv_kernel_size[0] = None if conv is None else conv.shape[-1]
        self.has_previous_state[0] = is_continued

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        kernel = self.conv_kernel_size[0] if conv_kernel_size is None else conv_kernel_size
        _require_as_configured("conv", self.conv_states[0], (*conv_states.shape[:-1], kernel), conv_states.dtype)
        return super().update_conv_state(conv_states, state_idx, conv_kernel_size=conv_kernel_size, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        made = tuple(recurrent_states.shape)
        _require_as_configured("recurrent", self.recurrent_states[0], made, recurrent_states.dtype)
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)


class HybridLayer(AttentionLayer, StateLayer, LinearAttentionAndFullAttentionLayer):
    """A layer that attends and has a state."""

    is_croppable = False

    def __init__(self, cache: HasLength) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self)
        self._cache = cache


def cache_layers(model: PreTrainedModel, cache: HasLength) -> list[Any]:
    """Make a layer of a cache for each layer of a model, in their order; one that does neither uses none."""
    attending, with_state = {*kv_windows(model).layers}, {*kv_states(model).layers}
    return [
        AttentionLayer(cache) if layer not in with_state else HybridLayer(cache) if layer in attending else StateLayer()
        for layer in range(num_layers(model))
    ]


def begin_states(layers: Sequence[Any], states: Mapping[str, torch.Tensor], *, is_continued: bool) -> None:
    """Give the layers that have a state those of the rows of the next pass.

    Parameters
    ----------
    layers : list
        From `cache_layers`.
    states : dict of str to (num_rows, num_layers, ...) tensor
        From `PagedKVCache.read_states`. The pass changes them in place; none, to let go of those of the last pass.
    is_continued : bool
        Whether the state of any row stands for any tokens.
    """
    with_state = [layer for layer in layers if isinstance(layer, StateLayer)]
    for place, layer in enumerate(with_state):
        layer.begin({name: of_all[:, place] for name, of_all in states.items()}, is_continued=is_continued)


def _require_as_configured(name: str, kept: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless a state that a model makes is what its configuration says."""
    if kept is None or tuple(kept.shape) != shape or torch.promote_types(kept.dtype, dtype) != kept.dtype:
        ours = "none" if kept is None else f"{tuple(kept.shape[1:])} and {kept.dtype}"
        raise ValueError(
            f"a layer of this model keeps a {name} state of shape {shape[1:]} and {dtype}, and by its configuration "
            f"{ours}: pagedkv cannot run the model"
        )
