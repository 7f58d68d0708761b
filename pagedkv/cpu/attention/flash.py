"""The steps of flash attention that decode and prefill share: one tile of keys against a few query rows.

A query row is one query head of one token. Its state is a running maximum, a running sum and a float32 accumulator
(online softmax: Milakov and Gimelshein, 2018). A new state begins with every split of SPLIT tokens, and states are
merged in token order, both in decode, which computes splits side by side, and in prefill, which computes them one after
the other. Rows share no sums, so the bits of a row depend on its own keys alone, and not on how it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..compile import device, helper, inlined
from .access import get_byte, get_float, get_int, get_int32, put_float
from .logits import make_modify
from .scratch import NOTHING, ONE, ZERO, start_states
from .steps.code import FLOAT_BYTES, INT_BYTES, STEP, TILE, VALUE_STEP
from .steps.softmax import make_merge_state, make_rescale, make_softmax
from .steps.step_order import TilePass
from .steps.tile_pass import PassConfig, groups_at_once, make_add_values, make_score_keys
from .steps.widen import widened_kind
from .tiles import SCORES, TileConfig, gather_scales, make_stages, prefetch_scales, put_row_addresses

SPLIT = 512  # tokens; a multiple of TILE

_merge_state, _rescale = make_merge_state(), make_rescale()


class WorkItem(NamedTuple):
    """A work item: the query rows of neighbouring KV heads of a sequence."""

    seq: Any
    table: Any  # the address of the sequence's row of the block table
    first: Any  # the first position that a row sees
    first_kv_head: Any
    kv_heads: Any
    head_rows: Any  # query rows of a KV head, whole groups
    head_dim: Any
    places: Any  # the address of the places of dims
    token_major: Any  # whether the heads of a token lie side by side, rather than the tokens of a head


def make_walk(config: TileConfig, score_mod: Callable[..., Any] | None, *, merges: bool) -> Callable[..., Any]:
    """The device function that attends a work item's query rows to the tokens start .. stop of its sequence.

    `start` is the first token of a tile. For each tile it computes logits from the keys, weights from the logits, then
    the weighted sum of the values. If it `merges`, it merges states into the running ones at the end of each split.
    """
    make_weigh = _make_weigh if score_mod else _weigh_without_score_mod
    weigh = make_weigh(config.group_rows, score_mod, config.scaled)
    return _staged_walk(config, weigh, merges) if config.staged else _walk_in_place(config, weigh)


def _walk_in_place(config: TileConfig, weigh: Callable[..., Any]) -> Callable[..., Any]:
    """The walk that reads rows where they lie in the caches, for several KV heads; it never merges."""
    R, scaled = config.group_rows, config.scaled
    pass_config = PassConfig(config.kind, R, config.whole, staged=False)
    score_keys, add_values = make_score_keys(pass_config), make_add_values(pass_config)
    step_tokens = VALUE_STEP if scaled else STEP

    @inlined
    def walk(scratch, item, inputs, options, start, stop):
        k_rows, next_k, v_rows = scratch.k_rows, scratch.next_k_rows, scratch.v_rows
        k_strides, v_strides, block_size, table = inputs.k_strides, inputs.v_strides, inputs.block_size, item.table
        heads, head_dim = item.kv_heads, item.head_dim
        run_steps = 1 if item.token_major else max(block_size // step_tokens, 1)
        groups = item.head_rows // R
        k_offset, v_offset = item.first_kv_head * k_strides[1], item.first_kv_head * v_strides[1]
        if start < stop:
            put_row_addresses(next_k, inputs.k, k_strides, table, block_size, start, max(start, item.first), stop)
        while start < stop:
            k_rows, next_k = next_k, k_rows
            put_row_addresses(v_rows, inputs.v, v_strides, table, block_size, start, max(start, item.first), stop)
            count, after = min(TILE, stop - start), start + TILE
            if scaled:
                put_key_scales(scratch, item, inputs, start, stop)
            keys = TilePass(
                rows=k_rows, offset=k_offset, head_stride=k_strides[1],
                next_rows=v_rows, next_offset=v_offset, next_head_stride=v_strides[1],
                count=count, num_heads=heads, num_groups=groups, head_dim=head_dim, run_steps=run_steps,
                tile=scratch.tile, tile_rows=scratch.tile_rows,
                key_factors=scratch.k_scales, row_factors=scratch.row_factors,
            )  # fmt: skip
            score_keys(scratch.scores, scratch.queries, keys)
            if scaled:
                put_value_scales(scratch, item, inputs, start, stop)
            weigh(scratch, 0, heads * item.head_rows, item.head_rows, start, count, options, item.seq)
            later, later_offset, later_stride = v_rows, v_offset, v_strides[1]
            if after < stop:
                put_row_addresses(next_k, inputs.k, k_strides, table, block_size, after, after, stop)
                later, later_offset, later_stride = next_k, k_offset, k_strides[1]
            values = TilePass(
                rows=v_rows, offset=v_offset, head_stride=v_strides[1],
                next_rows=later, next_offset=later_offset, next_head_stride=later_stride,
                count=count, num_heads=heads, num_groups=groups, head_dim=head_dim, run_steps=run_steps,
                tile=scratch.v_tile, tile_rows=scratch.v_tile_rows,
                key_factors=0, row_factors=0,
            )  # fmt: skip
            add_values(scratch.acc, scratch.scores, values)
            start = after

    return walk


def _staged_walk(config: TileConfig, weigh: Callable[..., Any], merges: bool) -> Callable[..., Any]:
    """The walk that widens rows into a tile first, for one KV head.

    After each few groups of query rows have taken a tile's keys, it stages a share of the tile's values, and after they
    have taken the values, a share of the next tile's keys: all of them at once would fill the processor's miss buffers.
    It skips groups that see nothing of a tile, and tokens behind the last one that a group sees.
    """
    R, scaled = config.group_rows, config.scaled
    pass_config = PassConfig(widened_kind(config.kind), R, whole=True, staged=True)
    score_keys, add_values = make_score_keys(pass_config), make_add_values(pass_config)
    at_once = groups_at_once(pass_config)
    stage_keys, stage_values = make_stages(config)

    @inlined
    def walk(scratch, item, inputs, options, start, stop):
        rows, k_strides, v_strides = scratch.k_rows, inputs.k_strides, inputs.v_strides
        block_size, table, head_dim, places = inputs.block_size, item.table, item.head_dim, item.places
        tile, v_tile, row_bytes = scratch.tile, scratch.v_tile, scratch.row_bytes
        k_offset, v_offset = item.first_kv_head * k_strides[1], item.first_kv_head * v_strides[1]
        if start < stop:
            put_row_addresses(rows, inputs.k, k_strides, table, block_size, start, max(start, item.first), stop)
            count = min(TILE, stop - start)
            stage_keys(tile, row_bytes, rows, k_offset, k_strides[3], head_dim, 0, count, places)
        while start < stop:
            count, after = min(TILE, stop - start), start + TILE
            if scaled:
                put_key_scales(scratch, item, inputs, start, stop)
            begin, end = seen_groups(scratch, item.head_rows // R, R, start)
            turns = (end - begin + at_once - 1) // at_once
            share = (TILE // STEP + turns - 1) // turns * STEP
            put_row_addresses(rows, inputs.v, v_strides, table, block_size, start, max(start, item.first), stop)
            for turn in range(turns):
                first, until = turn * share, min(turn * share + share, count)
                row, groups = (begin + turn * at_once) * R, min(at_once, end - begin - turn * at_once)
                seen = seen_tokens(scratch, row + groups * R - 1, start, count)
                row_factors = scratch.row_factors + row * FLOAT_BYTES
                keys = staged_pass(scratch.tile_rows, seen, groups, head_dim, scratch.k_scales, row_factors)
                score_keys(scratch.scores + row * SCORES, scratch.queries + row * row_bytes, keys)
                stage_values(v_tile, row_bytes, rows, v_offset, v_strides[3], head_dim, first, until, places)
            if scaled:
                put_value_scales(scratch, item, inputs, start, stop)
            weigh(scratch, begin * R, end * R, item.head_rows, start, count, options, item.seq)
            left = max(np.int64(0), min(TILE, stop - after))
            if left > 0:
                put_row_addresses(rows, inputs.k, k_strides, table, block_size, after, after, stop)
            for turn in range(turns):
                first, until = turn * share, min(turn * share + share, left)
                row, groups = (begin + turn * at_once) * R, min(at_once, end - begin - turn * at_once)
                seen = seen_tokens(scratch, row + groups * R - 1, start, count)
                values = staged_pass(scratch.v_tile_rows, seen, groups, head_dim, 0, 0)
                add_values(scratch.acc + row * row_bytes, scratch.scores + row * SCORES, values)
                stage_keys(tile, row_bytes, rows, k_offset, k_strides[3], head_dim, first, until, places)
            if merges and (after >= stop or after % SPLIT == 0):
                merge_all_states(scratch, item.head_rows)
            start = after

    return walk


@helper
def put_key_scales(scratch, item, inputs, start, stop):
    """Gather the scales of the keys of the tile at `start`, up to `stop`, and prefetch those of its values."""
    first, after = max(start, item.first), min(start + TILE, stop)
    heads = item.first_kv_head, item.kv_heads
    gather_scales(
        scratch.k_scales,
        inputs.k_scales,
        inputs.k_scale_strides,
        item.table,
        inputs.block_size,
        start,
        first,
        after,
        *heads,
    )
    prefetch_scales(inputs.v_scales, inputs.v_scale_strides, item.table, inputs.block_size, first, after, *heads)


@helper
def put_value_scales(scratch, item, inputs, start, stop):
    """Gather the scales of the values of the tile at `start`, up to `stop`, and prefetch those of the next keys."""
    first, after = max(start, item.first), min(start + TILE, stop)
    heads = item.first_kv_head, item.kv_heads
    gather_scales(
        scratch.v_scales,
        inputs.v_scales,
        inputs.v_scale_strides,
        item.table,
        inputs.block_size,
        start,
        first,
        after,
        *heads,
    )
    until = min(after + TILE, stop)
    prefetch_scales(inputs.k_scales, inputs.k_scale_strides, item.table, inputs.block_size, after, until, *heads)


@helper
def staged_pass(tile_rows, count, num_groups, head_dim, key_factors, row_factors):
    """A pass over the first `count` rows of a staged tile: those of one head, with nothing to prefetch or to widen."""
    return TilePass(
        rows=tile_rows, offset=0, head_stride=0,
        next_rows=0, next_offset=0, next_head_stride=0,
        count=count, num_heads=1, num_groups=num_groups, head_dim=head_dim, run_steps=1,
        tile=0, tile_rows=0, key_factors=key_factors, row_factors=row_factors,
    )  # fmt: skip


@helper
def seen_groups(scratch, groups, R, start):
    """The first group that sees anything of the tile at `start`, and the one after the last; at least one group."""
    begin, end = np.int64(0), groups
    while begin < end - 1 and get_int32(scratch.stops + ((begin + 1) * R - 1) * FLOAT_BYTES) <= start:
        begin += 1
    while begin < end - 1 and get_int32(scratch.starts + (end - 1) * R * FLOAT_BYTES) >= start + TILE:
        end -= 1
    return begin, end


@helper
def seen_tokens(scratch, row, start, count):
    """How many of the first `count` tokens of the tile at `start` come before the end of what a row sees."""
    return min(count, get_int32(scratch.stops + row * FLOAT_BYTES) - start)


@helper
def hide(scores, stride, count, scratch, row, first, options):
    """Make the logits of a row -inf whose keys, at positions first, first + 1, ..., the mask hides."""
    shift, key = options.mask_shift, get_int(scratch.mask + row * INT_BYTES) + first
    for t in range(count):
        byte = np.int64(get_byte(options.mask + (key + t >> shift)))
        if byte >> (key + t & (1 << shift) - 1) & 1 == 0:
            put_float(scores + t * stride, NOTHING)


def _make_weigh(R: int, score_mod: Callable[..., Any] | None, scaled: bool) -> Callable[..., Any]:
    """The device function that turns the logits of some rows with a tile into weights, and rescales their sums.

    The tile has `count` keys, the first one at position `first`, and KV heads have `head_rows` rows each.
    """
    modify, modified = make_modify(score_mod), score_mod is not None
    softmax, masked_softmax = (make_softmax(R, masked=masked, rounded=scaled) for masked in (False, True))

    @device((R, score_mod, scaled))
    def weigh(scratch, begin, end, head_rows, first, count, options, seq):
        softcap, slopes = options.softcap, options.slopes
        if modified or softcap != ZERO or slopes != 0:
            for r in range(begin, end):
                scores = scratch.scores + r // R * R * SCORES + r % R * FLOAT_BYTES
                position, head = get_int(scratch.position + r * INT_BYTES), get_int(scratch.head + r * INT_BYTES)
                slope = ZERO
                if slopes != 0:
                    slope = get_float(slopes + (seq * options.slopes_stride + head) * FLOAT_BYTES)
                seen = seen_tokens(scratch, r, first, count)
                modify(scores, R * FLOAT_BYTES, seen, first, position, softcap, slope, head, seq)
        if options.mask != 0:
            for r in range(begin, end):
                scores = scratch.scores + r // R * R * SCORES + r % R * FLOAT_BYTES
                hide(scores, R * FLOAT_BYTES, seen_tokens(scratch, r, first, count), scratch, r, first, options)
        for r in range(begin, end, R):
            masked = False
            for row in range(r, r + R):
                start, stop = (
                    get_int32(scratch.starts + row * FLOAT_BYTES),
                    get_int32(scratch.stops + row * FLOAT_BYTES),
                )
                masked |= first < start or first + TILE > stop
            scores, state = scratch.scores + r * SCORES, r * FLOAT_BYTES
            maximum, total, factor = scratch.maximum + state, scratch.sum + state, scratch.rescale + state
            starts, stops = scratch.starts + state, scratch.stops + state
            v_scales = scratch.v_scales + r // head_rows * SCORES
            if masked:
                masked_softmax(scores, maximum, total, factor, starts, stops, first, v_scales)
            else:
                softmax(scores, maximum, total, factor, starts, stops, first, v_scales)
            for row in range(r, r + R):
                factor, acc = scratch.rescale + row * FLOAT_BYTES, scratch.acc + row * scratch.row_bytes
                if get_float(factor) != ONE:
                    _rescale(acc, acc, factor, scratch.num_vectors)

    return weigh


# The one that all kernels without a score_mod share, so that numba compiles it once for a process.
_weigh_without_score_mod = lru_cache(maxsize=4)(_make_weigh)


@helper
def merge_state(scratch, row, acc, maximum, total):
    """Merge the state at three addresses into the running one of a row, unless it has seen no key."""
    if get_float(maximum) > NOTHING or get_float(total) != ZERO:
        state = row * FLOAT_BYTES
        running = scratch.running + row * scratch.row_bytes
        _merge_state(
            running,
            scratch.running_maximum + state,
            scratch.running_sum + state,
            acc,
            maximum,
            total,
            scratch.num_vectors,
        )


@helper
def merge_all_states(scratch, num_rows):
    """Merge the states of all rows into the running ones, and begin new ones."""
    for r in range(num_rows):
        state = r * FLOAT_BYTES
        merge_state(scratch, r, scratch.acc + r * scratch.row_bytes, scratch.maximum + state, scratch.sum + state)
    start_states(scratch, num_rows)
