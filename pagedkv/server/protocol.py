"""Requests in OpenAI's JSON: every field has an effect, is harmless, or is refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

from .logprobs import MOST_LOGPROBS

# Fields that are ignored, and why that is harmless.
HARMLESS = {
    "model": "there is one",
    "user": "it identifies a provider's customers",
    "safety_identifier": "it identifies a provider's customers",
    "metadata": "it is kept with an answer that is stored, and none is",
    "prompt_cache_key": "it picks the machine whose cache is asked, and there is one",
    "parallel_tool_calls": "no tool is called",
}
# Values that have no effect; other values ask for missing features.
ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory",),
}
ONLY_TEXT: dict[str, tuple[Any, ...]] = {"suffix": ("",)}
ONLY_TOKENS: dict[str, tuple[Any, ...]] = {"return_token_strs": (False,)}
ONLY_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "store": (False,),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
MOST = 2**31 - 1


class Refused(Exception):
    """Raised to answer a request with an error.

    Attributes
    ----------
    status : int
        The HTTP status.
    param, code : str or None
        The wrong field, and OpenAI's code for the error.
    retry_after : int or None
        Seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Those that the answer needs."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def too_long(context: int, asked: str) -> Refused:
    """Refuse what the context has no room for, in OpenAI's words and with its code: clients then shorten the prompt."""
    return Refused(
        400,
        f"This model's maximum context length is {context} tokens. However, {asked}. Please reduce the length of the "
        "prompt or of the completion.",
        code="context_length_exceeded",
    )


@dataclass
class Prompt:
    """What to make tokens of.

    Attributes
    ----------
    content : str, list of int, or list of dict
        A text, its tokens, or the messages of a chat.
    options : dict
        Of a text `add_special_tokens`, of messages variables of the chat template.
    """

    content: str | list[int] | list[dict[str, Any]]
    options: dict[str, Any]


@dataclass
class Wanted:
    """A valid request, with `n` choices for each prompt.

    Attributes
    ----------
    prompts : list of Prompt
    n : int
    max_tokens : int or None
        None for as many as fit, and 0 for an echo alone.
    options : dict
        Keyword arguments of `Engine.add`.
    stop : list of str
        The text ends before the first of these.
    echo : bool
        Whether a text begins with its prompt.
    logprobs, prompt_logprobs : int or None
        How many of the most probable tokens to name beside each token of the text, or of the prompt.
    """

    prompts: list[Prompt]
    n: int
    max_tokens: int | None
    options: dict[str, Any]
    stop: list[str]
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool


class Fields:
    """The fields of a JSON object, which are taken out one by one; those left over were not expected.

    A null counts as a missing field.

    Parameters
    ----------
    fields : dict
    owner : str
        What stands before the names of fields in messages.
    """

    def __init__(self, fields: dict[str, Any], owner: str = "") -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self.owner = owner

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def take(self, name: str, kind: Any, what: str, default: Any = None) -> Any:
        """Take out a field and check its type; true and false are not numbers."""
        value = self._fields.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, what, value)
        return value

    def need(self, name: str, kind: Any, what: str) -> Any:
        """As `take`, for a required field."""
        if name not in self._fields:
            close = get_close_matches(name, self._fields, n=1)
            misspelt = f"; {self.owner}{close[0][:80]} is not supported by this server" if close else ""
            raise Refused(400, f"{self.owner}{name} is missing{misspelt}", f"{self.owner}{name}")
        return self.take(name, kind, what)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.take(name, bool, "true or false", default))

    def number(self, name: str, default: Any, low: float, high: float) -> Any:
        """Take out a number and check its range."""
        what = f"a number from {low} to {high}"
        value = self.take(name, int | float, what, default)
        if value is not None and not low <= value <= high:
            raise self.wrong(name, what, value)
        return value

    def whole(self, name: str, default: int | None, low: int, high: int) -> Any:
        """Take out a whole number and check its range."""
        what = f"a whole number from {low} to {high}"
        value = self.take(name, int, what, default)
        if value is not None and not low <= value <= high:
            raise self.wrong(name, what, value)
        return value

    def end(self, only: dict[str, tuple[Any, ...]], harmless: dict[str, str]) -> None:
        """Refuse the fields left over, except harmless ones."""
        for name, value in self._fields.items():
            if name in only:
                # In Python 1 == True, in JSON they differ.
                if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in only[name]):
                    raise self._unsupported(name, only[name], value)
            elif name not in harmless:
                raise self._unsupported(name[:80], (), value)

    def wrong(self, name: str, what: str, value: Any) -> Refused:
        name = f"{self.owner}{name}"
        return Refused(400, f"{name} must be {what}, got {_beginning(value)}", name)

    def _unsupported(self, name: str, supported: tuple[Any, ...], value: Any) -> Refused:
        """Refuse a field that has no effect with the supported values, and none at all if these are empty."""
        name = f"{self.owner}{name}"
        if any(supported):
            values = " or ".join(map(json.dumps, supported))
            return Refused(400, f"{name} must be {values} on this server, got {_beginning(value)}: leave it out", name)
        are, them = ("are", "them") if supported == ([],) else ("is", "it")
        return Refused(400, f"{name} {are} not supported by this server: leave {them} out", name)


