"""Prefill attention on the CPU: flash attention over tiles of query rows.

Work item: up to ROWS query rows (neighbouring tokens times the G query heads of one KV head) of one sequence against
all keys that any of them sees. Tiles of keys start at multiples of TILE tokens of the sequence, and a tile that a row
does not see leaves its state unchanged, so the bits of a row do not depend on the other rows of its item. The items of
one (sequence, KV head) are consecutive, so its keys stay in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32, int64, types

from ..arrays import Array
from ..calls import AttentionCall
from ..commit import commit, result_writes
from ..compiling.compile_thread import made_once
from .arguments import FIRST_TYPES, make_arguments
from .compile import compile_kernel, inlined
from .flash import STEP, make_steps, make_walk, merge
from .scratch import NOTHING, scratch_at, scratch_memory, start_row
from .simd import fetch_add
from .threads import run
from .tiles import FLOAT_BYTES, TABLE_BYTES, TILE, TileConfig, address, make_tiles, tile_config

ROWS = 64
ROWS_AT_ONCE = 4
PARALLEL_LOGITS = 4096


class Item(NamedTuple):
    """A work item, for the walk over its keys."""

    seq: Any
    table: Any  # the address of the sequence's row of the block table
    num_rows: Any
    kv_head: Any
    head_dim: Any


@made_once(most=64)
def _make_kernel(config: TileConfig, score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """The prefill kernel of one TileConfig and score_mod."""
    stage_keys, stage_values = make_tiles(config)
    dots, weigh, add_values = make_steps("float32", config.lanes, score_mod)

    @inlined
    def score(scratch, item, count, rows, strides, next_rows, next_strides):
        head_dim = item.head_dim
        stage_keys(scratch.tile, rows, item.kv_head, strides, head_dim, count, next_rows, next_strides)
        for r in range(0, item.num_rows, ROWS_AT_ONCE):
            end = min(r + ROWS_AT_ONCE, item.num_rows)
            for t in range(0, count, STEP):
                dots(scratch, r, end, t, scratch.staged_rows, 0, head_dim, STEP, 0)

    @inlined
    def add(scratch, item, count, rows, strides, next_rows, next_strides):
        later = next_rows if next_rows != 0 else rows
        stage_values(scratch.tile, rows, item.kv_head, strides, item.head_dim, count, later, next_strides)
        add_values(scratch, 0, item.num_rows, 0, scratch.staged_rows, 0, item.head_dim, count, 0)

    walk = make_walk(score, weigh, add)

    def prefill(
        counter,
        num_items,
        q,
        tables,
        seq_lens,
        caches,
        options,
        sinks,
        v_scale,
        query_starts,
        chunks,
        tokens_per_item,
        out,
        lse,
    ):
        num_heads, head_dim = q.shape[1], q.shape[2]
        group_size = num_heads // v_scale.size
        row = head_dim * FLOAT_BYTES
        memory = scratch_memory(tokens_per_item * group_size, head_dim)
        scratch = scratch_at(address(memory), tokens_per_item * group_size, head_dim)

        while True:
            item = fetch_add(counter)
            if item >= num_items:
                break
            chunk, kv_head = item % chunks.seq.size, item // chunks.seq.size
            seq, first_token = chunks.seq[chunk], chunks.token[chunk]
            num_tokens = min(tokens_per_item, query_starts[seq + 1] - first_token)
            num_rows = num_tokens * group_size
            length = np.int64(seq_lens[seq])
            first_position = length - query_starts[seq + 1] + first_token
            table = address(tables) + seq * tables.shape[1] * TABLE_BYTES
            for r in range(num_rows):
                token, head = first_token + r // group_size, kv_head * group_size + r % group_size
                query = address(q) + (token * num_heads + head) * row
                start_row(scratch, r, first_position + r // group_size, head, query, head_dim)

            stop = min(length, first_position + num_tokens) if options.causal else length
            start = max(np.int64(0), first_position - options.window + 1) // TILE * TILE
            walk(scratch, Item(seq, table, num_rows, kv_head, head_dim), caches, options, start, stop)

            for r in range(num_rows):
                token, head = first_token + r // group_size, kv_head * group_size + r % group_size
                lse[token, head] = merge(
                    address(out) + (token * num_heads + head) * row,
                    scratch.acc + r * row,
                    scratch.maximum + r * FLOAT_BYTES,
                    scratch.sum + r * FLOAT_BYTES,
                    1,
                    1,
                    head_dim,
                    sinks[head] if sinks.size else NOTHING,
                    v_scale[kv_head],
                )
        # numba frees an array after its last use, and does not see that addresses are in use.
        return memory.size

    return compile_kernel(prefill, SIGNATURE, (config, score_mod), keep=score_mod is None)


class Chunks(NamedTuple):
    """The runs of query tokens that work items take."""

    seq: npt.NDArray[np.int64]  # (chunks,) the sequence of each
    token: npt.NDArray[np.int64]  # (chunks,) its first row of q


SIGNATURE = (
    *FIRST_TYPES,
    int64[::1],
    types.NamedUniTuple(int64[::1], 2, Chunks),
    *(int64, float32[:, :, ::1], float32[:, ::1]),
)


def plan_chunks(query_starts: npt.NDArray[np.int64], tokens_per_item: int) -> Chunks:
    """Cut every sequence's query tokens into runs of tokens_per_item."""
    counts = -(-np.diff(query_starts) // tokens_per_item)
    seq = np.repeat(np.arange(counts.size), counts)
    ordinal = np.arange(seq.size) - (np.cumsum(counts) - counts)[seq]
    return Chunks(seq, query_starts[seq] + ordinal * tokens_per_item)


def prefill_attention(call: AttentionCall, out: Array, lse: Array | None) -> None:
    """Fill the rows of `out` (num_tokens, num_heads, head_dim) and `lse` up to query_starts[-1]."""
    assert call.query_starts is not None
    num_kv_heads, starts = call.spec.num_kv_heads, call.query_starts.astype(np.int64)
    kernel = _make_kernel(tile_config(call.spec), call.options.score_mod)
    num_tokens, num_heads = int(starts[-1]), call.q.shape[1]
    arguments, owners = make_arguments(call, call.q[:num_tokens])
    tokens_per_item = max(1, ROWS // (num_heads // num_kv_heads))
    chunks = plan_chunks(starts, tokens_per_item)
    result = np.empty((num_tokens, *call.q.shape[1:]), np.float32)
    lse_result = np.empty((num_tokens, num_heads), np.float32)
    logits = int((np.diff(starts) * call.seq_lens).sum()) * num_heads
    run(
        kernel,
        chunks.seq.size * num_kv_heads,
        (*arguments, starts, chunks, tokens_per_item, result, lse_result),
        owners=owners,
        parallel=logits >= PARALLEL_LOGITS,
    )
    commit(result_writes(out[:num_tokens], result, None if lse is None else lse[:num_tokens], lse_result))
