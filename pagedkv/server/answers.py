"""Answers: OpenAI's JSON for results."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any


def usage(num_prompt: int, num_cached: int, num_new: int) -> dict[str, Any]:
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    return {**counts, "prompt_tokens_details": {"cached_tokens": num_cached}}


class Answer:
    """The answer to one request, whole or as events.

    Parameters
    ----------
    model : str
    chat : bool
    include_usage : bool
        Whether the last event reports the usage; events before it report null.

    Attributes
    ----------
    id : str
    """

    def __init__(self, model: str, *, chat: bool, include_usage: bool = False) -> None:
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._chat, self._include_usage = chat, include_usage
        self._common = {"id": self.id, "created": int(time.time()), "model": model}

    def whole(self, text: str, reason: str, used: dict[str, Any]) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": [_choice(said, reason)], "usage": used}

    def begin(self) -> str:
        """The first event, the only one with a role in a chat."""
        return self._event({"delta": {"role": "assistant", "content": ""}} if self._chat else {"text": ""})

    def text(self, text: str) -> str:
        return self._event({"delta": {"content": text}} if self._chat else {"text": text})

    def end(self, reason: str, used: dict[str, Any]) -> Iterator[str]:
        """The last events, the first of which has the reason."""
        yield self._event({"delta": {}} if self._chat else {"text": ""}, reason)
        if self._include_usage:
            yield event({**self._chunk(), "choices": [], "usage": used})
        yield "data: [DONE]\n\n"

    def _event(self, said: dict[str, Any], reason: str | None = None) -> str:
        nothing = {"usage": None} if self._include_usage else {}
        return event({**self._chunk(), "choices": [_choice(said, reason)], **nothing})

    def _chunk(self) -> dict[str, Any]:
        return {**self._common, "object": "chat.completion.chunk" if self._chat else "text_completion"}


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _choice(said: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}
