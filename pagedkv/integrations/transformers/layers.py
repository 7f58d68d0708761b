"""Layers that do not get a forward pass by the model's own keywords: here they find it."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import torch
from transformers import BloomPreTrainedModel, PreTrainedModel, StableLmPreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor, dropout_add
from transformers.models.stablelm.modeling_stablelm import StableLmAttention

from .attention import NAME, ForwardPass, paged_attention


class Layers:
    """The attention layers of a model, which ask here for the forward pass that they are in.

    Those of most models get it as a keyword, and nothing is done to them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # By thread, for a model may run on several. torch calls no hook after an interrupt: what else refers to a pass
        # is the forward alone, and a cache, which may be most of a device, goes with it.
        self._passes: dict[int, weakref.ref[ForwardPass]] = {}
        self._find_it = isinstance(model, BloomPreTrainedModel | StableLmPreTrainedModel)
        self._config = model.config
        if isinstance(model, BloomPreTrainedModel):
            for module in model.modules():
                if isinstance(module, BloomAttention):
                    module.forward = partial(self._bloom, module, module.forward)
        if isinstance(model, StableLmPreTrainedModel):  # its decoder layers keep other keywords to themselves
            for module in model.modules():
                if isinstance(module, StableLmAttention):
                    module.register_forward_pre_hook(self._hand_on, with_kwargs=True)

    def begin(self, forward_pass: ForwardPass | None) -> None:
        """What layers on this thread find until `end`; nothing for a pass without pagedkv."""
        self.end()
        if forward_pass is not None and self._find_it:
            thread = threading.get_ident()
            self._passes[thread] = weakref.ref(forward_pass, lambda _: self._passes.pop(thread, None))

    def end(self) -> None:
        """Forget the pass."""
        self._passes.pop(threading.get_ident(), None)

    @property
    def _forward_pass(self) -> ForwardPass | None:
        found = self._passes.get(threading.get_ident())
        return None if found is None else found()

    def _hand_on(
        self, module: Any, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        made = self._forward_pass
        return None if made is None else (args, inputs | {"forward_pass": made})

    def _bloom(
        self, module: Any, theirs: Any, hidden_states: torch.Tensor, residual: torch.Tensor, **inputs: Any
    ) -> tuple[torch.Tensor, None]:
        """A layer of Bloom, which computes attention itself."""
        made = self._forward_pass
        if made is None and self._config._attn_implementation != NAME:  # else it has no mask
            return theirs(hidden_states, residual, **inputs)
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        if inputs.get("layer_past") is not None:
            k, v = inputs["layer_past"].update(k, v, module.layer_idx)
        # What the second token of a sequence adds to its own logit.
        biases = build_alibi_tensor(torch.ones(1, 2, device=q.device), module.num_heads, torch.float32)
        slopes = biases[:, 0, 1].contiguous()
        options = {"scaling": module.inv_norm_factor, "alibi_slopes": slopes, "forward_pass": made}
        out, _ = paged_attention(module, q, k, v, inputs.get("attention_mask"), **options)
        return dropout_add(module.dense(out.flatten(2)), residual, module.hidden_dropout, module.training), None
