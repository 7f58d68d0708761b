"""Decode attention on the CPU: flash-decoding over fixed splits of SPLIT tokens.

Work item: one split of one sequence for a few neighbouring KV heads, with an online softmax over the tiles of a split
(Milakov and Gimelshein, 2018). A step takes STEP tokens of one KV head with all G query heads of its group, so each row
is read from memory once. The steps of a tile go through its rows in memory order, first keys, then values, and prefetch
the rows of a later step. The last item of a (sequence, heads) group to finish merges its splits in order
(flash-decoding, Dao et al., 2023). Splits and tiles start at multiples of SPLIT and TILE tokens of the sequence, or
where its window does, so the order of every sum depends on the sequence's length and the window alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float32, int64, njit, types

from ..arrays import Array
from ..calls import AttentionCall
from ..commit import commit, result_writes
from ..compiling.compile_thread import made_once
from .arguments import FIRST_TYPES, make_arguments
from .compile import compile_kernel, inlined
from .flash import STEP, make_steps, make_walk, merge
from .scratch import NOTHING, copy_floats, scratch_at, scratch_memory, start_row
from .simd import ELEMENT_BITS, fetch_add, get_int
from .threads import get_num_threads, run
from .tiles import FLOAT_BYTES, INT_BYTES, TABLE_BYTES, TileConfig, address, cache_strides, make_tiles, tile_config

SPLIT = 512
ITEMS_PER_THREAD = 4
GROUP_BYTES = 32 * 1024
PARALLEL_BYTES = 256 * 1024


class Item(NamedTuple):
    """A work item, for the walk over its split."""

    seq: Any
    table: Any  # the address of the sequence's row of the block table
    num_rows: Any
    first_kv_head: Any
    kv_heads: Any
    group_size: Any
    head_dim: Any
    token_major: Any  # whether the heads of a token lie side by side, rather than the tokens of a head
    prefetches: Any  # whether a step prefetches the rows of a later one


@njit(nogil=True)
def _step_at(step, heads, count, token_major):
    """The first token and the head of a step of a tile; steps follow the order of the rows in memory."""
    if token_major:
        return step // heads * STEP, step % heads
    steps = -(-count // STEP)
    return step % steps * STEP, step // steps


@njit(nogil=True)
def _ahead_of(t, h, rows, strides, next_rows, next_strides, heads, first_head, count, token_major):
    """The address from which the step at token t and head h prefetches; 0 for none.

    Each step prefetches its share of the group that follows: the next STEP tokens of all heads (token_major), or all
    tokens of the next head. After the last group come `next_rows`, or nothing if that is 0.
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


