"""The forward pass in progress on this thread, and which layer of it attends next."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from transformers.cache_utils import Cache


class LayerTurns:
    """The layers of a model that attend in a forward pass, one after the other.

    A layer is the number with which the model calls ``Cache.update`` before it attends. A module does not say as much:
    it may serve several layers, and its `layer_idx` may be that of one of them, or none.

    Parameters
    ----------
    model : str
        The name of the model's class, for messages.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._updated: Any = None  # the layer whose K and V attention gets next
        self._attended: set[Any] = set()

    def update(self, layer: int) -> None:
        """Record that attention gets the K and V of this layer next.

        Raises
        ------
        RuntimeError
            The layer before it has not attended.
        """
        if self._updated is not None:
            self.require_attended()
        self._updated = layer

    def take(self, module: torch.nn.Module) -> int:
        """The layer that attends now.

        Where the model has called no update, as layers do that read the K and V of another one, it is `layer_idx`.

        Raises
        ------
        ValueError
            The layer has attended before in this pass, and what it has cached would be lost.
        """
        layer: Any = getattr(module, "layer_idx", None) if self._updated is None else self._updated
        self._updated = None
        if layer in self._attended:
            raise ValueError(
                f"{self._model} attends twice as layer {layer} in one forward pass, and a PagedKVCache has room for "
                "the K and V of one: pagedkv cannot run this model; what it says without one is right"
            )
        self._attended.add(layer)
        return layer

    def require_attended(self) -> None:
        """Raise RuntimeError unless layers attend, and each that has updated its K and V does."""
        if self._updated is not None or not self._attended:
            raise RuntimeError(
                f"the layers of {self._model} do not hand the keyword forward_pass on, and have attended without "
                "the PagedKVCache: pagedkv cannot run this model; what it says without one is right"
            )


class PassCache(Cache):
    """The cache that layers update in a pass that has the K and V itself: hands new ones on to attention.

    Attributes
    ----------
    turns : LayerTurns
        Of the pass in progress.
    """

    turns: LayerTurns
    length = 0

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values unchanged."""
        self.turns.update(layer_idx)
        return key_states, value_states


class _Running(threading.local):
    """The forward pass in progress on this thread, and the turns of its layers."""

    # torch calls no hook after an interrupt. With a weak reference only the forward itself keeps the pass alive, and
    # with it a cache that may fill most of a device.
    _pass: weakref.ref[Any] | None = None
    turns: LayerTurns | None = None

    def begin(self, forward_pass: Any, turns: LayerTurns | None) -> None:
        """Set the pass that layers and masks on this thread find until the next `begin`; None without pagedkv."""
        self._pass = None if forward_pass is None else weakref.ref(forward_pass)
        self.turns = turns

    @property
    def forward_pass(self) -> Any:
        return None if self._pass is None else self._pass()


running = _Running()
