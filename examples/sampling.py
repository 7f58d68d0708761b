"""Sampling: draws the next token from logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def require_finite(logits: np.ndarray) -> None:
    """Raise FloatingPointError if no token can be chosen: for a NaN, +inf, or only -inf."""
    if not np.isfinite(logits.max()):  # NaN is larger than anything
        raise FloatingPointError("the model's logits are not finite: look for NaN in its weights")


@dataclass
class Sampling:
    """Options for drawing the next token; temperature 0 takes the most probable one."""

    temperature: float = 0.7
    top_k: int = 20
    top_p: float = 0.95
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def choose(self, logits: np.ndarray, draw: float, seen: Sequence[int] = (), banned: Sequence[int] = ()) -> int:
        """Choose the token that `draw`, a uniform number in [0, 1), selects.

        Tokens in `seen` get the repetition penalty, those in `banned` are never chosen. Raises what `require_finite`
        raises.
        """
        require_finite(logits)
        if self.repetition_penalty != 1 or len(banned):
            logits, seen = logits.copy(), list(seen)
            logits[seen] *= np.where(logits[seen] > 0, 1 / self.repetition_penalty, self.repetition_penalty)
            logits[list(banned)] = -np.inf
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self.top_k or None]
        p = np.exp((logits[order] - logits[order[0]]).astype(np.float64) / self.temperature)
        order, p = order[p >= self.min_p], p[p >= self.min_p]
        p /= p.sum()
        order = order[: np.searchsorted(p.cumsum(), self.top_p) + 1]
        # Sort by token id, so that two almost equal logits that change places do not change the draw.
        order.sort()
        p = np.exp((logits[order] - logits.max()).astype(np.float64) / self.temperature).cumsum()
        return int(order[np.searchsorted(p, draw * p[-1], side="right").clip(max=len(order) - 1)])
