"""Tokens to text as they come."""

from __future__ import annotations

from typing import Any

# What a decoder puts where bytes are no character, or not yet.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextDecoder:
    """The text of tokens that come one by one; a character appears with the last of its bytes.

    What a token reads like may depend on those before it (a space in front of a word), so a few are decoded again with
    each, as vLLM and TGI do.

    Parameters
    ----------
    tokenizer
        Of transformers; its special tokens are left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # the last ones whose text is out
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that is complete with this token; may be empty."""
        self._waiting.append(token)
        text = self._new()
        # A token without a text cannot say whether the next word has a space in front.
        return "" if not text or text.endswith(INCOMPLETE) else self._out(text)

    def finish(self) -> str:
        """What is left when no token comes any more."""
        return self._out(self._new())

    def _new(self) -> str:
        return self._decode(self._before + self._waiting)[len(self._decode(self._before)) :]

    def _out(self, text: str) -> str:
        if self._waiting:
            self._before, self._waiting = self._waiting, []
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