def _beginning(value: Any) -> str:
    """The first 80 characters of a value in JSON, however long and deep it is."""
    return "".join(islice(json.JSONEncoder().iterencode(value), 80))[:80]


def parse(body: bytes, *, chat: bool, num_tokens: int) -> Wanted:
    """Read a request to /v1/completions or /v1/chat/completions.

    Parameters
    ----------
    num_tokens : int
        The size of the vocabulary.

    Raises
    ------
    Refused
        A field is not as the API describes it, or asks for a missing feature.
    """
    fields = _fields(body)
    prompts = [_chat(fields)] if chat else _prompts(fields, num_tokens)
    echo = not chat and fields.flag("echo")
    # Some ask for the log-probabilities of a prompt alone.
    limits = [fields.whole(name, None, 0 if echo else 1, MOST) for name in ("max_tokens", "max_completion_tokens")]
    stream = fields.flag("stream")
    wanted = Wanted(
        prompts,
        fields.whole("n", 1, 1, MOST),
        min((limit for limit in limits if limit is not None), default=None if chat else 16),
        {
            "temperature": float(fields.number("temperature", 1.0, 0, 2)),
            "top_p": float(fields.number("top_p", 1.0, 0, 1)),
            "top_k": max(0, fields.whole("top_k", 0, -1, MOST)),  # -1 is vLLM's name for all
            "min_p": float(fields.number("min_p", 0.0, 0, 1)),
            "repetition_penalty": float(fields.number("repetition_penalty", 1.0, 0.01, 100)),
            "seed": _seed(fields),
            "min_tokens": fields.whole("min_tokens", 0, 0, MOST),
            "stop_token_ids": _ids(fields, num_tokens),
            "ignore_eos": fields.flag("ignore_eos"),
            "priority": fields.whole("priority", 0, -MOST, MOST),
            "salt": _salt(fields),
            **_adjustments(fields, num_tokens),
        },
        _stop(fields),
        echo,
        _chat_logprobs(fields) if chat else fields.whole("logprobs", None, 0, MOST_LOGPROBS),
        None if chat else _prompt_logprobs(fields, stream),
        stream,
        *_usage_options(fields, stream),
    )
    fields.end(ONLY | (ONLY_CHAT if chat else ONLY_TEXT), HARMLESS)
    return wanted


def parse_tokenize(body: bytes) -> Prompt:
    """Read a request to /tokenize: what to make tokens of. It raises what `parse` raises."""
    fields = _fields(body)
    is_chat = "messages" in fields
    prompt = _chat(fields) if is_chat else Prompt(fields.need("prompt", str, "a text"), _special_tokens(fields))
    fields.end(ONLY_TOKENS | (ONLY_CHAT if is_chat else {}), HARMLESS)
    return prompt


def parse_detokenize(body: bytes, num_tokens: int) -> list[int]:
    """Read a request to /detokenize: the tokens. It raises what `parse` raises."""
    fields = _fields(body)
    tokens = fields.need("tokens", list, "a list of tokens")
    if not all(type(token) is int and 0 <= token < num_tokens for token in tokens):
        raise Refused(400, f"tokens must be whole numbers from 0 to {num_tokens - 1}", "tokens")
    fields.end({}, HARMLESS)
    return tokens


