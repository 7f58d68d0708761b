"""A few query tokens against a long context on the CPU: flash-decoding over splits of SPLIT tokens.

A work item is one split of one sequence for a few neighbouring KV heads, with the G query heads of all query tokens of
the sequence: one token in decode, some when drafts are verified. A step takes STEP tokens of one KV head, so each row
is read from memory once. The steps of a tile go through its rows in memory order, first keys, then values, and prefetch
the rows of a later step. The last item of a (sequence, heads) group to finish merges its splits in order
(flash-decoding, Dao et al., 2023). Splits and tiles start at multiples of SPLIT and TILE tokens of the sequence, so the
order of every sum is that of prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float32, int64, types

from ...arrays import Array
from ...calls import AttentionCall
from ...kernel_cache.compile_thread import made_once
from ...visible import Visible
from ..compile import compile_kernel
from ..threads import get_num_threads
from .access import fetch_add, get_float, get_int32
from .arguments import FIRST_TYPES, estimate_of, make_arguments, make_inputs, row_bytes_of
from .flash import SPLIT, WorkItem, make_walk, merge_state
from .launch import Launch
from .scratch import (
    NOTHING,
    copy_floats,
    make_query_rows,
    scratch_at,
    scratch_memory,
    start_row,
    start_running,
    start_states,
    whole_groups,
)
from .steps.code import FLOAT_BYTES, INT_BYTES, LANES, STEP, TILE
from .steps.widen import is_shuffled
from .tiles import TABLE_BYTES, TileConfig, address, cache_strides, tile_config

GROUP_ROWS = 4  # query rows of a KV head that share a vector, unless it has only one
ITEMS_PER_THREAD = 4
GROUP_BYTES = 32 * 1024
NO_STATES = np.empty(0, np.float32)
MOST_ROWS = 64  # query rows of a work item for several KV heads
# About how many ns one thread takes for each dim of a key and a value of a KV head, and for each row.
DIM_NS, ROW_NS = 0.2, 0.04


@made_once(most=64)
def _make_kernel(config: TileConfig, score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """The decode kernel of one TileConfig and score_mod."""
    walk, R = make_walk(config, score_mod, merges=False), config.group_rows
    tile_tokens = TILE if config.staged else 2 * STEP
    put_query, finish_row = make_query_rows(even_odd=is_shuffled(config.kind), rounded=config.scaled)

    def decode(
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
        splits,
        head_dim,
        heads_per_item,
        most_tokens,
        token_major,
        partial_acc,
        maxima,
        sums,
        finished,
        out,
        lse,
    ):
        num_heads, num_kv_heads = factors.size, v_scale.size
        group_size = num_heads // num_kv_heads
        groups = finished.shape[1]
        most_rows = heads_per_item * whole_groups(most_tokens * group_size, R)
        memory = scratch_memory(most_rows, heads_per_item, head_dim, tile_tokens)
        scratch = scratch_at(address(memory), most_rows, heads_per_item, head_dim, tile_tokens)
        row_bytes, q_kind = scratch.row_bytes, inputs.q_kind
        out_bytes = head_dim * (4 if q_kind == 0 else 2)

        while True:
            item = fetch_add(counter)
            if item >= num_items:
                break
            split, group = item // groups, item % groups
            seq, begin = splits.seq[split], splits.begin[split]
            first_kv_head = group * heads_per_item
            kv_heads = min(heads_per_item, num_kv_heads - first_kv_head)
            first_token, num_tokens = query_starts[seq], query_starts[seq + 1] - query_starts[seq]
            used = num_tokens * group_size
            head_rows = whole_groups(used, R)
            length = np.int64(seq_lens[seq])
            table = address(tables) + seq * tables.shape[1] * TABLE_BYTES
            for h in range(kv_heads):
                for r in range(head_rows):
                    # Rows that fill up a group repeat the last one.
                    token, g = min(r, used - 1) // group_size, min(r, used - 1) % group_size
                    head, position = (first_kv_head + h) * group_size + g, length - num_tokens + token
                    start_row(scratch, h * head_rows + r, seq, token, position, head, options, length)
                    query = inputs.q + (first_token + token) * inputs.q_strides[0] + head * inputs.q_strides[1]
                    factor = address(factors) + head * FLOAT_BYTES
                    put_query(scratch, h * head_rows + r, R, query, q_kind, factor, head_dim, address(places))
            start_states(scratch, kv_heads * head_rows)

            first = np.int64(get_int32(scratch.starts))  # of the earliest row: no other one sees a key before it
            start, stop = max(begin, first // TILE * TILE), min(begin + SPLIT, length)
            heads = WorkItem(
                seq, table, first, first_kv_head, kv_heads, head_rows, head_dim, address(places), token_major
            )  # fmt: skip
            if first < stop:  # padding may leave nothing
                walk(scratch, heads, inputs, options, start, stop)

            count = splits.first[seq + 1] - splits.first[seq]
            if count > 1:
                for h in range(kv_heads):
                    for r in range(used):
                        token, head = r // group_size, (first_kv_head + h) * group_size + r % group_size
                        state, mine = splits.state[split] + token * num_heads + head, h * head_rows + r
                        copy_floats(
                            address(partial_acc) + state * row_bytes,
                            scratch.acc + mine * row_bytes,
                            row_bytes // FLOAT_BYTES,
                        )
                        maxima[state] = get_float(scratch.maximum + mine * FLOAT_BYTES)
                        sums[state] = get_float(scratch.sum + mine * FLOAT_BYTES)
                if fetch_add(address(finished) + (seq * groups + group) * INT_BYTES) < count - 1:
                    continue
            for h in range(kv_heads):
                for r in range(used):
                    token, head = r // group_size, (first_kv_head + h) * group_size + r % group_size
                    mine = h * head_rows + r
                    start_running(scratch, mine, sinks[head] if sinks.size else NOTHING)
                    if count == 1:
                        state = mine * FLOAT_BYTES
                        merge_state(
                            scratch,
                            mine,
                            scratch.acc + mine * row_bytes,
                            scratch.maximum + state,
                            scratch.sum + state,
                        )
                    else:
                        for s in range(splits.first[seq], splits.first[seq + 1]):
                            state = splits.state[s] + token * num_heads + head
                            merge_state(
                                scratch,
                                mine,
                                address(partial_acc) + state * row_bytes,
                                address(maxima) + state * FLOAT_BYTES,
                                address(sums) + state * FLOAT_BYTES,
                            )
                    to = (first_token + token) * num_heads + head
                    lse[first_token + token, head] = finish_row(
                        out + to * out_bytes, q_kind, scratch, mine, v_scale[first_kv_head + h],
                        head_dim, address(places),
                    )  # fmt: skip
        # numba frees an array after its last use, and does not see that addresses are in use.
        return memory.size

    return compile_kernel(decode, SIGNATURE, (config, score_mod), keep=score_mod is None)


class Splits(NamedTuple):
    """The splits of all sequences, in order."""

    seq: npt.NDArray[np.int64]  # (splits,) the sequence of each
    begin: npt.NDArray[np.int64]  # (splits,) its first token
    state: npt.NDArray[np.int64]  # (splits,) the first of its partial states: those of all heads of all query tokens
    first: npt.NDArray[np.int64]  # (num_seqs + 1,) the first split of each sequence


SIGNATURE = (
    *FIRST_TYPES,
    types.NamedUniTuple(int64[::1], 4, Splits),
    *(int64, int64, int64, boolean),
    *(float32[::1], float32[::1], float32[::1], int64[:, ::1]),
    *(int64, float32[:, ::1]),
)


def plan_splits(
    seq_lens: npt.NDArray[np.int64],
    query_lens: npt.NDArray[np.int64],
    visible: Visible,
    num_heads: int,
) -> Splits:
    """Cut sequences at multiples of SPLIT tokens, and leave out splits before the first key that a row sees.

    A sequence without query tokens has no splits, and one that is nothing but padding has one.
    """
    oldest = visible.first_keys(seq_lens, query_lens) // SPLIT
    counts = np.where(query_lens > 0, np.maximum(-(-seq_lens // SPLIT) - oldest, seq_lens > 0), 0)
    first = np.zeros(seq_lens.size + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    seq = np.repeat(np.arange(seq_lens.size), counts)
    begin = (np.arange(seq.size) - first[seq] + oldest[seq]) * SPLIT
    sizes = query_lens[seq] * num_heads
    return Splits(seq, begin, np.cumsum(sizes) - sizes, first)


def _make_partials(num_states: int, head_dim: int, num_seqs: int, groups: int) -> tuple[Array, ...]:
    """Room for partial states, those of all heads, and how many items of each (sequence, group of heads) are done."""
    finished = np.zeros((num_seqs, groups), np.int64)
    if not num_states:
        return NO_STATES, NO_STATES, NO_STATES, finished
    maxima, sums = np.empty((2, num_states), np.float32)
    return np.empty(num_states * (-(-head_dim // LANES) * LANES), np.float32), maxima, sums, finished


def plan_few_tokens(
    call: AttentionCall, query_starts: npt.NDArray[np.int64], query_lens: npt.NDArray[np.int64], group_rows: int
) -> Launch:
    """Plan a launch for the sequences whose entry of `query_lens` is above 0; query_starts has rows of others, too."""
    spec, num_heads = call.spec, call.q.shape[1]
    keys = call.seq_lens.astype(np.int64)
    splits = plan_splits(keys, query_lens, call.options.visible, num_heads)
    most_tokens = int(query_lens.max(initial=1))
    is_split = np.diff(splits.first).max(initial=0) > 1  # the only split of a sequence leaves no partial states
    num_states = int(query_lens[splits.seq].sum()) * num_heads if is_split else 0

    config = tile_config(spec, group_rows, staged=False)
    rows = most_tokens * num_heads // spec.num_kv_heads
    in_l1 = max(1, min(GROUP_BYTES // (STEP * row_bytes_of(call)), MOST_ROWS // rows))
    busy = -(-ITEMS_PER_THREAD * get_num_threads() // max(1, splits.seq.size))
    heads_per_item = 1 if config.staged else max(1, min(in_l1, spec.num_kv_heads // busy))
    k_strides = cache_strides(call.k_cache.strides, spec.layout)
    key_ns = spec.num_kv_heads * spec.head_dim * (DIM_NS + rows * ROW_NS)
    # Whether the heads of a token lie side by side, rather than the tokens of a head. In layout vllm the tile of a head
    # is staged whole, for all of its steps.
    token_major = spec.layout != "vllm" and k_strides.token > k_strides.head
    groups = -(-spec.num_kv_heads // heads_per_item)
    return Launch(
        _make_kernel(config, call.options.score_mod),
        splits.seq.size * groups,
        make_inputs(call),
        *make_arguments(call, query_starts),
        (splits, spec.head_dim, heads_per_item, most_tokens, token_major),
        partial(_make_partials, num_states, spec.head_dim, keys.size, groups),
        estimate_of(call, int(keys.sum()) * key_ns),
    )


def plan_decode(call: AttentionCall) -> Launch:
    """Plan a call of decode_attention; the launch leaves the rows of sequences without tokens alone."""
    num_seqs, num_heads, _ = call.q.shape
    group_rows = 1 if num_heads == call.spec.num_kv_heads else GROUP_ROWS
    return plan_few_tokens(call, np.arange(num_seqs + 1), np.ones(num_seqs, np.int64), group_rows)
