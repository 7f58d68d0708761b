"""Bloom, whose layers compute attention themselves, and hand nothing on that comes with a forward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import BloomPreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor, dropout_add

from .attention import ForwardPass, paged_attention


class BloomLayers:
    """The attention layers of a Bloom, which ask here for the forward pass that they are in.

    Attributes
    ----------
    forward_pass : ForwardPass or None
        None for a pass without pagedkv: layers compute what they always have.
    """

    def __init__(self, model: BloomPreTrainedModel) -> None:
        self.forward_pass: ForwardPass | None = None
        for module in model.modules():
            if isinstance(module, BloomAttention):
                module.forward = partial(self._forward, module, module.forward)

    def _forward(
        self, module: Any, theirs: Any, hidden_states: torch.Tensor, residual: torch.Tensor, **inputs: Any
    ) -> tuple[torch.Tensor, None]:
        if self.forward_pass is None:
            return theirs(hidden_states, residual, **inputs)
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        if inputs.get("layer_past") is not None:
            k, v = inputs["layer_past"].update(k, v, module.layer_idx)
        # What the second token of a sequence adds to its own logit.
        biases = build_alibi_tensor(torch.ones(1, 2, device=q.device), module.num_heads, torch.float32)
        slopes = biases[:, 0, 1].contiguous()
        options = {"scaling": module.inv_norm_factor, "alibi_slopes": slopes, "forward_pass": self.forward_pass}
        out, _ = paged_attention(module, q, k, v, inputs.get("attention_mask"), **options)
        return dropout_add(module.dense(out.flatten(2)), residual, module.hidden_dropout, module.training), None
