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

from ..arrays import Array
from ..calls import AttentionCall, per_head
from .compile import compile_kernel
from .flash import NOTHING, STEP, ZERO, make_steps, merge, scratch_at, scratch_floats, start_row
from .simd import fetch_add
from .threads import run
from .tiles import (
    FLOAT_BYTES,
    NO_WINDOW,
    ROWS_BYTES,
    TABLE_BYTES,
    TILE,
    TileConfig,
    address,
    aligned,
    cache_strides,
    make_tiles,
    plain,
    tile_config,
    tile_rows,
    token_rows,
)

ROWS = 64
ROWS_AT_ONCE = 4
PARALLEL_LOGITS = 4096


@lru_cache(maxsize=64)
def _make_kernel(config: TileConfig, score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """The prefill kernel of one TileConfig and score_mod."""
    stage_keys, stage_values = make_tiles(config)
    dots, weigh, add_values = make_steps("float32", config.lanes, score_mod)

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
        row = head_dim * FLOAT_BYTES

        floats = aligned(scratch_floats(most_rows, head_dim))
        ints = np.zeros(2 * most_rows, np.int64)
        addresses = np.zeros((4, TILE), np.int64)
        scratch = scratch_at(address(floats), address(ints), most_rows, head_dim)
        staged_rows = address(addresses) + 3 * ROWS_BYTES
        tile_rows(staged_rows, scratch.tile, head_dim)
        floats[:] = ZERO
        slopes_at = address(slopes) if slopes.size else np.int64(0)

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

            stop = min(length, first_position + num_tokens) if causal else length
            start = max(np.int64(0), first_position - window + 1) // TILE * TILE
            k_rows, v_rows = address(addresses), address(addresses) + ROWS_BYTES
            next_k = v_rows + ROWS_BYTES
            count = min(TILE, stop - start)
            token_rows(next_k, k_base, k_strides, table, block_size, start, count)
            while start < stop:
                k_rows, next_k = next_k, k_rows
                token_rows(v_rows, v_base, v_strides, table, block_size, start, count)
                next_start = start + count
                next_count = max(0, min(TILE, stop - next_start))
                token_rows(next_k, k_base, k_strides, table, block_size, next_start, next_count)
                stage_keys(scratch.tile, k_rows, kv_head, k_strides, head_dim, count, v_rows, v_strides)
                for r in range(0, num_rows, ROWS_AT_ONCE):
                    end = min(r + ROWS_AT_ONCE, num_rows)
                    for t in range(0, count, STEP):
                        dots(scratch, r, end, t, staged_rows, 0, head_dim, 0)
                for r in range(num_rows):
                    weigh(scratch, r, start, count, causal, window, softcap, slopes_at, seq)
                later = next_k if next_count > 0 else v_rows
                stage_values(scratch.tile, v_rows, kv_head, v_strides, head_dim, count, later, k_strides)
                add_values(scratch, 0, num_rows, 0, staged_rows, 0, head_dim, count, 0)
                start, count = next_start, next_count

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
        # numba frees an array after its last use, and the addresses are none.
        return floats.size + ints.size + addresses.size

    return compile_kernel(prefill, (config, score_mod), keep=score_mod is None)


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


def prefill_attention(call: AttentionCall, out: Array, lse: Array | None) -> None:
    """Fill the rows of `out` (num_tokens, num_heads, head_dim) and `lse` up to query_starts[-1]."""
    q, k_cache, v_cache, block_tables = call.q, call.k_cache, call.v_cache, call.block_tables
    seq_lens, query_starts, spec, options = call.seq_lens, call.query_starts, call.spec, call.options
    k_scale, v_scale = per_head(call.k_scale, spec.num_kv_heads), per_head(call.v_scale, spec.num_kv_heads)
    assert query_starts is not None
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
            q[:num_tokens].astype(np.float32, order="C") * factor[:, None],
            plain(block_tables),
            plain(seq_lens),
            starts,
            chunks,
            tokens_per_item,
            k_cache.ctypes.data,
            v_cache.ctypes.data,
            cache_strides(k_cache, spec.layout),
            cache_strides(v_cache, spec.layout),
            spec.block_size,
            options.causal,
            NO_WINDOW if options.window is None else options.window,
            np.float32(options.softcap or 0),
            plain(options.alibi_slopes),
            plain(options.sinks),
            plain(v_scale),
            result,
            lse_result,
        ),
        owners=(k_cache, v_cache),
        parallel=logits >= PARALLEL_LOGITS,
    )
    out[:num_tokens] = result
    if lse is not None:
        lse[:num_tokens] = lse_result
