"""Small random models of real architectures, and their texts with their own attention."""

import copy
import functools

import torch
import transformers
from transformers.generation import ContinuousBatchingConfig

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # far from the same next token for all
}
WINDOW = 24
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA_4 = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 3,
    "layer_types": [*ALTERNATING[:2], "full_attention"],
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
}
# In layers without a window, which have fewer KV heads, k_proj makes K and V.
K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
# What of transformers each family is, and what sets it apart; a word behind the name tells models of one apart.
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Qwen3": {},
    "Gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
    "Gemma3": {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "Gemma3n": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "Gemma4 31B": GEMMA_4 | K_IS_V,
    "Gemma4 26B-A4B": GEMMA_4
    | K_IS_V
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "Gemma4 E4B": GEMMA_4
    | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "use_double_wide_mlp": True,
    },
    "GptOss": {
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "Phi": {"partial_rotary_factor": 0.5},
    "StableLm": {"partial_rotary_factor": 0.25},
    "HrmText": {"num_key_value_heads": None, "prefix_lm": True},
    "Bloom": {"n_head": 4, "n_layer": 2, "num_key_value_heads": None, "head_dim": None},
}

DELTA_RULE = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA_RULE |= {"linear_value_head_dim": 16, "num_hidden_layers": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Families whose layers have states. transformers 5.20 has not all of them.
HYBRIDS = {
    "Qwen3Next": DELTA_RULE | EXPERTS | {"shared_expert_intermediate_size": 32},
    "Qwen3_5": DELTA_RULE,
    "Qwen3_5Moe": DELTA_RULE | EXPERTS | {"shared_expert_intermediate_size": 32},
    "OlmoHybrid": DELTA_RULE,
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
        "num_hidden_layers": 5,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "GraniteMoeHybrid": MAMBA
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "FalconH1": MAMBA | {"mamba_d_ssm": 128},
    "Bamba": MAMBA | {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "Lfm2": {"full_attn_idxs": [1], "num_hidden_layers": 3},
    "Lfm2Moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Lfm3": {"sliding_window": WINDOW, "layer_types": ["conv", "full_attention", "sliding_attention"]}
    | {"num_hidden_layers": 3},
    "Zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "chunk_size": 16,
        "adapter_rank": 4,
        "num_key_value_heads": 4,
    },
}
HYBRIDS = {family: HYBRIDS[family] for family in HYBRIDS if hasattr(transformers, f"{family}ForCausalLM")}


def make_model(family, **options):
    """A new causal language model of a family, in eval mode, with the same weights every time."""
    torch.manual_seed(7)
    name = family.split()[0]
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    settings = SIZES | FAMILIES.get(family, {}) | HYBRIDS.get(family, {}) | options
    if family == "Zamba2":
        del settings["head_dim"]  # which it computes
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**settings)).eval()
    if family == "GptOss" or model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the one that takes float64
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2)
    return model


@functools.cache
def eager_model(family):
    """A model shared by all tests that do not change it."""
    model = make_model(family)
    model.set_attn_implementation("eager")
    return model


def prompts(*lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def greedy(model, texts, num_new, **options):
    """Generate greedily after texts, padded on the left."""
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=model.device)
    lengths = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": None}
    return model.generate(ids, attention_mask=(ids > 0).long(), **lengths, **options)[:, longest:].tolist()


def greedy_batch(model, texts, num_new, **options):
    """Generate greedily after each text with transformers' continuous batching."""
    config = transformers.GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 64} | options
    done = model.generate_batch(
        texts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**sizes),
        progress_bar=False,
    )
    assert [one.error for one in done.values()] == [None] * len(texts)
    said = {tuple(one.prompt_ids): one.generated_tokens for one in done.values()}
    return [said[tuple(text)] for text in texts]


def logits(model, text, starts=(0,), **inputs):
    """The logits of every token of a text that comes in chunks."""
    ids, stops = torch.tensor([text], device=model.device), (*starts[1:], len(text))
    with torch.inference_mode():
        parts = [model(ids[:, start:stop], **inputs).logits[0] for start, stop in zip(starts, stops, strict=True)]
    return torch.cat(parts)


def error_bound(model, text):
    """The float64 logits of a text, and how far from them paged attention may be."""
    exact = logits(copy.deepcopy(model).double(), text)
    return exact, 2 * (logits(model, text) - exact).abs().max() + 1e-5
