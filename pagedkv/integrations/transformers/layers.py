"""Patches for models that do not pass the keyword `forward_pass` on to their attention layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import BloomPreTrainedModel, PreTrainedModel, StableLmPreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor, dropout_add
from transformers.models.stablelm.modeling_stablelm import StableLmAttention

from .attention import paged_attention
from .running import running


def let_layers_find(model: PreTrainedModel) -> None:
    """Patch attention layers to which the model does not pass the keyword `forward_pass`, so that they find it.

    Most models pass it on, and need no patch.
    """
    if isinstance(model, BloomPreTrainedModel):
        for module in model.modules():
            if isinstance(module, BloomAttention):
                module.forward = partial(_bloom, module, module.forward)
    if isinstance(model, StableLmPreTrainedModel):  # its decoder layers keep other keywords to themselves
        for module in model.modules():
            if isinstance(module, StableLmAttention):
                module.register_forward_pre_hook(_hand_on, with_kwargs=True)


def _hand_on(
    module: Any, args: tuple[Any, ...], inputs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    made = running.forward_pass
    return None if made is None else (args, inputs | {"forward_pass": made})


def _bloom(
    module: Any, theirs: Any, hidden_states: torch.Tensor, residual: torch.Tensor, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run an attention layer of Bloom, which would compute attention itself."""
    made = running.forward_pass
    if made is None:
        out: tuple[torch.Tensor, torch.Tensor | None] = theirs(hidden_states, residual, **inputs)
        return out
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    if inputs.get("layer_past") is not None:
        k, v = inputs["layer_past"].update(k, v, module.layer_idx)
    # The slopes are the biases of the second token of a sequence.
    biases = build_alibi_tensor(torch.ones(1, 2, device=q.device), module.num_heads, torch.float32)
    slopes = biases[:, 0, 1].contiguous()
    options = {"scaling": module.inv_norm_factor, "alibi_slopes": slopes, "forward_pass": made}
    attended, _ = paged_attention(module, q, k, v, inputs.get("attention_mask"), **options)
    return dropout_add(module.dense(attended.flatten(2)), residual, module.hidden_dropout, module.training), None
