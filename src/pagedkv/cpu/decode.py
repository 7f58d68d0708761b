"""Decode attention on the CPU: flash-decoding over fixed splits of SPLIT tokens.

Work item: one split of one sequence for a few neighbouring KV heads. Each KV head's rows are read once, into a tile of
float32 that all G query heads of the group share, with an online softmax over the tiles of a split (Milakov and
Gimelshein, 2018). The last item of a (sequence, heads) group to finish merges its splits in their order
(flash-decoding, Dao et al., 2023). Splits and tiles start at multiples of SPLIT and TILE tokens of the sequence, or
where its window does, so the order of every sum depends on the sequence's length and the window alone.
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
from .flash import (
    NOTHING,
    ZERO,
    copy_floats,
    make_steps,
    merge,
    scratch_at,
    scratch_floats,
    scratch_ints,
    start_row,
)
from .simd import ELEMENT_BITS, fetch_add
from .threads import get_num_threads, run
from .tiles import (
    FLOAT_BYTES,
    INT_BYTES,
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
    plan_ahead,
    tile_config,
    token_rows,
)

SPLIT = 512
ITEMS_PER_THREAD = 4
TILE_BYTES_IN_L2 = 256 * 1024
PARALLEL_BYTES = 256 * 1024


@lru_cache(maxsize=64)
def _make_kernel(config: TileConfig, score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """The decode kernel of one TileConfig and score_mod."""
    stage_keys, stage_values = make_tiles(config)
    attend_keys, attend_values = make_steps(config, score_mod)
    item_bytes = 0 if config.vllm else ELEMENT_BITS[config.kind] // 8

    def decode(
        counter,
        num_items,
        q,
        tables,
        seq_lens,
        splits,
        k_base,
        v_base,
        k_strides,
        v_strides,
        heads_per_item,
        block_size,
        window,
        softcap,
        slopes,
        sinks,
        v_scale,
        partial_out,
        maxima,
        sums,
        finished,
        out,
        lse,
    ):
        num_heads, head_dim = q.shape[1], q.shape[2]
        num_kv_heads = v_scale.size
        group_size = num_heads // num_kv_heads
        groups = finished.shape[1]
        most_rows = heads_per_item * group_size
        row = head_dim * FLOAT_BYTES

        floats = aligned(scratch_floats(most_rows, group_size, head_dim))
        ints = np.zeros(scratch_ints(most_rows, heads_per_item), np.int64)
        addresses = np.zeros((4, TILE), np.int64)
        scratch = scratch_at(
            address(floats), address(ints), most_rows, group_size, head_dim, heads_per_item, head_dim * item_bytes
        )
        floats[:] = ZERO
        slopes_at = address(slopes) if slopes.size else np.int64(0)

        while True:
            item = fetch_add(counter)
            if item >= num_items:
                break
            split, group = item // groups, item % groups
            seq, begin = splits.seq[split], splits.begin[split]
            first_kv_head = group * heads_per_item
            kv_heads = min(heads_per_item, num_kv_heads - first_kv_head)
            first_head, num_rows = first_kv_head * group_size, kv_heads * group_size
            length = np.int64(seq_lens[seq])
            stop = min(begin + SPLIT, length)
            start = max(begin, length - window)
            table = address(tables) + seq * tables.shape[1] * TABLE_BYTES
            query = address(q) + (seq * num_heads + first_head) * row
            for r in range(num_rows):
                start_row(scratch, r, length - 1, first_head + r, query + r * row, head_dim)

            k_rows, v_rows = address(addresses), address(addresses) + ROWS_BYTES
            next_k, next_v = v_rows + ROWS_BYTES, v_rows + 2 * ROWS_BYTES
            count = min(TILE, stop - start)
            token_rows(next_k, k_base, k_strides, table, block_size, start, count)
            token_rows(next_v, v_base, v_strides, table, block_size, start, count)
            while start < stop:
                k_rows, next_k = next_k, k_rows
                v_rows, next_v = next_v, v_rows
                next_start = start + count
                next_count = max(0, min(TILE, stop - next_start))
                token_rows(next_k, k_base, k_strides, table, block_size, next_start, next_count)
                token_rows(next_v, v_base, v_strides, table, block_size, next_start, next_count)
                plan_ahead(scratch.ahead, next_k, next_v, k_strides, v_strides, first_kv_head, kv_heads, next_count)
                for h in range(kv_heads):
                    kv_head, first_row, last_row = first_kv_head + h, h * group_size, (h + 1) * group_size
                    stage_keys(scratch.tile, k_rows, kv_head, k_strides, head_dim, count)
                    attend_keys(
                        scratch,
                        first_row,
                        last_row,
                        head_dim,
                        start,
                        count,
                        False,
                        window,
                        softcap,
                        slopes_at,
                        seq,
                    )
                    stage_values(scratch.tile, v_rows, kv_head, v_strides, head_dim, count)
                    attend_values(scratch, first_row, last_row, head_dim, count)
                start, count = next_start, next_count

            mine = split * num_heads + first_head
            copy_floats(address(partial_out) + mine * row, scratch.acc, num_rows * head_dim)
            copy_floats(address(maxima) + mine * FLOAT_BYTES, scratch.maximum, num_rows)
            copy_floats(address(sums) + mine * FLOAT_BYTES, scratch.sum, num_rows)
            first_split = splits.first[seq]
            count = splits.first[seq + 1] - first_split
            if fetch_add(address(finished) + (seq * groups + group) * INT_BYTES) == count - 1:
                for head in range(first_head, first_head + num_rows):
                    state = first_split * num_heads + head
                    lse[seq, head] = merge(
                        address(out) + (seq * num_heads + head) * row,
                        address(partial_out) + state * row,
                        address(maxima) + state * FLOAT_BYTES,
                        address(sums) + state * FLOAT_BYTES,
                        count,
                        num_heads,
                        head_dim,
                        sinks[head] if sinks.size else NOTHING,
                        v_scale[head // group_size],
                    )
        # numba frees an array after its last use, and the addresses are none.
        return floats.size + ints.size + addresses.size

    return compile_kernel(decode, (config, score_mod), keep=score_mod is None)


class Splits(NamedTuple):
    """The splits of all sequences, one after the other."""

    seq: npt.NDArray[np.int64]  # (splits,) the sequence of each
    begin: npt.NDArray[np.int64]  # (splits,) its first token
    first: npt.NDArray[np.int64]  # (num_seqs + 1,) the first split of each sequence


def plan_splits(seq_lens: npt.NDArray[np.int32], window: int | None) -> Splits:
    """Cut every sequence at the multiples of SPLIT tokens; splits that the window has left are not there."""
    lens = seq_lens.astype(np.int64)
    oldest = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0) // SPLIT
    counts = np.maximum(-(-lens // SPLIT) - oldest, 0)
    first = np.zeros(lens.size + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    seq = np.repeat(np.arange(lens.size), counts)
    begin = (np.arange(seq.size) - first[seq] + oldest[seq]) * SPLIT
    return Splits(seq, begin, first)


def decode_attention(
    q: npt.NDArray[Any],
    k_cache: npt.NDArray[Any],
    v_cache: npt.NDArray[Any],
    block_tables: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    out: npt.NDArray[Any],
    lse: npt.NDArray[np.float32] | None,
    spec: CacheSpec,
    k_scale: npt.NDArray[np.float32],
    v_scale: npt.NDArray[np.float32],
    options: AttentionOptions,
) -> None:
    """Fill `out` (num_seqs, num_heads, head_dim) and `lse` (num_seqs, num_heads); everything is checked already."""
    num_seqs, num_heads, head_dim = q.shape
    kernel = _make_kernel(tile_config(spec), options.score_mod)
    splits = plan_splits(seq_lens, options.window)
    k_strides = cache_strides(k_cache, spec.layout)
    v_strides = cache_strides(v_cache, spec.layout)
    factor = (options.scale * k_scale).repeat(num_heads // spec.num_kv_heads)
    queries = q.astype(np.float32, order="C") * factor[:, None]

    row_bytes = head_dim * ELEMENT_BITS[spec.kind] // 8
    in_l2 = max(1, TILE_BYTES_IN_L2 // (2 * TILE * row_bytes))
    busy = -(-ITEMS_PER_THREAD * get_num_threads() // max(1, splits.seq.size))
    heads_per_item = max(1, min(in_l2, spec.num_kv_heads // busy))
    groups = -(-spec.num_kv_heads // heads_per_item)
    total_bytes = 2 * row_bytes * spec.num_kv_heads * int(seq_lens.sum(dtype=np.int64))

    result = np.zeros(q.shape, np.float32)
    lse_result = np.full((num_seqs, num_heads), -np.inf, np.float32)
    run(
        kernel,
        splits.seq.size * groups,
        (
            queries,
            plain(block_tables),
            plain(seq_lens),
            splits,
            k_cache.ctypes.data,
            v_cache.ctypes.data,
            k_strides,
            v_strides,
            heads_per_item,
            spec.block_size,
            NO_WINDOW if options.window is None else options.window,
            np.float32(options.softcap or 0),
            plain(options.alibi_slopes),
            plain(options.sinks),
            plain(v_scale),
            np.empty((splits.seq.size, num_heads, head_dim), np.float32),
            np.empty((splits.seq.size, num_heads), np.float32),
            np.empty((splits.seq.size, num_heads), np.float32),
            np.zeros((num_seqs, groups), np.int64),
            result,
            lse_result,
        ),
        owners=(k_cache, v_cache),
        parallel=total_bytes >= PARALLEL_BYTES,
    )
    out[...] = result
    if lse is not None:
        lse[...] = lse_result
