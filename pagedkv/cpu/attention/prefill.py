"""Prefill attention on the CPU: flash attention over tiles of query rows.

A work item is up to ROWS query rows (neighbouring tokens times the G query heads of one KV head) of one sequence, with
all keys that any of them sees. Tiles and splits of keys start at multiples of TILE and SPLIT tokens of the sequence,
and one that a row does not see leaves its state unchanged, so the bits of a row do not depend on the other rows of its
item. The items of one (sequence, KV head) are consecutive, so its keys stay in the processor's caches. decode.py takes
sequences with few query tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32, int64, types

from ...calls import AttentionCall
from ...kernel_cache.compile_thread import made_once
from ..compile import compile_kernel
from .access import fetch_add, get_int32
from .arguments import FIRST_TYPES, estimate_of, make_arguments, make_inputs
from .decode import GROUP_ROWS, plan_few_tokens
from .flash import WorkItem, make_walk
from .launch import Launch
from .scratch import (
    NOTHING,
    make_query_rows,
    scratch_at,
    scratch_memory,
    start_row,
    start_running,
    start_states,
    whole_groups,
)
from .steps.code import FLOAT_BYTES, TILE
from .steps.widen import is_shuffled
from .tiles import TABLE_BYTES, TileConfig, address, tile_config

ROWS = 256
FEW_ROWS = 32
DIM_NS = 0.08  # about how many ns one thread takes for each dim of a logit and its value


@made_once(most=64)
def _make_kernel(config: TileConfig, score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """The prefill kernel of one TileConfig and score_mod."""
    walk = make_walk(config, score_mod, merges=True)
    put_query, finish_row = make_query_rows(even_odd=is_shuffled(config.kind), rounded=config.scaled)

    def prefill(
        counter,
        num_items,
        inputs,
        tables,
        seq_lens,
        query_starts,
        options,
        factors,
        sinks,
        v_scale,
        places,
        chunks,
        head_dim,
        tokens_per_item,
        out,
        lse,
    ):
        num_heads = factors.size
        group_size = num_heads // v_scale.size
        most_rows = whole_groups(tokens_per_item * group_size, GROUP_ROWS)
        memory = scratch_memory(most_rows, 1, head_dim, TILE)
        scratch = scratch_at(address(memory), most_rows, 1, head_dim, TILE)
        q_kind = inputs.q_kind
        out_bytes = head_dim * (4 if q_kind == 0 else 2)

        while True:
            item = fetch_add(counter)
            if item >= num_items:
                break
            chunk, kv_head = item % chunks.seq.size, item // chunks.seq.size
            seq, first_token = chunks.seq[chunk], chunks.token[chunk]
            num_tokens = min(tokens_per_item, query_starts[seq + 1] - first_token)
            used = num_tokens * group_size
            num_rows = whole_groups(used, GROUP_ROWS)
            length = np.int64(seq_lens[seq])
            first_position = length - query_starts[seq + 1] + first_token
            table = address(tables) + seq * tables.shape[1] * TABLE_BYTES
            for r in range(num_rows):
                # Rows that fill up a group repeat the last one.
                token, head = min(r, used - 1) // group_size, kv_head * group_size + min(r, used - 1) % group_size
                query = inputs.q + (first_token + token) * inputs.q_strides[0] + head * inputs.q_strides[1]
                factor = address(factors) + head * FLOAT_BYTES
                of_sequence = first_token - query_starts[seq] + token
                start_row(scratch, r, seq, of_sequence, first_position + token, head, options, length)
                start_running(scratch, r, sinks[head] if sinks.size else NOTHING)
                put_query(scratch, r, GROUP_ROWS, query, q_kind, factor, head_dim, address(places))
            start_states(scratch, num_rows)

            first = np.int64(get_int32(scratch.starts))  # of the earliest row: no other one sees a key before it
            stop = np.int64(get_int32(scratch.stops + (num_rows - 1) * FLOAT_BYTES))
            heads = WorkItem(seq, table, first, kv_head, 1, num_rows, head_dim, address(places), False)
            if first < stop:  # padding may leave nothing
                walk(scratch, heads, inputs, options, first // TILE * TILE, stop)

            for r in range(used):
                token, head = first_token + r // group_size, kv_head * group_size + r % group_size
                lse[token, head] = finish_row(
                    out + (token * num_heads + head) * out_bytes, q_kind, scratch, r, v_scale[kv_head],
                    head_dim, address(places),
                )  # fmt: skip
        # numba frees an array after its last use, and does not see that addresses are in use.
        return memory.size

    return compile_kernel(prefill, SIGNATURE, (config, score_mod), keep=score_mod is None)


class Chunks(NamedTuple):
    """Runs of query tokens, one for each work item of a KV head."""

    seq: npt.NDArray[np.int64]  # (chunks,) the sequence of each
    token: npt.NDArray[np.int64]  # (chunks,) its first row of q


SIGNATURE = (
    *FIRST_TYPES,
    types.NamedUniTuple(int64[::1], 2, Chunks),
    *(int64, int64, int64, float32[:, ::1]),
)


def plan_chunks(query_starts: npt.NDArray[np.int64], query_lens: npt.NDArray[np.int64], tokens_per_item: int) -> Chunks:
    """Cut the query tokens of sequences, of query_lens tokens, into runs of tokens_per_item."""
    counts = -(-query_lens // tokens_per_item)
    seq = np.repeat(np.arange(counts.size), counts)
    ordinal = np.arange(seq.size) - (np.cumsum(counts) - counts)[seq]
    return Chunks(seq, query_starts[seq] + ordinal * tokens_per_item)


def plan_prefill(call: AttentionCall) -> list[Launch]:
    """Plan a call of prefill_attention; the launches fill all rows up to query_starts[-1]."""
    assert call.query_starts is not None
    starts = call.query_starts.astype(np.int64)
    query_lens, group_size = np.diff(starts), call.q.shape[1] // call.spec.num_kv_heads
    is_few = query_lens * group_size <= FEW_ROWS
    launches: list[Launch] = []
    if is_few.any():
        launches.append(plan_few_tokens(call, starts, np.where(is_few, query_lens, 0), GROUP_ROWS))
    if not is_few.all():
        launches.append(_plan_many_tokens(call, starts, np.where(is_few, 0, query_lens)))
    return launches


def _plan_many_tokens(
    call: AttentionCall, query_starts: npt.NDArray[np.int64], query_lens: npt.NDArray[np.int64]
) -> Launch:
    """Plan a launch for the sequences whose entry of `query_lens` is above 0; query_starts has rows of others, too."""
    num_heads, head_dim = call.q.shape[1:]
    tokens_per_item = max(1, ROWS // (num_heads // call.spec.num_kv_heads))
    logits = int((query_lens * call.seq_lens).sum()) * num_heads
    chunks = plan_chunks(query_starts, query_lens, tokens_per_item)
    return Launch(
        _make_kernel(tile_config(call.spec, GROUP_ROWS, staged=True), call.options.score_mod),
        chunks.seq.size * call.spec.num_kv_heads,
        make_inputs(call),
        *make_arguments(call, query_starts),
        (chunks, head_dim, tokens_per_item),
        tuple,
        estimate_of(call, logits * head_dim * DIM_NS),
    )
