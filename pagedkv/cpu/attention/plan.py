"""Attention on the CPU: a call is planned once, and its plan runs with any q and caches that are alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...arrays import Array
from ...calls import AttentionCall, Caches
from ...commit import bits, commit
from .decode import plan_decode
from .launch import Launch
from .prefill import plan_prefill


class AttentionPlan(NamedTuple):
    """What a call launches, with valid tables, lengths and options of its own."""

    launches: list[Launch]
    num_rows: int  # rows of q that are not padding
    empty: Array | None  # (num_rows,) which rows are of sequences without tokens, if any is

    def run(self, q: Array, caches: Caches, out: Array, lse: Array | None, is_given: bool) -> None:
        """Fill the first num_rows rows of `out` and, if there is one, of `lse`.

        If the caller has given `out`, kernels write to another array: after an interrupt it is as before or complete.
        """
        rows = out[: self.num_rows]
        result = np.empty(rows.shape, rows.dtype) if is_given else rows
        lses = np.empty(rows.shape[:2], np.float32) if lse is None else lse[: self.num_rows]
        if self.empty is not None:  # no launch writes these
            result[self.empty], lses[self.empty] = 0, -np.inf
        for launch in self.launches:
            launch.run(q, caches, result, lses)
        if is_given:
            commit([(bits(rows), ..., bits(result))])


def plan_attention(call: AttentionCall) -> AttentionPlan:
    """Plan a call of decode_attention or prefill_attention."""
    if call.query_starts is not None:
        return AttentionPlan(plan_prefill(call), int(call.query_starts[-1]), None)
    empty = call.seq_lens == 0
    return AttentionPlan([plan_decode(call)], len(call.q), empty if empty.any() else None)
