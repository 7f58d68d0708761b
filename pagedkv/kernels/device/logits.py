"""What changes a logit between q . k and the softmax: softcap, ALiBi, score_mod."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .intrinsics.thread import divide
from .language import float32, int32
from .source import device_function, user_function

LOG2E, LN2 = float32(1.4426950408889634), float32(0.6931471805599453)
NONE = float32(-math.inf)  # the maximum of no logits
# The shift (minus the pivot) of a row that has seen no key. Its pivot is below any other: rescaling from it gives 0.
UNSEEN = float32(3.4028235e38)
SMALLEST = float32(2.0**-126)  # positive and normal


@device_function
def positive(unit):
    """The factor of logits, but never 0, since 0 times -inf is NaN."""
    return SMALLEST if unit == float32(0) else unit


@device_function
def cap(score, softcap):
    """Apply a softcap; 0 means none."""
    if softcap != float32(0):
        score = float32(softcap * float32(math.tanh(divide(score, softcap))))
    return score


def make_modify(score_mod: Callable[..., Any] | None) -> Any:
    """The device function ``modify(score, softcap, slope, q_pos, k_pos, head, seq)``: softcap, ALiBi, score_mod."""
    user = None if score_mod is None else user_function(score_mod)

    @device_function
    def modify(score, softcap, slope, q_pos, k_pos, head, seq):
        score = cap(score, softcap)
        score = float32(score - slope * float32(abs(int32(k_pos - q_pos))))
        if user is not None:
            score = float32(user(score, int32(q_pos), int32(k_pos), int32(head), int32(seq)))
        return score

    return modify
