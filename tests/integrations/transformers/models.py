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
# What of transformers each family is, and what sets it apart.
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


def make_model(family, **options):
    """A new causal language model of a family, in eval mode, with the same weights every time."""
    torch.manual_seed(7)
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_class(**SIZES | FAMILIES.get(family, {}) | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if family == "GptOss":
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
