"""Answers: OpenAI's JSON for results."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any


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

    def whole(self, texts: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """All of it, from the text of each choice and the reason for its end."""
        kind, choices = "chat.completion" if self._chat else "text_completion", []
        for index, (text, reason) in enumerate(texts):
            said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(_choice(index, said, reason))
        return {**self._common, "object": kind, "choices": choices, "usage": self._usage()}

    def begin(self, index: int) -> str:
        """The first event of a choice, the only one with a role in a chat."""
        return self._event(index, {"delta": {"role": "assistant", "content": ""}} if self._chat else {"text": ""})

    def text(self, index: int, text: str) -> str:
        return self._event(index, {"delta": {"content": text}} if self._chat else {"text": text})

    def end(self, index: int, reason: str) -> str:
        """The last event of a choice."""
        return self._event(index, {"delta": {}} if self._chat else {"text": ""}, reason)

    def close(self) -> Iterator[str]:
        """The events behind those of all choices."""
        if self._include_usage:
            yield event({**self._chunk(), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _event(self, index: int, said: dict[str, Any], reason: str | None = None) -> str:
        used = {"usage": self._usage() if self._continuous_usage else None} if self._include_usage else {}
        return event({**self._chunk(), "choices": [_choice(index, said, reason)], **used})

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_cached, num_new = self._counts()
        used = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
        return {**used, "prompt_tokens_details": {"cached_tokens": num_cached}}

    def _chunk(self) -> dict[str, Any]:
        return {**self._common, "object": "chat.completion.chunk" if self._chat else "text_completion"}


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _choice(index: int, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, **said, "logprobs": None, "finish_reason": reason}
