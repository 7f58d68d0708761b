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

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """By the model's own template.

        Raises
        ------
        ValueError
            It has none, or does not know what is in the messages.
        """
        template = str(self._tokenizer.chat_template or "")
        if not template:
            raise ValueError("the model has no chat template: ask /v1/completions")
        for message in messages:
            if message["role"] == "developer" and "developer" not in template:
                message["role"] = "system"  # its name before reasoning models
            for name in message.keys() - {"role", "content"}:
                # Which tool a result is of, its place among the calls says.
                if name not in template and (name, message["role"]) != ("name", "tool"):
                    raise ValueError(f"the model's chat template has no place for {name}")
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def decoder(self) -> TextDecoder:
        return TextDecoder(self._tokenizer)


def hugging_face(
    name: str, context: int | None, pool: dict[str, Any], **options: Any
) -> tuple[Engine, HuggingFaceText]:
    """The engine and the text of a model, by name or folder; on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval().to(device)
    if context is not None:
        options["max_seq_len"] = context // pool["block_size"] * pool["block_size"]
    return Engine(model, **pool, **options), HuggingFaceText(AutoTokenizer.from_pretrained(name))
