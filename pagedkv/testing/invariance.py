"""Checks of invariance: the same bits for other batches, placements, block sizes and chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .calls import run
from .problems.attention import Problem, Spec, build

Array = np.ndarray[Any, Any]
Attend = Callable[[Problem], tuple[Array, ...]]
OVER = ("placement", "batch", "block_size", "chunks")


def assert_invariant(spec: Spec, attend: Attend = run, over: Sequence[str] = OVER) -> int:
    """Check that a result keeps its bits when only things change that must not matter.

    Parameters
    ----------
    spec : Spec
        A spec without fingerprints, which depend on where values lie; layout vllm needs a block size from 8 to 256.
    attend : callable
        Computes the results of a Problem: arrays with a row for each row of q without padding. By default the public
        operation.
    over : sequence of str
        "placement": blocks elsewhere among other poison. "batch": each sequence alone, and all in the opposite order.
        "block_size": others. "chunks": of prefill, the last query tokens of each sequence without those before.

    Returns
    -------
    int
        How many comparisons were made.

    Raises
    ------
    AssertionError
        A result has other bits; the message contains the problem.
    ValueError
        An element of `over` is unknown.

    Examples
    --------
    >>> from pagedkv.testing import Spec, assert_invariant, expect
    >>> assert_invariant(Spec(seq_lens=(5, 3)), expect, over=["placement"])  # the reference itself
    1
    """
    if unknown := {*over} - {*OVER}:
        raise ValueError(f"over must be of {', '.join(OVER)}, got {', '.join(sorted(unknown))}")
    whole, count = attend(build(spec)), 0
    for what, other, rows in _others(spec):
        if what in over:
            for result, wanted in zip(attend(other), whole, strict=True):
                same = result.tobytes() == np.ascontiguousarray(wanted[rows]).tobytes()
                assert same, f"other bits where {what} is another: {spec!r}"
            count += 1
    return count


def _others(spec: Spec) -> Iterator[tuple[str, Problem, Array]]:
    """Yield what differs, the other problem, and the rows of the first one that it has."""
    query_lens = spec.query_lens or (1,) * len(spec.seq_lens)
    starts, every = np.cumsum((0, *query_lens)), range(len(query_lens))
    ids = spec.ids or tuple(every)
    rows = np.arange(starts[-1])
    poison = "huge" if spec.poison == "nan" else "nan"
    yield "placement", build(spec.replace(placement_seed=spec.placement_seed + 1, poison=poison)), rows
    for block_size in (8, 64) if spec.layout == "vllm" else (1, 3, 64):
        if block_size != spec.block_size:
            yield "block_size", build(spec.replace(block_size=block_size)), rows
    if spec.score_mod is None:  # a score_mod may depend on the sequence's number in the batch
        for order in (*((i,) for i in every), tuple(reversed(every))):
            batch = spec.replace(
                ids=tuple(ids[i] for i in order),
                seq_lens=tuple(spec.seq_lens[i] for i in order),
                query_lens=spec.query_lens and tuple(query_lens[i] for i in order),
            )
            yield "batch", build(batch), np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    if spec.query_lens and spec.causal:
        for share in (2, 3):
            kept = [n // share for n in query_lens]
            last = [np.arange(end - n, end) for end, n in zip(starts[1:], kept, strict=True)]
            problem, chosen = build(spec), np.concatenate(last)
            q = problem.q[chosen]
            out = np.full_like(q, np.nan)
            query_starts = np.cumsum((0, *kept), dtype=np.int32)
            changes = {"q": q, "query_starts": query_starts, "out": out, "out_buffer": out}
            yield "chunks", dataclasses.replace(problem, **changes), chosen