def _fields(body: bytes) -> Fields:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body must be JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refused(400, f"the body must be a JSON object, got {type(content).__name__}")
    return Fields(content)


def _adjustments(fields: Fields, num_tokens: int) -> dict[str, Any]:
    """Those options of `Engine.add` that an engine may lack, if they have an effect."""
    options = {
        "presence_penalty": float(fields.number("presence_penalty", 0, -2, 2)),
        "frequency_penalty": float(fields.number("frequency_penalty", 0, -2, 2)),
        "logit_bias": _logit_bias(fields, num_tokens),
        "response_format": _response_format(fields),
    }
    return {name: value for name, value in options.items() if value}


def _logit_bias(fields: Fields, num_tokens: int) -> dict[int, float]:
    what = f"an object of tokens from 0 to {num_tokens - 1}, in quotes, and numbers from -100 to 100"
    given = fields.take("logit_bias", dict, what, {})
    biases = {int(name): value for name, value in given.items() if re.fullmatch(r"[0-9]{1,18}", name)}
    is_right = len(biases) == len(given) and all(0 <= token < num_tokens for token in biases)
    if not is_right or not all(type(one) in (int, float) and -100 <= one <= 100 for one in biases.values()):
        raise fields.wrong("logit_bias", what, given)
    return biases


def _response_format(fields: Fields) -> dict[str, Any] | None:
    """Read which JSON a text has to be; None for any text."""
    what = "an object with a type"
    given = fields.take("response_format", dict, what)
    if given is None:
        return None
    owner = "response_format."
    inner, made = Fields(given, owner), None
    kind = inner.need("type", str, "a text")
    if kind == "json_object":
        made = {"type": kind}
    elif kind == "json_schema":
        schema = Fields(inner.need("json_schema", dict, "an object with a schema"), f"{owner}json_schema.")
        made = {"type": kind, "json_schema": {"schema": schema.need("schema", dict, "a JSON schema")}}
        schema.end({}, {"name": "it is for logs", "description": "it is for logs", "strict": "every text is strict"})
    elif kind != "text":
        raise inner.wrong("type", '"text", "json_object" or "json_schema"', kind)
    inner.end({}, {})
    return made


def _chat_logprobs(fields: Fields) -> int | None:
    is_wanted, num_top = fields.flag("logprobs"), fields.whole("top_logprobs", None, 0, MOST_LOGPROBS)
    if num_top and not is_wanted:
        raise Refused(400, "top_logprobs is for requests with logprobs: true beside it: leave it out", "top_logprobs")
    return (num_top or 0) if is_wanted else None


def _prompt_logprobs(fields: Fields, stream: bool) -> int | None:
    num_top: int | None = fields.whole("prompt_logprobs", None, 0, MOST_LOGPROBS)
    if stream and num_top is not None:
        raise Refused(400, "prompt_logprobs is for requests without stream: leave one out", "prompt_logprobs")
    return num_top


def _seed(fields: Fields) -> int | None:
    seed = fields.whole("seed", None, -1, 2**63 - 1)
    return None if seed == -1 else seed  # vLLM's word for none


