"""The options of one attention call, checked and with their defaults filled in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a kernel does to a logit and which keys it keeps.

    Attributes
    ----------
    scale : float
        Factor of ``q . k``; finite.
    causal : bool
        Keep only keys at or before the query. Decode calls always set it.
    window : int or None
        Keep only keys after ``position - window``; 1 to 2**31 - 1.
    softcap : float or None
        ``softcap * tanh(logit / softcap)``; positive and finite.
    alibi_slopes, sinks : (num_heads,) float32 array or None
        Slopes of the linear biases; logits of the attention sinks.
    score_mod : callable or None
        ``score_mod(score, q_pos, k_pos, head, seq) -> score``.
    """

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    alibi_slopes: npt.NDArray[np.float32] | None
    sinks: npt.NDArray[np.float32] | None
    score_mod: Callable[..., Any] | None


def refusal(score_mod_error: Exception) -> TypeError:
    """What to raise about a score_mod that numba does not compile, from what numba says."""
    return TypeError(
        "score_mod must be a function of (score, q_pos, k_pos, head, seq) that numba can compile for a float32 and "
        f"four int32: math functions, closed-over numbers and arrays of them only; numba says: {score_mod_error}"
    )
