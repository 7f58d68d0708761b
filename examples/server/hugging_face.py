"""A model of transformers, as an engine and as a text."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedkv.integrations.transformers import Engine
from pagedkv.integrations.transformers.text import TextDecoder


class HuggingFaceText:
    """Prompts to tokens and back, by a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_tokens = len(tokenizer)

    def encode(self, prompt: str) -> list[int]:
        return self._tokenizer(prompt).input_ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """By the model's own template; a base model has none, and gets what was said."""
        if self._tokenizer.chat_template is None:
            return self.encode("".join(f"{message['content']}\n" for message in messages))
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def decoder(self) -> TextDecoder:
        return TextDecoder(self._tokenizer)


def hugging_face(
    name: str, context: int | None, num_blocks: int, block_size: int, prefix_cache: bool, **options: Any
) -> tuple[Engine, HuggingFaceText]:
    """The engine and the text of a model, by name or folder; on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval().to(device)
    pool = {"num_blocks": num_blocks, "block_size": block_size, "prefix_cache": prefix_cache}
    if context is not None:
        pool["max_seq_len"] = context // block_size * block_size
    return Engine(model, **pool, **options), HuggingFaceText(AutoTokenizer.from_pretrained(name))
