"""Decode attention on the CPU: flash-decoding over fixed splits of SPLIT tokens.

Work item: one split of one sequence for a few neighbouring KV heads, with an online softmax over the tiles of a split
(Milakov and Gimelshein, 2018). A step takes STEP tokens of one KV head with all G query heads of its group, so a row
comes from memory once; the steps of a tile follow the order in which its rows lie, keys and then values, and ask for
the rows of a later step meanwhile. The last item of a (sequence, heads) group to finish merges its splits in their
order (flash-decoding, Dao et al., 2023). Splits and tiles start at multiples of SPLIT and TILE tokens of the sequence,
or where its window does, so the order of every sum depends on the sequence's length and the window alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from ..arrays import Array
from ..calls import AttentionCall, per_head
from .compile import compile_kernel
from .flash import (
    NOTHING,
    STEP,
    ZERO,
    copy_floats,
    make_steps,
    merge,
    scratch_at,
    scratch_floats,
    start_row,
)
from .simd import ELEMENT_BITS, fetch_add, get_int
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
    tile_config,
    tile_rows,
    token_rows,
)

SPLIT = 512
ITEMS_PER_THREAD = 4
GROUP_BYTES = 32 * 1024
PARALLEL_BYTES = 256 * 1024


@njit(nogil=True)
def _step_at(step, heads, count, token_major):
    """The first token and the head of a step of a tile: in the order in which the rows lie."""
    if token_major:
        return step // heads * STEP, step % heads
    steps = -(-count // STEP)
    return step % steps * STEP, step // steps


@njit(nogil=True)
def _ahead_of(t, h, rows, strides, next_rows, next_strides, heads, first_head, count, token_major):
    """Where the bytes lie to ask for in the step at token t and head h; 0 if there are none.

    They are an equal part of the group that follows: the next STEP tokens of all heads (token_major), or all tokens of
    the next head. After the last group come `next_rows`, or nothing where that is 0.
    """
    last = t + STEP >= count if token_major else h + 1 == heads
    if last and next_rows == 0:
        return np.int64(0)
    if last:
        rows, strides = next_rows, next_strides
    if token_major:
        first = 0 if last else t + STEP
        token, head = first + h * STEP // heads, h * STEP % heads
    else:
        token, head = t, 0 if last else h + 1
    return get_int(rows + token * INT_BYTES) + (first_head + head) * strides[1]


@lru_cache(maxsize=64)
def _make_kernel(config: TileConfig, score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """The decode kernel of one TileConfig and score_mod."""
    stage_keys, stage_values = make_tiles(config)
    staged = config.vllm
    kind = "float32" if staged else config.kind
    dots, weigh, add_values = make_steps(kind, config.lanes, score_mod)

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
        token_major,
        in_order,
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

        floats = aligned(scratch_floats(most_rows, head_dim))
        ints = np.zeros(2 * most_rows, np.int64)
        addresses = np.zeros((4, TILE), np.int64)
        scratch = scratch_at(address(floats), address(ints), most_rows, head_dim)
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
            next_k, staged_rows = v_rows + ROWS_BYTES, v_rows + 2 * ROWS_BYTES
            tile_rows(staged_rows, scratch.tile, head_dim)
            asks = in_order and (not token_major or kv_heads == num_kv_heads or kv_heads % STEP == 0)
            count = min(TILE, stop - start)
            token_rows(next_k, k_base, k_strides, table, block_size, start, count)
            while start < stop:
                k_rows, next_k = next_k, k_rows
                token_rows(v_rows, v_base, v_strides, table, block_size, start, count)
                next_start = start + count
                next_count = max(0, min(TILE, stop - next_start))
                later_k = next_k if next_count > 0 else np.int64(0)
                token_rows(next_k, k_base, k_strides, table, block_size, next_start, next_count)
                steps, ahead = -(-count // STEP) * kv_heads, np.int64(0)
                for step in range(steps):
                    t, h = _step_at(step, kv_heads, count, token_major)
                    rows, head, offset = k_rows, first_kv_head + h, (first_kv_head + h) * k_strides[1]
                    if staged:
                        rows, offset = staged_rows, 0
                        if t == 0:
                            stage_keys(scratch.tile, k_rows, head, k_strides, head_dim, count, k_rows, k_strides)
                    if asks:
                        ahead = _ahead_of(
                            t, h, k_rows, k_strides, v_rows, v_strides, kv_heads, first_kv_head, count, token_major
                        )
                    dots(scratch, h * group_size, (h + 1) * group_size, t, rows, offset, head_dim, ahead)
                for r in range(num_rows):
                    weigh(scratch, r, start, count, False, window, softcap, slopes_at, seq)
                for step in range(steps):
                    t, h = _step_at(step, kv_heads, count, token_major)
                    rows, head, offset = v_rows, first_kv_head + h, (first_kv_head + h) * v_strides[1]
                    if staged:
                        rows, offset = staged_rows, 0
                        if t == 0:
                            stage_values(scratch.tile, v_rows, head, v_strides, head_dim, count, v_rows, v_strides)
                    if asks:
                        ahead = _ahead_of(
                            t, h, v_rows, v_strides, later_k, k_strides, kv_heads, first_kv_head, count, token_major
                        )
                    taken = min(STEP, count - t)
                    add_values(scratch, h * group_size, (h + 1) * group_size, t, rows, offset, head_dim, taken, ahead)
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


def decode_attention(call: AttentionCall, out: Array, lse: Array | None) -> None:
    """Fill `out` (num_seqs, num_heads, head_dim) and `lse` (num_seqs, num_heads)."""
    q, k_cache, v_cache, block_tables = call.q, call.k_cache, call.v_cache, call.block_tables
    seq_lens, spec, options = call.seq_lens, call.spec, call.options
    k_scale, v_scale = per_head(call.k_scale, spec.num_kv_heads), per_head(call.v_scale, spec.num_kv_heads)
    num_seqs, num_heads, head_dim = q.shape
    kernel = _make_kernel(tile_config(spec), options.score_mod)
    splits = plan_splits(seq_lens, options.window)
    k_strides = cache_strides(k_cache, spec.layout)
    v_strides = cache_strides(v_cache, spec.layout)
    factor = (options.scale * k_scale).repeat(num_heads // spec.num_kv_heads)
    queries = q.astype(np.float32, order="C") * factor[:, None]

    row_bytes = head_dim * ELEMENT_BITS[spec.kind] // 8
    in_l1 = max(1, GROUP_BYTES // (STEP * row_bytes))
    busy = -(-ITEMS_PER_THREAD * get_num_threads() // max(1, splits.seq.size))
    heads_per_item = max(1, min(in_l1, spec.num_kv_heads // busy))
    groups = -(-spec.num_kv_heads // heads_per_item)
    token_major = k_strides.token > k_strides.head
    # What a step asks for is one run of bytes, so rows must follow each other without gaps.
    in_order = spec.layout != "vllm" and all(min(s.head, s.token) == row_bytes for s in (k_strides, v_strides))
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
            token_major,
            in_order,
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
