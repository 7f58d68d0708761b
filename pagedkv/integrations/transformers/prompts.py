"""Conversion of the prompts and stop texts that callers of Engine pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
import torch

Prompt: TypeAlias = (
    str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | torch.Tensor | np.ndarray[Any, Any]
)


def require_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError unless `tokenizer` is a tokenizer or None."""
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise TypeError(
            "tokenizer must be one of transformers, such as AutoTokenizer.from_pretrained(...) returns, "
            f"got {type(tokenizer).__name__}"
        )


def tokenizer_of(tokenizer: Any) -> Any:
    """Return the tokenizer, or raise ValueError if there is none."""
    if tokenizer is None:
        raise ValueError("text needs a tokenizer: Engine(model, tokenizer, ...), or give and take token ids")
    return tokenizer


def prompt_ids(prompt: Prompt, tokenizer: Any) -> Any:
    """Convert a prompt of any kind to token ids."""
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
        if tokenizer_of(tokenizer).chat_template is None:
            raise ValueError(
                "messages need a chat template, and the tokenizer has none: set tokenizer.chat_template, or write "
                "the messages into one text in the form that the model was trained with"
            )
        return tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False)
    if isinstance(prompt, str):
        prompt = tokenizer_of(tokenizer)(prompt)
    if isinstance(prompt, Mapping):  # a BatchEncoding
        if not np.all(_one_row(prompt.get("attention_mask", 1))):
            raise ValueError("the prompt has padding, by its attention_mask: tokenize each prompt alone")
        if "input_ids" not in prompt:
            raise ValueError(f"a prompt in a dict needs its input_ids, got {[*prompt]}: put messages in a list")
        prompt = prompt["input_ids"]
    return _one_row(prompt)


def _one_row(values: Any) -> Any:
    """Convert tensors to arrays, and unwrap a batch of one text."""
    if isinstance(values, torch.Tensor):
        values = values.numpy(force=True)
    is_batch = isinstance(values, np.ndarray) and values.ndim == 2
    if is_batch or (isinstance(values, list) and values and isinstance(values[0], list)):
        if len(values) != 1:
            raise ValueError(f"a prompt must be one text, got a batch of {len(values)}: add each")
        return values[0]
    return values


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Convert the option `stop` to a tuple of texts, or raise."""
    if not isinstance(stop, (str, Iterable, NoneType)):
        raise TypeError(f"stop must be a str, or a sequence of them, got {type(stop).__name__}")
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"stop must be a str, or a sequence of them, got {type(text).__name__} in it")
        if not text:
            raise ValueError("stop must not hold an empty text, which is everywhere")
    return texts
