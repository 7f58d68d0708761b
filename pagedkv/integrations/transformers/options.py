"""RequestOptions: what the caller of an engine asks of one request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any, TypeAlias

import torch

from ...memory.arguments import as_int, as_ints, require_callable
from ...validation.require import number
from .grammar import schema_of
from .prompts import stop_texts
from .sampling import Sampling

LogitsProcessor: TypeAlias = Callable[[list[int], torch.Tensor], torch.Tensor]


def require_known(owner: str, options: Collection[str], known: Sequence[str]) -> None:
    """Raise TypeError for the first option that is not known, with the closest one that is."""
    if unknown := [name for name in options if name not in known]:
        meant = "".join(f"; did you mean {close}?" for close in get_close_matches(unknown[0], known, n=1))
        raise TypeError(f"{owner} has no option {unknown[0]}, only {', '.join(known)}{meant}")


def _biases(logit_bias: Any) -> dict[int, float]:
    if logit_bias is None:
        return {}
    if not isinstance(logit_bias, Mapping):
        raise TypeError(f"logit_bias must be a dict of tokens to numbers, got {type(logit_bias).__name__}")
    return {as_int("a token of logit_bias", x): number("logit_bias", bias) for x, bias in logit_bias.items()}


@dataclass(eq=False, kw_only=True)
class RequestOptions(Sampling):
    """The options of a request: the keywords of `Engine.add`, `tokens`, `stream` and `generate`.

    Parameters
    ----------
    max_tokens : int
        The most tokens to generate.
    temperature, top_k, top_p, min_p, repetition_penalty, seed
        Sampling options as in vLLM; by default the most probable token is taken. A seed makes draws repeatable.
    min_tokens : int
        Before so many tokens only max_tokens ends the text.
    stop : str, sequence of str, or None
        The text ends before the first of these texts; needs the engine's tokenizer.
    stop_token_ids : sequence of int or None
        More tokens that end the text, besides `eos_token_id`.
    ignore_eos : bool
        Whether the text goes on after `eos_token_id`.
    presence_penalty, frequency_penalty : float
        From -2 to 2, as in OpenAI's API: what the logits of tokens that the text has lose once, and for each time.
    logit_bias : dict of int to float, or None
        What the logits of some tokens gain.
    logits_processor : callable or None
        ``logits_processor(tokens, logits)`` is called for each token with a list of those of the text so far and a copy
        of the model's logits, (vocab_size,) float32, on its device, and returns the logits to use: they may be what it
        got, changed. Biases, penalties and the rest come after it. An error that it raises is raised by the step, which
        changes nothing. On ranks that of rank 0 counts.
    response_format : dict or None
        As in OpenAI's API, ``{"type": "json_object"}``, or ``{"type": "json_schema", "json_schema": {"schema": ...}}``:
        the text is JSON of that schema, without spaces between its parts, unless max_tokens ends it before. Needs the
        extra ``guidance``, and the engine's tokenizer.
    logprobs : int or None
        With each token its log-probability, and those of so many of the most probable ones: the log-softmax in float32
        of the model's logits, before anything here changes them.
    prompt_logprobs : int or None
        The same for each token of the prompt but the first. Such a request computes all of its prompt: it takes nothing
        from the prefix cache.
    priority, salt
        As in :meth:`~pagedkv.Scheduler.add`.
    snapshot_at : sequence of int or None
        Of a model whose layers have states: lengths of the prompt from which later ones may go on, as in
        :meth:`~pagedkv.Scheduler.add`. By default where messages end, before what makes the model answer.

    Raises
    ------
    TypeError, ValueError
        An option is not as described.

    Examples
    --------
    >>> from pagedkv.integrations.transformers import RequestOptions
    >>> RequestOptions.of(5, {"temperature": 0.7, "stop": "end"}).stop
    ('end',)
    >>> RequestOptions.of(5, {"temperature": -1.0})
    Traceback (most recent call last):
        ...
    ValueError: temperature must be at least 0, got -1.0
    """

    max_tokens: int
    min_tokens: int = 0
    stop: Any = ()
    stop_token_ids: Any = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = None
    logits_processor: LogitsProcessor | None = None
    response_format: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    salt: str | bytes | None = None
    snapshot_at: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_tokens = as_int("max_tokens", self.max_tokens, minimum=1)
        self.min_tokens = as_int("min_tokens", self.min_tokens, maximum=self.max_tokens)
        self.stop = stop_texts(self.stop)
        ends = () if self.stop_token_ids is None else self.stop_token_ids
        self.stop_token_ids = as_ints("stop_token_ids", ends).tolist()
        for name in ("presence_penalty", "frequency_penalty"):
            value = number(name, getattr(self, name))
            if not -2 <= value <= 2:
                raise ValueError(f"{name} must be from -2 to 2, got {value}")
            setattr(self, name, value)
        self.logit_bias = _biases(self.logit_bias)
        if self.logits_processor is not None:
            require_callable("logits_processor", self.logits_processor, "a function (tokens, logits) -> logits")
        if schema_of(self.response_format) is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError("min_tokens and ignore_eos must be left out with a response_format, which ends the text")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                setattr(self, name, as_int(name, getattr(self, name)))

    @classmethod
    def of(cls, max_tokens: int, options: Mapping[str, Any]) -> RequestOptions:
        """Make them of what a caller passed by name, or raise."""
        known = [option.name for option in fields(cls) if option.init and option.name != "max_tokens"]
        require_known("a request", options, known)
        return cls(max_tokens=max_tokens, **options)

    @property
    def told(self) -> dict[str, Any]:
        """The options that differ from their defaults, for another rank, where a logits_processor has no effect."""
        values = {option.name: getattr(self, option.name) for option in fields(self) if option.init}
        values["logits_processor"] = None
        defaults = {option.name: option.default for option in fields(self) if option.default is not MISSING}
        return {name: value for name, value in values.items() if value != defaults.get(name, MISSING)}
