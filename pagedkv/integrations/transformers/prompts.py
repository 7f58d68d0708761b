"""Conversion of the prompts and stop texts that callers of Engine pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
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
    if _are_messages(prompt):
        if tokenizer_of(tokenizer).chat_template is None:
            raise ValueError(
                "messages need a chat template, and the tokenizer has none: set tokenizer.chat_template, or write "
                "the messages into one text in the form that the model was trained with"
            )
        return _templated(prompt, tokenizer, add_generation_prompt=True)
    if isinstance(prompt, str):
        prompt = tokenizer_of(tokenizer)(prompt)
    if isinstance(prompt, Mapping):  # a BatchEncoding
        if not np.all(_one_row(prompt.get("attention_mask", 1))):
            raise ValueError("the prompt has padding, by its attention_mask: tokenize each prompt alone")
        if "input_ids" not in prompt:
            raise ValueError(f"a prompt in a dict needs its input_ids, got {[*prompt]}: put messages in a list")
        prompt = prompt["input_ids"]
    return _one_row(prompt)


def end_of_messages(prompt: Prompt, tokenizer: Any, ids: npt.NDArray[np.int32]) -> list[int]:
    """Where the messages of a prompt end among its tokens, before what makes the model answer; none for other prompts.

    The next turn of a chat repeats it up to there, while a template may leave out of earlier answers what is behind.
    """
    if not _are_messages(prompt):
        return []
    return [common_length(_templated(prompt, tokenizer, add_generation_prompt=False), ids)]


def common_length(a: Sequence[int] | npt.NDArray[np.int32], b: Sequence[int] | npt.NDArray[np.int32]) -> int:
    """How many tokens two lists have in common at their beginning."""
    most = min(len(a), len(b))
    differs = np.asarray(a)[:most] != np.asarray(b)[:most]
    return int(differs.argmax()) if differs.any() else most


def _are_messages(prompt: Prompt) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def _templated(messages: Any, tokenizer: Any, *, add_generation_prompt: bool) -> Any:
    return tokenizer.apply_chat_template(list(messages), add_generation_prompt=add_generation_prompt, return_dict=False)


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
