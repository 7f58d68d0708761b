"""What a thread block hands to the steps of the split kernel, as named tuples; to LLVM they are no more than fields."""

from __future__ import annotations

from typing import Any, NamedTuple


class SplitUnit(NamedTuple):
    """What a thread block computes at a time: one split of a sequence, for the query heads of a tile."""

    column: Any  # of a sequence, KV head and tile, whose splits are merged
    split: Any
    seq: Any
    kv_head: Any
    head: Any  # the number of the first query head


class SplitQuery(NamedTuple):
    """The query heads of a thread block, or of one of its warps, which read the same KV head."""

    address: Any  # the first head's row
    head_stride: Any  # bytes
    num_heads: Any
    head: Any  # the number of the first head


class SplitPages(NamedTuple):
    """The row of block_tables that has the blocks of a sequence, the last token of a split, and scales of rows."""

    table: Any  # the address of the row
    last: Any
    k_scales: Any  # RowScales, of caches that have them
    v_scales: Any


class SplitLogitOptions(NamedTuple):
    """What turns products into logits."""

    scale: Any
    softcap: Any
    slopes: Any
    q_pos: Any  # position of the query: that of the sequence's last token
    seq: Any


class SharedSums(NamedTuple):
    """The shared memory in which warps store their sums."""

    address: Any  # the address of O, whose place rows of the caches and Q may have before
    maxima: Any
    sums: Any
    weights: Any  # of the warp groups


class SplitOutput(NamedTuple):
    """The output rows of a thread block; where splits are merged, the last block stores them."""

    address: Any  # the first head's row
    head_stride: Any  # bytes
    lse: Any
    row: Any  # the element of lse for the first head
    num_heads: Any
    head: Any  # the number of the first head
    sinks: Any
    v_factor: Any  # by which values are multiplied


class SplitPartials(NamedTuple):
    """The partial results of a sequence; head h of split s has element ``(row + h) * most_splits + s``."""

    sums: Any  # head_dim float32
    states: Any  # maximum and sum of exponentials
    most_splits: Any
