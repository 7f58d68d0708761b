"""EngineRequest: what an engine knows about a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...commit import Write
from .grammar import Grammar
from .logprobs import TokenLogprob
from .options import LogitsProcessor, RequestOptions
from .text import TextDecoder


@dataclass(eq=False)
class EngineRequest:
    """The prompt of a request, what is asked of it, what was generated so far, and why it ended.

    Attributes
    ----------
    prompt : (num_tokens,) int32
    options : RequestOptions
    ends : list of int
        Tokens that end the text.
    decoder : TextDecoder or None
        Converts tokens to text, if text is wanted.
    grammar : Grammar or None
        Says which tokens its response_format allows.
    tokens : list of int
        The tokens generated so far, except one that stops the text.
    pieces : list of str
        The text of these tokens.
    logprobs : list of TokenLogprob
        Those of `tokens`, if they are wanted.
    prompt_logprobs : list of TokenLogprob
        Those of the prompt's tokens but the first, as far as they are computed and wanted.
    num_cached : int
        How many tokens of its prompt the prefix cache had, once it has a token.
    reason, message : str
        Why it ended, empty before that; and the message of an error.
    is_streamed : bool
        Whether its output goes to a `Stream`, and not to `step`.
    """

    prompt: npt.NDArray[np.int32]
    options: RequestOptions
    ends: list[int]
    decoder: TextDecoder | None = None
    grammar: Grammar | None = None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached: int = 0
    reason: str = ""
    message: str = ""
    is_streamed: bool = False

    @property
    def all_tokens(self) -> npt.NDArray[np.int32]:
        """The tokens of the prompt and the generated ones, as a new array."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    def require_tokens(self, vocab_size: int, name: str) -> None:
        """Raise ValueError if the model of this name cannot read the prompt, or has no token to draw at first."""
        # Such a token would fail the step, and all other requests with it.
        if (largest := int(self.prompt.max(initial=0))) >= vocab_size:
            raise ValueError(
                f"a token of the prompt is {largest}, and {name} has {vocab_size}: it needs its own tokenizer"
            )
        if (largest := max(self.options.logit_bias, default=0)) >= vocab_size:
            raise ValueError(f"a token of logit_bias must be less than the {vocab_size} of {name}, got {largest}")
        if self.options.min_tokens and set(self.ends).issuperset(range(vocab_size)):
            raise ValueError(
                f"stop_token_ids must leave a token to draw before min_tokens = {self.options.min_tokens}, got all "
                f"{vocab_size} of {name}"
            )

    def num_prompt_rows(self, stop: int) -> int:
        """How many rows before position `stop` give log-probabilities of the prompt that are wanted and not there."""
        if self.options.prompt_logprobs is None:
            return 0
        return max(0, min(stop, len(self.prompt) - 1) - len(self.prompt_logprobs))

    @property
    def told(self) -> tuple[Any, ...]:
        """What `heard` makes the same request of, on another rank."""
        return self.prompt.tobytes(), self.options.told, self.ends

    @classmethod
    def heard(cls, prompt: bytes, options: dict[str, Any], ends: list[int]) -> EngineRequest:
        """Make a request of what another rank told."""
        return cls(np.frombuffer(prompt, np.int32), RequestOptions(**options), ends)

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` would change its logits."""
        asked = self.options
        return (
            self.grammar is not None
            or len(self.tokens) < asked.min_tokens
            or bool(asked.logits_processor or asked.logit_bias or asked.presence_penalty or asked.frequency_penalty)
            or asked.repetition_penalty != 1
        )

    def adjust(self, logits: torch.Tensor) -> None:
        """Adjust its logits, (vocab_size,) float32, in place, in the order of vLLM, so that what must not come is last.

        Raises
        ------
        GrammarError
            The text cannot go on.
        """
        asked = self.options
        if asked.logits_processor is not None:
            logits.copy_(self._processed(asked.logits_processor, logits.clone()))
        if asked.logit_bias:
            self._add(logits, asked.logit_bias)
        if asked.repetition_penalty != 1:
            seen = torch.from_numpy(self.all_tokens).long().to(logits.device)
            seen = seen[seen < len(logits)]  # images, for example, may have ids that are never generated
            found, penalty, limits = logits[seen], asked.repetition_penalty, torch.finfo(logits.dtype)
            # Nothing can be drawn from what a small penalty makes infinite.
            logits[seen] = torch.where(found > 0, found / penalty, found * penalty).clamp(limits.min, limits.max)
        if asked.presence_penalty or asked.frequency_penalty:
            counts = Counter(self.tokens)
            self._add(logits, {x: -asked.presence_penalty - asked.frequency_penalty * n for x, n in counts.items()})
        if len(self.tokens) < asked.min_tokens:
            logits[[end for end in self.ends if 0 <= end < len(logits)]] = -torch.inf
        if self.grammar is not None:
            self.grammar.mask(self.tokens, logits)

    def _processed(self, processor: LogitsProcessor, logits: torch.Tensor) -> torch.Tensor:
        """What a logits_processor makes of logits, or raise."""
        made, like = processor(self.tokens.copy(), logits), (logits.shape, logits.dtype, logits.device)
        if not isinstance(made, torch.Tensor) or (made.shape, made.dtype, made.device) != like:
            got = f"{tuple(made.shape)} {made.dtype} on {made.device}" if isinstance(made, torch.Tensor) else repr(made)
            raise TypeError(
                f"logits_processor must return a tensor as the one that it gets, {tuple(like[0])} {like[1]} on "
                f"{like[2]}, got {got}"
            )
        if not made.amax().isfinite():
            raise ValueError("logits_processor must leave a token to draw, and returned NaN, +inf, or -inf for all")
        return made

    def _add(self, logits: torch.Tensor, changes: Mapping[int, float]) -> None:
        tokens = [token for token in changes if token < len(logits)]
        more = torch.tensor([changes[token] for token in tokens], dtype=logits.dtype, device=logits.device)
        limits = torch.finfo(logits.dtype)
        logits[tokens] = (logits[tokens] + more).clamp(limits.min, limits.max)

    def plan(self, token: int, logprob: TokenLogprob | None = None) -> tuple[str, list[Write]]:
        """Append a token: why the request ends with it, or an empty string, and what to store."""
        num_tokens = len(self.tokens) + 1
        decoder, piece = copy(self.decoder), ""
        may_stop = num_tokens > self.options.min_tokens
        reason = "stop" if may_stop and token in self.ends else ""
        if decoder is not None and not reason:
            piece = decoder.push(token, may_stop=may_stop)
            reason = "stop" if decoder.is_stopped else ""
        if not reason and num_tokens == self.options.max_tokens:
            reason = "length"
        if decoder is not None and reason:
            piece += decoder.finish(may_stop=may_stop)
            reason = "stop" if decoder.is_stopped else reason
        is_kept = reason != "stop"
        return reason, [
            (self.tokens, slice(num_tokens - 1, None), [token] if is_kept else []),
            (self.logprobs, slice(num_tokens - 1, None), [logprob] if is_kept and logprob else []),
            (self.pieces, slice(len(self.pieces), None), [piece] if piece else []),
            (vars(self), "decoder", decoder),
            (vars(self), "reason", reason),
        ]

    def plan_end(self, reason: str, message: str = "") -> list[Write]:
        """End the request without another token: what to store."""
        rest: Any = [] if self.decoder is None else [copy(self.decoder).finish()]
        return [
            (self.pieces, slice(len(self.pieces), None), rest),
            (vars(self), "message", message),
            (vars(self), "reason", reason),
        ]
