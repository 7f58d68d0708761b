"""Prefill attention on the CPU: flash attention over tiles of query rows.

Work item: up to ROWS query rows (neighbouring tokens times the G query heads of one KV head) of one sequence against
all keys that any of them sees. Tiles of keys start at multiples of TILE tokens of the sequence, and a tile that a row
does not see leaves its state as it was, so the bits of a row do not depend on the rows it shares an item with. Items
of one (sequence, KV head) follow each other, so its keys stay in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..layouts import CacheSpec
from ..options import AttentionOptions
from .compile import compile_kernel
from .flash import NOTHING, ZERO, Rows, fetch, fill, make_steps, merge, scratch_at, scratch_size
from .simd import fetch_add
from .threads import run
from .tiles import (
    FLOAT_BYTES,
    NO_HEADS,
    NO_WINDOW,
    TILE,
    TileConfig,
    address,
    aligned,
    cache_strides,
    make_tiles,
    rows_ahead,
    tile_config,
    token_rows,
)

ROWS = 64
PARALLEL_LOGITS = 4096


@lru_cache(maxsize=64)
def _make_kernel(config: TileConfig, score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """The prefill kernel of one TileConfig and score_mod."""
    stage_keys, stage_values = make_tiles(config)
    attend_keys, attend_values = make_steps(config, score_mod)

    def prefill(
        counter,
        num_items,
        q,
        tables,
        seq_lens,
        query_starts,
        chunks,
        tokens_per_item,
        k_base,
        v_base,
        k_strides,
        v_strides,
        block_size,
        causal,
        window,
        softcap,
        slopes,
        sinks,
        v_scale,
        out,
        lse,
    ):
        num_heads, head_dim = q.shape[1], q.shape[2]
        group_size = num_heads // v_scale.size
        most_rows = tokens_per_item * group_size
        rows = Rows(
            np.empty(most_rows, np.int64),
            np.empty(most_rows, np.int64),
            np.empty(most_rows, np.float32),
            np.empty(most_rows, np.float32),
            np.empty(most_rows, np.float32),
        )
        memory = aligned(scratch_size(most_rows, most_rows, head_dim))
        scratch = scratch_at(address(memory), address(rows.rescale), most_rows, most_rows, head_dim)
        partial_out = np.empty((1, most_rows, head_dim), np.float32)
        addresses = np.empty((4, TILE), np.int64)
        k_ahead, v_ahead = np.empty((2, TILE), np.int64)

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

            memory[:] = ZERO
            for r in range(num_rows):
                token, head = first_token + r // group_size, kv_head * group_size + r % group_size
                rows.position[r], rows.head[r] = first_position + r // group_size, head
                fill(scratch.queries + r * head_dim * FLOAT_BYTES, q[token, head : head + 1])
            rows.maximum[:] = NOTHING
            rows.sum[:] = ZERO

            stop = min(length, first_position + num_tokens) if causal else length
            start = max(np.int64(0), first_position - window + 1) // TILE * TILE
            k_rows, v_rows, next_k, next_v = addresses
            count = min(TILE, stop - start)
            token_rows(next_k, k_base, k_strides, tables[seq], block_size, start, count)
            token_rows(next_v, v_base, v_strides, tables[seq], block_size, start, count)
            while start < stop:
                k_rows, next_k = next_k, k_rows
                v_rows, next_v = next_v, v_rows
                next_start = start + count
                next_count = max(0, min(TILE, stop - next_start))
                token_rows(next_k, k_base, k_strides, tables[seq], block_size, next_start, next_count)
                token_rows(next_v, v_base, v_strides, tables[seq], block_size, next_start, next_count)
                rows_ahead(k_ahead, next_k, k_strides, kv_head, 1, next_count)
                rows_ahead(v_ahead, next_v, v_strides, kv_head, 1, next_count)
                stage_keys(scratch.tile, k_rows, kv_head, k_strides, head_dim, count, k_ahead[:next_count])
                attend_keys(rows, 0, num_rows, scratch, head_dim, start, count, causal, window, softcap, slopes, seq)
                stage_values(scratch.tile, v_rows, kv_head, v_strides, head_dim, count, v_ahead[:next_count])
                attend_values(0, num_rows, scratch, head_dim, count)
                start, count = next_start, next_count

            fetch(partial_out[0, :num_rows], scratch.acc)
            maxima, sums = rows.maximum.reshape(1, most_rows), rows.sum.reshape(1, most_rows)
            for r in range(num_rows):
                token, head = first_token + r // group_size, rows.head[r]
                sink = sinks[head] if sinks.size else NOTHING
                lse[token, head] = merge(out[token, head], partial_out, maxima, sums, 0, 1, r, sink, v_scale[kv_head])

    return compile_kernel(prefill, config if score_mod is None else None)


class Chunks(NamedTuple):
    """The runs of query tokens that work items take."""

    seq: npt.NDArray[np.int64]  # (chunks,) the sequence of each
    token: npt.NDArray[np.int64]  # (chunks,) its first row of q


def plan_chunks(query_starts: npt.NDArray[np.int64], tokens_per_item: int) -> Chunks:
    """Cut every sequence's query tokens into runs of tokens_per_item."""
    counts = -(-np.diff(query_starts) // tokens_per_item)
    seq = np.repeat(np.arange(counts.size), counts)
    ordinal = np.arange(seq.size) - (np.cumsum(counts) - counts)[seq]
    return Chunks(seq, query_starts[seq] + ordinal * tokens_per_item)


def prefill_attention(
    q: npt.NDArray[Any],
    k_cache: npt.NDArray[Any],
    v_cache: npt.NDArray[Any],
    block_tables: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    query_starts: npt.NDArray[np.int32],
    out: npt.NDArray[Any],
    lse: npt.NDArray[np.float32] | None,
    spec: CacheSpec,
    k_scale: npt.NDArray[np.float32],
    v_scale: npt.NDArray[np.float32],
    options: AttentionOptions,
) -> None:
    """Fill the rows of `out` (num_tokens, num_heads, head_dim) and `lse` up to query_starts[-1]; all is checked."""
    kernel = _make_kernel(tile_config(spec), options.score_mod)
    num_tokens, num_heads = int(query_starts[-1]), q.shape[1]
    group_size = num_heads // spec.num_kv_heads
    starts = query_starts.astype(np.int64)
    tokens_per_item = max(1, ROWS // group_size)
    chunks = plan_chunks(starts, tokens_per_item)
    factor = (options.scale * k_scale).repeat(group_size)
    result = np.empty((num_tokens, *q.shape[1:]), np.float32)
    lse_result = np.empty((num_tokens, num_heads), np.float32)
    logits = int((np.diff(starts) * seq_lens).sum()) * num_heads
    run(
        kernel,
        chunks.seq.size * spec.num_kv_heads,
        (
            q[:num_tokens].astype(np.float32) * factor[:, None],
            np.ascontiguousarray(block_tables),
            np.ascontiguousarray(seq_lens),
            starts,
            chunks,
            tokens_per_item,
            k_cache.ctypes.data,
            v_cache.ctypes.data,
            cache_strides(k_cache, spec.layout, values=False),
            cache_strides(v_cache, spec.layout, values=True),
            spec.block_size,
            options.causal,
            NO_WINDOW if options.window is None else options.window,
            np.float32(options.softcap or 0),
            NO_HEADS if options.alibi_slopes is None else np.ascontiguousarray(options.alibi_slopes),
            NO_HEADS if options.sinks is None else np.ascontiguousarray(options.sinks),
            np.ascontiguousarray(v_scale),
            result,
            lse_result,
        ),
        parallel=logits >= PARALLEL_LOGITS,
    )
    out[:num_tokens] = result
    if lse is not None:
        lse[:num_tokens] = lse_result
