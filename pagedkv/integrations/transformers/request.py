"""EngineRequest: what an engine knows about a request."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...commit import Write
from .sampling import Sampling
from .text import TextDecoder


@dataclass(eq=False)
class EngineRequest:
    """The prompt of a request, how its tokens are chosen, what was generated so far, and why it ended.

    Attributes
    ----------
    prompt : (num_tokens,) int32
    max_tokens, min_tokens : int
        Tokens to generate, at most, and before it may stop.
    sampling : Sampling
    ends : list of int
        The tokens that end it.
    decoder : TextDecoder or None
        Where its text is wanted.
    tokens : list of int
        Generated so far, but for one that stops it.
    pieces : list of str
        Their text.
    reason, message : str
        Why it has ended, empty until then; and what was wrong.
    """

    prompt: npt.NDArray[np.int32]
    max_tokens: int
    min_tokens: int
    sampling: Sampling
    ends: list[int]
    decoder: TextDecoder | None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    reason: str = ""
    message: str = ""

    @property
    def all_tokens(self) -> npt.NDArray[np.int32]:
        """Those of the prompt and the generated ones, as a new array."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` has anything to do."""
        return self.sampling.repetition_penalty != 1 or len(self.tokens) < self.min_tokens

    def adjust(self, logits: torch.Tensor) -> None:
        """Change its logits, (vocab_size,) float32: penalties, and no end that comes too early."""
        penalty = self.sampling.repetition_penalty
        if penalty != 1:
            seen = torch.from_numpy(self.all_tokens).long().to(logits.device)
            seen = seen[seen < len(logits)]  # images, for example, may have ids that are never generated
            found = logits[seen]
            limits = torch.finfo(logits.dtype)  # nothing can be drawn from what a small penalty makes infinite
            logits[seen] = torch.where(found > 0, found / penalty, found * penalty).clamp(limits.min, limits.max)
        if len(self.tokens) < self.min_tokens:
            logits[[end for end in self.ends if 0 <= end < len(logits)]] = -torch.inf

    def plan(self, token: int) -> tuple[str, list[Write]]:
        """What its next token does to it: why it ends, or an empty string, and what to store."""
        num_tokens = len(self.tokens) + 1
        decoder, piece = copy(self.decoder), ""
        may_stop = num_tokens > self.min_tokens
        reason = "stop" if may_stop and token in self.ends else ""
        if decoder is not None and not reason:
            piece = decoder.push(token, may_stop=may_stop)
            reason = "stop" if decoder.is_stopped else ""
        if not reason and num_tokens == self.max_tokens:
            reason = "length"
        if decoder is not None and reason:
            piece += decoder.finish()
        return reason, [
            (self.tokens, slice(num_tokens - 1, None), [] if reason == "stop" else [token]),
            (self.pieces, slice(len(self.pieces), None), [piece] if piece else []),
            (vars(self), "decoder", decoder),
            (vars(self), "reason", reason),
        ]

    def plan_end(self, reason: str, message: str = "") -> list[Write]:
        """It ends without another token: what to store."""
        rest: Any = [] if self.decoder is None else [copy(self.decoder).finish()]
        return [
            (self.pieces, slice(len(self.pieces), None), rest),
            (vars(self), "message", message),
            (vars(self), "reason", reason),
        ]
