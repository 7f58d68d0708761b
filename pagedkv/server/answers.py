"""Answers: OpenAI's JSON for results."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .logprobs import Scored, of_chat, of_completion
from .worker import Piece


class Answer:
    """The answer to one request, whole or as events.

    Parameters
    ----------
    model : str
    counts : callable
        Returns the tokens of the prompts, those of them that the prefix cache had, and generated ones, so far.
    chat : bool
    include_usage, continuous_usage : bool
        Whether the last event reports the usage, and whether the others do; else they report null.

    Attributes
    ----------
    id : str
    """

    def __init__(
        self,
        model: str,
        counts: Callable[[], tuple[int, int, int]],
        *,
        chat: bool,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._counts, self._chat = counts, chat
        self._include_usage, self._continuous_usage = include_usage, continuous_usage
        self._common = {"id": self.id, "created": int(time.time()), "model": model}

    def whole(self, choices_in_pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """All of it, from the pieces of each choice."""
        kind, choices = "chat.completion" if self._chat else "text_completion", []
        for index, pieces in enumerate(choices_in_pieces):
            text = "".join(piece.text for piece in pieces)
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            if pieces[0].prompt_logprobs is not None:
                said["prompt_logprobs"] = pieces[0].prompt_logprobs
            scored = [one for piece in pieces for one in piece.scored]
            choices.append(self._choice(index, said, pieces[-1].reason, scored))
        return {**self._common, "object": kind, "choices": choices, "usage": self._usage()}

    def begin(self, index: int) -> str:
        """The first event of a choice, the only one with a role in a chat."""
        return self._event(index, {"delta": {"role": "assistant", "content": ""}} if self._chat else {"text": ""})

    def piece(self, index: int, piece: Piece) -> str:
        said = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
        return self._event(index, said, scored=piece.scored)

    def end(self, index: int, reason: str) -> str:
        """The last event of a choice."""
        return self._event(index, {"delta": {}} if self._chat else {"text": ""}, reason)

    def close(self) -> Iterator[str]:
        """The events behind those of all choices."""
        if self._include_usage:
            yield event({**self._chunk(), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _event(self, index: int, said: dict[str, Any], reason: str | None = None, scored: Sequence[Scored] = ()) -> str:
        used = {"usage": self._usage() if self._continuous_usage else None} if self._include_usage else {}
        return event({**self._chunk(), "choices": [self._choice(index, said, reason, scored)], **used})

    def _choice(self, index: int, said: dict[str, Any], reason: str | None, scored: Sequence[Scored]) -> dict[str, Any]:
        logprobs = (of_chat if self._chat else of_completion)(scored) if scored else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_cached, num_new = self._counts()
        used = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
        return {**used, "prompt_tokens_details": {"cached_tokens": num_cached}}

    def _chunk(self) -> dict[str, Any]:
        return {**self._common, "object": "chat.completion.chunk" if self._chat else "text_completion"}


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
