"""OpenAI's JSON: what comes in is checked field by field, what goes out has its shape."""

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

# Where another value, but null, would ask for something that is not there.
REFUSED = {
    **{"n": 1, "best_of": 1, "echo": False, "logprobs": None, "suffix": None, "logit_bias": {}},
    **{"presence_penalty": 0, "frequency_penalty": 0, "tools": [], "response_format": {"type": "text"}},
}


class Refused(Exception):
    """A request that is answered with an error; `status` is that of HTTP."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


@dataclass
class Wanted:
    """A valid request.

    Attributes
    ----------
    prompt : str, list of int, or list of dict
        A text, its tokens, or the messages of a chat.
    max_tokens : int or None
        None for as many as fit.
    sampling : dict
        Temperature, top_p, top_k and seed.
    stop : list of str
        The text ends before the first of them.
    """

    prompt: Any
    max_tokens: int | None
    sampling: dict[str, Any]
    stop: list[str]
    stream: bool
    include_usage: bool


def parse(body: bytes, *, chat: bool, num_tokens: int) -> Wanted:
    """Read a request to /v1/completions or /v1/chat/completions.

    Parameters
    ----------
    num_tokens : int
        Tokens of the vocabulary.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body must be JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refused(400, f"the body must be a JSON object, got {type(fields).__name__}")
    for name, only in (REFUSED | ({"logprobs": False} if chat else {})).items():
        if fields.get(name, only) not in (only, None):
            raise Refused(400, f"{name} must be {json.dumps(only)} here", name)
    prompt = _messages(fields) if chat else _prompt(fields, num_tokens)
    default = None if chat else 16
    max_tokens = _number(fields, "max_completion_tokens", None, 1, 2**31 - 1, int)
    stop = fields.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stop, list) and len(stop) <= 4 and all(isinstance(text, str) and text for text in stop)):
        raise Refused(400, "stop must be a text, or up to 4 of them", "stop")
    stream = _flag(fields, "stream")
    options = fields.get("stream_options")
    if not isinstance(options, dict | None):
        raise Refused(400, "stream_options must be an object", "stream_options")
    return Wanted(
        prompt,
        max_tokens or _number(fields, "max_tokens", default, 1, 2**31 - 1, int),
        {
            "temperature": _number(fields, "temperature", 1.0, 0, 2, float),
            "top_p": _number(fields, "top_p", 1.0, 0, 1, float),
            "top_k": _number(fields, "top_k", 0, 0, 2**31 - 1, int),
            "seed": _number(fields, "seed", None, 0, 2**63 - 1, int),
        },
        stop,
        stream,
        _flag(options or {}, "include_usage"),
    )


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise Refused(400, f"{name} must be true or false, got {json.dumps(value)[:80]}", name)
    return bool(value)


def _number(fields: dict[str, Any], name: str, default: Any, low: float, high: float, kind: type) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    wanted = int if kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, wanted) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise Refused(400, f"{name} must be {what} from {low} to {high}, got {json.dumps(value)[:80]}", name)
    return kind(value)


def _prompt(fields: dict[str, Any], num_tokens: int) -> str | list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if not all(0 <= token < num_tokens for token in prompt):
            raise Refused(400, f"prompt must have tokens from 0 to {num_tokens - 1}", "prompt")
        return prompt
    raise Refused(400, "prompt must be one text of at least one character, or its tokens", "prompt")


def _messages(fields: dict[str, Any]) -> list[dict[str, str]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages must be a list of at least one", "messages")
    said = [
        {"role": message.get("role"), "content": _content(message.get("content"))}
        for message in messages
        if isinstance(message, dict)
    ]
    if len(said) < len(messages) or not all(isinstance(text, str) for one in said for text in one.values()):
        raise Refused(400, "each of messages must have a role and a content, both texts", "messages")
    return said


def _content(content: Any) -> Any:
    """A text; one that came in parts has each on a line of its own, as vLLM has them."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return "\n".join(texts) if len(texts) == len(content) and all(isinstance(x, str) for x in texts) else None


class Shape:
    """The answers to one request, as the API shapes them."""

    def __init__(self, model: str, *, chat: bool, stream: bool) -> None:
        self._chat, self._stream = chat, stream
        kind = ("chat.completion" + ".chunk" * stream) if chat else "text_completion"
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    def __call__(self, text: str, reason: str | None, usage: dict[str, int] | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if not self._chat:
            choice["text"] = text
        else:
            choice["delta" if self._stream else "message"] = {"role": "assistant", "content": text}
        return {**self._head, "choices": [choice], **({"usage": usage} if usage else {})}

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """The chunk behind the last one, if it was asked for."""
        return {**self._head, "choices": [], "usage": usage}


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


class Stops:
    """Text on its way out, held back as long as it may be the beginning of a text that ends it."""

    def __init__(self, stops: list[str]) -> None:
        self._stops, self._held, self.found = stops, "", False

    def push(self, text: str, *, final: bool = False) -> str:
        """What can go out now; after the end, nothing."""
        if self.found:
            return ""
        self._held += text
        ends = [at for at in map(self._held.find, self._stops) if at >= 0]
        if ends:
            out, self._held, self.found = self._held[: min(ends)], "", True
            return out
        longest = 0 if final else max((self._partial(stop) for stop in self._stops), default=0)
        cut = len(self._held) - longest
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _partial(self, stop: str) -> int:
        """Characters at the end that `stop` begins with."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)
