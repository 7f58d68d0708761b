"""Invariants: what holds between two calls of the memory manager."""

from __future__ import annotations

import numpy as np


def must_hold(holds: bool | np.bool, otherwise: str) -> None:
    """Raise AssertionError, with or without python -O, unless an invariant holds; `otherwise` says what is wrong."""
    if not holds:
        raise AssertionError(otherwise)
