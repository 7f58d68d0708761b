"""Merging partial attentions on the CPU, in NumPy."""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..calls import MergeCall


def merge_states(call: MergeCall, out: Array, lse: Array) -> None:
    """Fill out (rows, heads, D) and lse (rows, heads) with attention over the keys of all states."""
    outs, lses = call.outs, call.lses
    top = lses[0]
    for x in lses[1:]:
        top = np.maximum(top, x)
    top = np.where(top == -np.inf, np.float32(0), top)
    weighted = np.zeros(out.shape, np.float32)
    total = np.zeros(lse.shape, np.float32)
    for state, state_lse in zip(outs, lses, strict=True):
        weight = np.exp(state_lse - top)
        total += weight
        term = state.astype(np.float32) * weight[..., None]
        # A state without keys may hold anything, and 0 * NaN is NaN.
        weighted += term if weight.all() else np.where(weight[..., None] != 0, term, np.float32(0))
    # log(0) is the -inf of a row without keys; an LSE of NaN or +inf gives NaN.
    lse[...] = top + np.log(total)
    out[...] = weighted / np.where(total != 0, total, np.float32(1))[..., None]
