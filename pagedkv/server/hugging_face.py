"""A model of transformers: its engine, and its conversion between text and tokens."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from ..integrations.transformers import Engine
from ..integrations.transformers.models import kv_shape, kv_states, kv_windows, require_supported, text_config
from ..integrations.transformers.prompts import common_length
from ..integrations.transformers.text import TextDecoder
from ..memory.device.arrays import Arrays
from ..memory.device.state_arrays import bytes_of_state, specs_of
from ..memory.sizing import kv_bytes


class HuggingFaceText:
    """Converts prompts to tokens and back with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, *, has_states: bool) -> None:
        self._tokenizer, self._has_states = tokenizer, has_states
        self.num_tokens = len(tokenizer)

    def encode(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer(prompt, add_special_tokens=add_special_tokens).input_ids
        return ids

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[int]]:
        """Convert messages with the model's chat template, and its variables.

        Where the layers of the model have states, the second list has the length from which the next turn may go on.

        Raises
        ------
        ValueError
            The model has no template, or the template ignores a field of the messages or a variable.
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
        own = signature(self._tokenizer.apply_chat_template).parameters
        for name in options:
            if name in own or name not in template:
                raise ValueError(f"the model's chat template has no place for {name} of chat_template_kwargs")
        apply = partial(self._tokenizer.apply_chat_template, messages, return_dict=False, **options)
        tokens: list[int] = apply(add_generation_prompt=True)
        if not self._has_states:
            return tokens, []
        return tokens, [common_length(apply(add_generation_prompt=False), tokens)]

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text

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


def default_memory(model: Any, args: Namespace) -> int | float:
    """A share of what is free, but no more than all requests that run at a time fill with the whole context."""
    require_supported(model)
    of_cpu = 0.5 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # which the ranks of this machine share
    share = of_cpu if model.device.type == "cpu" else 0.9
    context = args.context or getattr(text_config(model), "max_position_embeddings", None)
    free = Arrays(torch, model.device).free_bytes()
    if context is None or free is None:
        return share
    of_kv: dict[str, Any] = {
        "kv_dtype": None if args.kv_dtype == "auto" else args.kv_dtype,
        "block_size": args.block_size,
    }
    of_kv |= kv_windows(model).options
    needed = kv_bytes(context, *kv_shape(model), model.dtype, **of_kv)
    if states := kv_states(model).arrays(model.dtype):
        needed += 2 * bytes_of_state(specs_of(states))  # one that it goes on from, and one that others find
    return min(int(share * free), args.max_batch * needed)


def hugging_face(args: Namespace, pool: dict[str, Any], steps: dict[str, Any]) -> tuple[Engine, HuggingFaceText, str]:
    """Load a model by name or folder, on the GPU if there is one: its engine, its text conversion, and what it is.

    Each rank that torchrun has started loads its part of the model.
    """
    announce(args.model)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        sharding = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, distributed_config=sharding)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device)
    if args.context is not None:
        pool["max_seq_len"] = args.context // args.block_size * args.block_size
    if pool["num_blocks"] is None and pool["memory"] is None:
        pool["memory"] = default_memory(model, args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    engine = Engine(model, tokenizer, **pool, **steps)
    text = HuggingFaceText(tokenizer, has_states=bool(engine.cache.states))
    return engine, text, f"{type(model).__name__} in {str(model.dtype).removeprefix('torch.')} on {model.device}"