def _usage_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Whether the last event of a stream reports the usage, and whether each of them does."""
    given = fields.take("stream_options", dict, "an object")
    if given is None:
        return False, False
    if not stream:
        raise Refused(400, "stream_options is for requests with stream: true: leave it out", "stream_options")
    options = Fields(given, "stream_options.")
    include_usage, continuous_usage = options.flag("include_usage"), options.flag("continuous_usage_stats")
    if continuous_usage and not include_usage:
        name = "stream_options.continuous_usage_stats"
        raise Refused(400, f"{name} is for requests with include_usage: true beside it: leave it out", name)
    options.end({"include_obfuscation": (False,)}, {})
    return include_usage, continuous_usage


def _stop(fields: Fields) -> list[str]:
    stop = fields.take("stop", str | list, "a text, or up to 4 of them", [])
    stops = ([stop] if stop else []) if isinstance(stop, str) else stop
    if len(stops) > 4 or not all(isinstance(text, str) and text for text in stops):
        raise fields.wrong("stop", "a text, or up to 4 of them", stop)
    return stops


def _ids(fields: Fields, num_tokens: int) -> list[int]:
    # These tokens are masked before min_tokens, so others must be left.
    most, what = num_tokens // 2, f"a list of up to {num_tokens // 2} tokens from 0 to {num_tokens - 1}"
    ids = fields.take("stop_token_ids", list, what, [])
    if len(ids) > most or not all(type(token) is int and 0 <= token < num_tokens for token in ids):
        raise fields.wrong("stop_token_ids", what, ids)
    return ids


def _salt(fields: Fields) -> str | None:
    salt: str | None = fields.take("cache_salt", str, "a text of at least one character")
    if salt == "":
        raise fields.wrong("cache_salt", "a text of at least one character", salt)
    return salt


def _prompts(fields: Fields, num_tokens: int) -> list[Prompt]:
    """Read one prompt or a list of them, each a text or its tokens."""
    what = "a text of at least one character, its tokens, or a list of such prompts"
    prompt = fields.need("prompt", str | list, what)
    options = _special_tokens(fields)
    is_list = isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt)
    prompts = prompt if is_list else [prompt]
    for one in prompts:
        is_tokens = isinstance(one, list) and all(type(token) is int for token in one)
        if not one or not (isinstance(one, str) or is_tokens):
            raise fields.wrong("prompt", what, prompt)
        if is_tokens and not all(0 <= token < num_tokens for token in one):
            raise Refused(400, f"prompt must have tokens from 0 to {num_tokens - 1}", "prompt")
    return [Prompt(one, options if isinstance(one, str) else {}) for one in prompts]


def _special_tokens(fields: Fields) -> dict[str, Any]:
    return {"add_special_tokens": fields.flag("add_special_tokens", True)}


def _chat(fields: Fields) -> Prompt:
    return Prompt(_messages(fields), fields.take("chat_template_kwargs", dict, "an object", {}))


def _messages(fields: Fields) -> list[dict[str, Any]]:
    what = "a list of at least one object with a role and a content"
    messages = fields.need("messages", list, what)
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise fields.wrong("messages", what, messages)
    return [_message(Fields(message, f"messages[{i}].")) for i, message in enumerate(messages)]


def _message(fields: Fields) -> dict[str, Any]:
    """Convert a message to what chat templates take: a role, one text, and tool calls."""
    said = {"role": fields.need("role", str, "a text"), "content": _content(fields)}
    said |= {"name": fields.take("name", str, "a text"), "tool_calls": _calls(fields)}
    if not said["role"]:
        raise fields.wrong("role", "a text", said["role"])
    if said["content"] is None:
        # A template would write None for null.
        said["content"] = ""
        if said["role"] != "assistant":
            raise fields.wrong("content", "a text, or a list of parts of a text", None)
    fields.end({"annotations": ([],)}, {"tool_call_id": "results come in the order of the calls"})
    return {name: value for name, value in said.items() if value is not None}


def _content(fields: Fields) -> str | None:
    """Read the text of a message; parts are joined by line breaks, as in vLLM."""
    what = "a text, or a list of parts of a text"
    content = fields.take("content", str | list, what)
    if not isinstance(content, list):
        return content
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise fields.wrong("content", what, content)
        rest = Fields(part, f"{fields.owner}content[{i}].")
        if (kind := rest.need("type", str, "a text")) != "text":
            raise rest.wrong("type", '"text", the one kind of part that this server reads', kind)
        texts.append(rest.need("text", str, "a text"))
        rest.end({}, {})
    if not texts:
        raise fields.wrong("content", what, content)
    return "\n".join(texts)


def _calls(fields: Fields) -> list[dict[str, Any]] | None:
    """Read tool calls of earlier messages; chat templates take their arguments as objects."""
    what = "a list of {id, type, function: {name, arguments}}, with arguments in JSON"
    calls = fields.take("tool_calls", list, what)
    try:
        return [
            {
                **call,
                "function": {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])},
            }
            for call in calls or []
        ] or None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise fields.wrong("tool_calls", what, calls) from None
