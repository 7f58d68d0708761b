"""What a thread block hands to the steps of the split kernel, as named tuples; to LLVM they are their fields."""

from __future__ import annotations

from typing import Any, NamedTuple


class Query(NamedTuple):
    """Query heads that share a KV head: of a thread block, or of one of its warps."""

    address: Any  # of the first head's row
    head_stride: Any  # bytes
    num_heads: Any
    head: Any  # number of the first one


class Pages(NamedTuple):
    """Where a sequence's tokens are looked up."""

    table: Any  # address of its row of block_tables
    last: Any  # token of the split


class Options(NamedTuple):
    """What turns products into logits."""

    scale: Any
    softcap: Any
    slopes: Any
    q_pos: Any  # position of the query: that of the sequence's last token
    seq: Any


class Shared(NamedTuple):
    """Where warps leave their sums in shared memory."""

    address: Any  # of O; Q and rows of the caches may be there before
    maxima: Any
    sums: Any
    weights: Any  # of the teams


class Output(NamedTuple):
    """The output rows of a thread block; where splits are merged, the last block stores them."""

    address: Any  # of the first head's row
    head_stride: Any  # bytes
    lse: Any
    row: Any  # of the first head in lse
    num_heads: Any
    head: Any  # number of the first one
    sinks: Any
    v_factor: Any  # by which values are multiplied


class Partials(NamedTuple):
    """The partial results of a sequence; head h of split s has element ``(row + h) * most_splits + s``."""

    sums: Any  # head_dim float32
    states: Any  # maximum and sum of exponentials
    most_splits: Any
