"""Grammars: which tokens a text may go on with, by a JSON schema; llguidance computes them (extra ``guidance``)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ...extras import pip_install


class GrammarError(Exception):
    """llguidance cannot go on with a text, because its grammar is too complex for example."""


def schema_of(response_format: Any) -> dict[str, Any] | None:
    """The JSON schema that a response_format of OpenAI's API asks for, None for text without one; or raise."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = response_format.get("json_schema") if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError(
            'response_format must be {"type": "json_object"}, {"type": "text"} or '
            f'{{"type": "json_schema", "json_schema": {{"schema": {{...}}}}}}, got {response_format!r}'
        )
    return dict(schema)


class Grammars:
    """Makes the grammars of an engine's requests.

    Parameters
    ----------
    tokenizer
        A fast tokenizer of transformers.
    vocab_size : int
        That of the model.
    ends : set of int
        The tokens that may end a text.

    Raises
    ------
    ModuleNotFoundError
        llguidance is not installed.
    ValueError
        It cannot read the tokenizer, or no token ends a text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Collection[int]) -> None:
        self._library = _import_llguidance()
        from llguidance.hf import from_tokenizer

        if not ends:
            raise ValueError(
                "response_format needs a token that ends the text: name it as eos_token_id, in the model's "
                "generation_config.json or to its Engine"
            )
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError(
                f"response_format needs a fast tokenizer of transformers, got {type(tokenizer).__name__}: "
                "AutoTokenizer.from_pretrained(...) returns one where the model has it"
            )
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(ends))

    def make(self, schema: dict[str, Any]) -> Grammar:
        """Make the grammar of a schema, or raise ValueError."""
        matcher = self._library.LLMatcher
        compact = {"whitespace_flexible": False}  # else a model may write spaces for ever
        try:
            text = matcher.grammar_from_json_schema(json.dumps(schema), overrides=compact)
            made = matcher(self._tokenizer, text, log_level=0)
            error = made.get_error() if made.is_error() else None
        except (ValueError, RecursionError) as too_deep:
            error = too_deep
        if error is not None:
            raise ValueError(f"response_format has a schema that llguidance does not take: {error}")
        return Grammar(made, self._tokenizer.vocab_size)


class Grammar:
    """The tokens that a text may go on with.

    Parameters
    ----------
    matcher : LLMatcher
    vocab_size : int
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._read = matcher, list[int]()
        self._bits = np.zeros((vocab_size + 31) // 32, np.int32)

    def mask(self, tokens: list[int], logits: torch.Tensor) -> None:
        """Set the logits of tokens that may not come next to -inf; where the grammar ends, an end token may.

        Parameters
        ----------
        tokens : list of int
            The text so far; any text, since a step that has failed is made again.
        logits : (vocab_size,) tensor

        Raises
        ------
        GrammarError
            The grammar is too complex, or does not take the text.
        """
        matcher, read = self._matcher, self._read
        self._read = []  # an interrupt may come in the middle
        if tokens[: len(read)] != read or not read:
            matcher.reset()
            read = []
        if not (matcher.consume_tokens(tokens[len(read) :]) or matcher.is_stopped()) or matcher.is_error():
            raise GrammarError(f"response_format: llguidance cannot go on: {matcher.get_error()}")
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if matcher.is_error():
            raise GrammarError(f"response_format: llguidance cannot go on: {matcher.get_error()}")
        self._read = tokens.copy()
        is_hidden = np.ones(len(logits), bool)
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=len(logits))
        is_hidden[: len(allowed)] = allowed == 0
        logits.masked_fill_(torch.from_numpy(is_hidden).to(logits.device), -torch.inf)


def _import_llguidance() -> ModuleType:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"response_format needs llguidance, which cannot be imported ({error}): {pip_install('guidance')}",
            name=error.name,
        ) from error
    made: ModuleType = llguidance
    return made
