"""Small random models of real architectures, and what they say with attention of their own."""

import torch
import transformers

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def make_model(family, **options):
    """A causal language model of a family, in eval mode, the same one every time."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**SIZES | {"pad_token_id": 0} | options)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def prompts(*lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