def _make_sweep(stage: Any, take_step: Any) -> Callable[..., Any]:
    """The device function that takes all steps of a tile of keys or of values, staged unless `stage` is None."""

    @inlined
    def sweep(scratch, item, count, rows, strides, next_rows, next_strides):
        first_kv_head, heads, group_size, head_dim = item.first_kv_head, item.kv_heads, item.group_size, item.head_dim
        ahead = np.int64(0)
        for step in range(-(-count // STEP) * heads):
            t, h = _step_at(step, heads, count, item.token_major)
            if stage is None:
                at, offset = rows, (first_kv_head + h) * strides[1]
            else:
                at, offset = scratch.staged_rows, np.int64(0)
                if t == 0:
                    stage(scratch.tile, rows, first_kv_head + h, strides, head_dim, count, rows, strides)
            if item.prefetches:
                ahead = _ahead_of(
                    t, h, rows, strides, next_rows, next_strides, heads, first_kv_head, count, item.token_major
                )
            begin, taken = h * group_size, min(STEP, count - t)
            take_step(scratch, begin, begin + group_size, t, at, offset, head_dim, taken, ahead)

    return sweep


@made_once(most=64)
def _make_kernel(config: TileConfig, score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """The decode kernel of one TileConfig and score_mod."""
    stage_keys, stage_values = make_tiles(config) if config.vllm else (None, None)
    dots, weigh, add_values = make_steps("float32" if config.vllm else config.kind, config.lanes, score_mod)
    score = _make_sweep(stage_keys, dots)
    add = _make_sweep(stage_values, add_values)
    walk = make_walk(score, weigh, add)

    def decode(
        counter,
        num_items,
        q,
        tables,
        seq_lens,
        caches,
        options,
        sinks,
        v_scale,
        splits,
        heads_per_item,
        token_major,
        in_order,
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
        row = head_dim * FLOAT_BYTES
        memory = scratch_memory(heads_per_item * group_size, head_dim)
        scratch = scratch_at(address(memory), heads_per_item * group_size, head_dim)

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
            start = max(begin, length - options.window)
            table = address(tables) + seq * tables.shape[1] * TABLE_BYTES
            query = address(q) + (seq * num_heads + first_head) * row
            for r in range(num_rows):
                start_row(scratch, r, length - 1, first_head + r, query + r * row, head_dim)

            prefetches = in_order and (not token_major or kv_heads == num_kv_heads or kv_heads % STEP == 0)
            heads = Item(seq, table, num_rows, first_kv_head, kv_heads, group_size, head_dim, token_major, prefetches)
            walk(scratch, heads, caches, options, start, stop)

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
        # numba frees an array after its last use, and does not see that addresses are in use.
        return memory.size

    return compile_kernel(decode, SIGNATURE, (config, score_mod), keep=score_mod is None)


class Splits(NamedTuple):
    """The splits of all sequences, in order."""

    seq: npt.NDArray[np.int64]  # (splits,) the sequence of each
    begin: npt.NDArray[np.int64]  # (splits,) its first token
    first: npt.NDArray[np.int64]  # (num_seqs + 1,) the first split of each sequence


SIGNATURE = (
    *FIRST_TYPES,
    types.NamedUniTuple(int64[::1], 3, Splits),
    *(int64, boolean, boolean),
    *(float32[:, :, ::1], float32[:, ::1], float32[:, ::1], int64[:, ::1]),
    *(float32[:, :, ::1], float32[:, ::1]),
)


def plan_splits(seq_lens: npt.NDArray[np.int32], window: int | None) -> Splits:
    """Cut every sequence at the multiples of SPLIT tokens, without the splits that the window has passed."""
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
    spec, seq_lens, options = call.spec, call.seq_lens, call.options
    num_seqs, num_heads, head_dim = call.q.shape
    kernel = _make_kernel(tile_config(spec), options.score_mod)
    splits = plan_splits(seq_lens, options.window)
    arguments, owners = make_arguments(call, call.q)
    strides = cache_strides(call.k_cache, spec.layout), cache_strides(call.v_cache, spec.layout)

    row_bytes = head_dim * ELEMENT_BITS[spec.kind] // 8
    in_l1 = max(1, GROUP_BYTES // (STEP * row_bytes))
    busy = -(-ITEMS_PER_THREAD * get_num_threads() // max(1, splits.seq.size))
    heads_per_item = max(1, min(in_l1, spec.num_kv_heads // busy))
    groups = -(-spec.num_kv_heads // heads_per_item)
    token_major = strides[0].token > strides[0].head
    # A step prefetches one run of bytes, so rows must follow each other without gaps.
    in_order = spec.layout != "vllm" and all(min(s.head, s.token) == row_bytes for s in strides)
    total_bytes = 2 * row_bytes * spec.num_kv_heads * int(seq_lens.sum(dtype=np.int64))

    result = np.zeros(call.q.shape, np.float32)
    lse_result = np.full((num_seqs, num_heads), -np.inf, np.float32)
    run(
        kernel,
        splits.seq.size * groups,
        (
            *arguments,
            splits,
            heads_per_item,
            token_major,
            in_order,
            np.empty((splits.seq.size, num_heads, head_dim), np.float32),
            np.empty((splits.seq.size, num_heads), np.float32),
            np.empty((splits.seq.size, num_heads), np.float32),
            np.zeros((num_seqs, groups), np.int64),
            result,
            lse_result,
        ),
        owners=owners,
        parallel=total_bytes >= PARALLEL_BYTES,
    )
    commit(result_writes(out, result, lse, lse_result))
