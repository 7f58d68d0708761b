"""A model of transformers: its engine, and its conversion between text and tokens."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from ..integrations.transformers import Engine
from ..integrations.transformers.prompts import end_of_messages
from ..integrations.transformers.text import TextDecoder


class HuggingFaceText:
    """Converts prompts to tokens and back with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, *, has_states: bool) -> None:
        self._tokenizer, self._has_states = tokenizer, has_states
        self.num_tokens = len(tokenizer)

    def encode(self, prompt: str) -> list[int]:
        return self._tokenizer(prompt).input_ids

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Convert messages with the model's chat template.

        Raises
        ------
        ValueError
            The model has no template, or the template ignores a field of the messages.
        """
        template = str(self._tokenizer.chat_template or "")
        if not template:
            raise ValueError("the model has no chat template: ask /v1/completions")
        for message in messages:
            if message["role"] == "developer" and "developer" not in template:
                message["role"] = "system"  # its name before reasoning models
            for name in message.keys() - {"role", "content"}:
                # The tool of a result follows from its place among the calls.
                if name not in template and (name, message["role"]) != ("name", "tool"):
                    raise ValueError(f"the model's chat template has no place for {name}")
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def snapshot_at(self, messages: list[dict[str, Any]], tokens: list[int]) -> list[int]:
        """Where the next turn of a chat may part from this one, if the layers of the model have states."""
        return end_of_messages(messages, self._tokenizer, np.array(tokens)) if self._has_states else []

    def decoder(self) -> TextDecoder:
        return TextDecoder(self._tokenizer)


def announce(name: str) -> None:
    """Say where a model comes from that is not here yet; ValueError for what is neither a folder nor a name."""
    if Path(name).is_dir():
        return
    try:
        is_here = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:
        raise ValueError(f"MODEL must be a folder, or a name such as Qwen/Qwen3-0.6B, got {name}") from None
    if not is_here:
        print(f"there is no folder {name}: asking huggingface.co for a model of this name", file=sys.stderr)


def hugging_face(args: Namespace, pool: dict[str, Any], steps: dict[str, Any]) -> tuple[Engine, HuggingFaceText]:
    """Load a model by name or folder, on the GPU if there is one: its engine and its text conversion.

    Each rank that torchrun has started loads its part of the model.
    """
    announce(args.model)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        sharding = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto", distributed_config=sharding)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device)
    if args.context is not None:
        pool["max_seq_len"] = args.context // args.block_size * args.block_size
    engine = Engine(model, **pool, **steps)
    return engine, HuggingFaceText(AutoTokenizer.from_pretrained(args.model), has_states=bool(engine.cache.states))
