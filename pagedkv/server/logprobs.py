"""Log-probabilities in answers: which tokens a text has, and OpenAI's and vLLM's JSON for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

MOST_LOGPROBS = 20
LEAST = -9999.0  # vLLM's for minus infinity, which JSON does not have
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """Decodes tokens as they come."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class Scored(NamedTuple):
    """A token of a text.

    Attributes
    ----------
    text : str
    offset : int
        How many characters are in front of it.
    logprob : float or None
        None for the first token of a prompt.
    top : list of (str, float)
        The most probable tokens in its place, and their log-probabilities.
    """

    text: str
    offset: int
    logprob: float | None
    top: list[tuple[str, float]]


class Scores:
    """Makes what an answer has for `logprobs` and `prompt_logprobs`.

    Parameters
    ----------
    token_text : callable
        Returns the text of a token.
    decoder : Decoder
        A new one, by which offsets are counted.
    echoed : sequence of int
        The prompt, if the text begins with it.
    num_top, num_prompt_top : int or None
        How many of the most probable tokens `logprobs` and `prompt_logprobs` ask for; None for nothing.
    echo : str
        The prompt as it was sent, if the text begins with that: it may have special tokens, which `decoder` leaves out.
    """

    def __init__(
        self,
        token_text: Callable[[int], str],
        decoder: Decoder,
        echoed: Sequence[int],
        num_top: int | None,
        num_prompt_top: int | None,
        echo: str = "",
    ) -> None:
        self._echo = echo
        self._token_text, self._decoder, self._echoed = token_text, decoder, echoed
        self._num_top, self._num_prompt_top = num_top, num_prompt_top
        self._offset = 0

    def prompt(self, logprobs: Sequence[Any]) -> list[Scored]:
        """Describe the tokens of an echoed prompt, from the engine's log-probabilities of all but the first."""
        if not self._echoed or self._num_top is None:
            return []
        return [self._scored(self._echoed[0], None, []), *(self.token(*one) for one in logprobs)]

    def token(self, token: int, logprob: float, top_logprobs: Sequence[tuple[int, float]]) -> Scored:
        """Describe the next token."""
        return self._scored(token, _finite(logprob), self._top(top_logprobs[: self._num_top]))

    def of_prompt(self, logprobs: Sequence[Any]) -> list[Any] | None:
        """vLLM's JSON for `prompt_logprobs`; a rank is null for a token that is not among the most probable ones."""
        if self._num_prompt_top is None:
            return None
        made: list[Any] = [None]
        for token, logprob, top in logprobs:
            ranked: dict[int, tuple[float, int | None]] = {token: (logprob, None)}
            ranked |= {one: (value, rank) for rank, (one, value) in enumerate(top[: self._num_prompt_top], 1)}
            made.append({str(one): self._ranked(one, *values) for one, values in ranked.items()})
        return made

    def _ranked(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._token_text(token)}

    def _scored(self, token: int, logprob: float | None, top: list[tuple[str, float]]) -> Scored:
        made = Scored(self._token_text(token), self._offset, logprob, top)
        pushed = self._decoder.push(token)
        if not pushed and INCOMPLETE not in made.text and self._echo.startswith(made.text, self._offset):
            pushed = made.text  # a special token that was sent as text
        self._offset += len(pushed)
        return made

    def _top(self, logprobs: Sequence[tuple[int, float]]) -> list[tuple[str, float]]:
        return [(self._token_text(token), _finite(logprob)) for token, logprob in logprobs]


def token_text(decode: Callable[[list[int]], str], token: int) -> str:
    """The text of a token in the middle of a text: at the beginning some tokenizers leave out its space."""
    return decode([token, token])[len(decode([token])) :]


def of_completion(scored: Sequence[Scored]) -> dict[str, Any]:
    """OpenAI's `logprobs` of a completion, where the token itself is among the most probable ones in any case."""
    tops: list[dict[str, float] | None] = []
    for one in scored:
        top: dict[str, float] = {}
        for text, logprob in [*one.top, (one.text, one.logprob)]:
            if logprob is not None:
                top.setdefault(text, logprob)  # several tokens may have the same text: the most probable one counts
        tops.append(top or None)
    return {
        "tokens": [one.text for one in scored],
        "token_logprobs": [one.logprob for one in scored],
        "top_logprobs": tops,
        "text_offset": [one.offset for one in scored],
    }


def of_chat(scored: Sequence[Scored]) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat."""
    content = [
        {**_token(one.text, one.logprob), "top_logprobs": [_token(*other) for other in one.top]} for one in scored
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    """A token in a chat; one that is only a part of a character has no bytes of its own here."""
    return {"token": text, "logprob": logprob, "bytes": None if INCOMPLETE in text else list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
