"""The parameters of the prefill kernels, and what a thread block hands to their steps.

Named tuples: to LLVM they are their fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..device.language import float32, int32, int64, types, uint8

_BYTES, _INTS, _FLOATS = (types.CPointer(dtype) for dtype in (uint8, int32, float32))


class Item(NamedTuple):
    """The rows of one thread block: neighbouring tokens of a sequence, each with the query heads of one KV head.

    Row r of a sequence is token r // group_size and head r % group_size.
    """

    seq: Any
    first_row: Any  # of the sequence's
    num_rows: Any  # of the sequence
    start: Any  # of the sequence in q
    context: Any  # position of the sequence's first query token
    seq_len: Any  # 0 if nothing is to be read: rows become zeros


class Visible(NamedTuple):
    """The keys that a row sees: from its position - window + 1 to its position, or to the last key."""

    is_causal: Any
    window: Any


class Pages(NamedTuple):
    """Where a sequence's tokens are looked up."""

    table: Any  # address of its row of block_tables
    first: Any  # token that a row of the tile sees
    last: Any


class Options(NamedTuple):
    """What turns products into logits, and where a lane's rows are."""

    scale: Any
    softcap: Any
    seq: Any
    last: Any  # token of the sequence


def signature(num_strides: int, *workspaces: Any) -> Any:
    """Of a kernel that takes this many strides, in bytes, and pointers to workspaces."""
    return types.void(
        *(_BYTES, _FLOATS, _BYTES, _BYTES, _BYTES),  # out, lse, q, k_cache, v_cache
        *(_INTS, _INTS, _INTS),  # block_tables, seq_lens, query_starts
        *(_FLOATS, _FLOATS, _FLOATS, _FLOATS),  # alibi_slopes, sinks, k_scale, v_scale
        *workspaces,
        *[int64] * 7,  # sizes, window, causal
        *[int64] * num_strides,
        *[int64] * 4,  # the bits of float32: scale, softcap, and k_scale and v_scale where they are numbers
    )
