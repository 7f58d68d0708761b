"""Drawing the next token from the logits."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Sampling:
    """How the next token is drawn from the logits; temperature 0 takes the most probable one."""

    temperature: float = 0.7
    top_k: int = 20
    top_p: float = 0.95
    seed: int = 0

    def choose(self, logits: np.ndarray, draw: float) -> int:
        """Return the token that a uniform draw from [0, 1) picks: a pure function of its arguments."""
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self.top_k or None]
        p = np.exp((logits[order] - logits[order[0]]).astype(np.float64) / self.temperature)
        p /= p.sum()
        order = order[: np.searchsorted(p.cumsum(), self.top_p) + 1]
        # In the order of the token ids, so that two almost equal logits that change places change no draw.
        order.sort()
        p = np.exp((logits[order] - logits.max()).astype(np.float64) / self.temperature).cumsum()
        return int(order[np.searchsorted(p, draw * p[-1], side="right").clip(max=len(order) - 1)])
