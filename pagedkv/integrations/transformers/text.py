"""TextDecoder: converts tokens to text as they are generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A decoder's output for bytes that are not a character, or not yet.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_INCOMPLETE = 3  # bytes, and so tokens, of a character that is not complete: none has more than four
_MOST_TOKENS = 16  # that are decoded again with each token


class TextDecoder:
    """Decodes tokens one by one; a character appears with the last of its bytes.

    The text of a token may depend on tokens before it (a space in front of a word), so a few are decoded again with
    each, as in vLLM and TGI. Bytes that are not a character become U+FFFD, at most three tokens late.

    Parameters
    ----------
    tokenizer
        A tokenizer of transformers; its special tokens are left out.
    stop : sequence of str
        The text ends before the first of these. Text that may be the beginning of one is held back.

    Attributes
    ----------
    is_stopped : bool
        Whether the text has ended with one of `stop`.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []  # those of the last piece of text, and those that wait behind them
        self._num_waiting = 0
        self._num_out = 0  # characters of their text that are out
        self._held = ""
        self.is_stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Add a token, and return the text that it completes, possibly none.

        With ``may_stop=False`` no `stop` ends the text.
        """
        return "" if self.is_stopped else self._until_stop(self._decoded(token), may_stop)

    def finish(self, *, may_stop: bool = True) -> str:
        """Return the rest of the text after the last token; `may_stop` as in `push`."""
        if self.is_stopped:
            return ""
        text = self._until_stop(self._decode(self._tokens)[self._num_out :], may_stop) + self._held
        self._tokens, self._num_waiting, self._num_out, self._held = [], 0, 0, ""
        return text

    def _decoded(self, token: int) -> str:
        tokens = [*self._tokens, token]
        text = self._decode(tokens)
        new = text[self._num_out :]
        if not new and self._is_special(token):
            return ""
        self._tokens, self._num_waiting = tokens, self._num_waiting + 1
        # A token without text cannot show whether the next word has a space in front.
        if new and not new.endswith(INCOMPLETE):
            self._tokens, self._num_waiting = self._tokens[-self._num_waiting :], 0
            self._num_out = len(self._decode(self._tokens))
            return new
        if self._num_waiting <= _MOST_INCOMPLETE:
            return ""
        num_incomplete = min(_MOST_INCOMPLETE, len(new) - len(new.rstrip(INCOMPLETE)))
        new = new[: len(new) - num_incomplete]
        self._num_out += len(new)
        if len(self._tokens) > _MOST_TOKENS:
            num_left = len(text) - self._num_out
            self._tokens = self._tokens[-_MOST_TOKENS // 2 :]
            self._num_waiting = min(self._num_waiting, len(self._tokens))
            self._num_out = max(0, len(self._decode(self._tokens)) - num_left)
        return new

    def _until_stop(self, text: str, may_stop: bool) -> str:
        num_held, text, self._held = len(self._held), self._held + text, ""
        # A stop that is complete in what was held came when it might not end the text.
        found = (text.find(stop, max(0, num_held - len(stop) + 1)) for stop in self._stop)
        if may_stop and (ends := [at for at in found if at >= 0]):
            self.is_stopped = True
            return text[: min(ends)]
        longest = max(map(len, self._stop), default=1) - 1
        last = range(max(0, len(text) - longest), len(text))
        cut = next((at for at in last if any(stop.startswith(text[at:]) for stop in self._stop)), len(text))
        self._held = text[cut:]
        return text[:cut]

    def _is_special(self, token: int) -> bool:
        return bool(self._tokenizer.decode([token])) and not self._decode([token])

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
