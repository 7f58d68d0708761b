"""The parameters of the prefill kernels, and what a thread block hands to their steps.

The latter are named tuples, which are no more than their fields to LLVM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..device.cache_rows import SCALE_STRIDES
from ..device.language import float32, int32, int64, types, uint8
from ..device.visible import VISIBLE

BYTES, INTS, FLOATS = (types.CPointer(dtype) for dtype in (uint8, int32, float32))


class Item(NamedTuple):
    """The rows of one thread block: neighbouring tokens of a sequence, each with the query heads of one KV head.

    Row r of a sequence is token r // group_size and head r % group_size.
    """

    seq: Any
    first_row: Any  # the thread block's first one of the sequence's rows
    num_rows: Any  # rows of the sequence
    start: Any  # the sequence's first token in q
    context: Any  # the position of that token
    seq_len: Any  # 0 if nothing is to be read: rows become zeros


class KeySpan(NamedTuple):
    """The tokens of a sequence that some row of a tile sees, and those whose tiles need no mask."""

    first: Any  # a multiple of a tile's tokens
    last: Any
    unmasked: Any  # the first of num_unmasked tokens: whole tiles that every row sees
    num_unmasked: Any


class TileQuery(NamedTuple):
    """The rows of q of a sequence and KV head."""

    address: Any  # the first head of the first token
    token_stride: Any  # bytes
    head_stride: Any
    is_negative: Any  # whether -q takes the place of q, because the scale is negative


class TilePages(NamedTuple):
    """The row of block_tables that has the blocks of a sequence, the tokens that a tile of rows sees, and scales."""

    table: Any  # the address of the row
    first: Any
    last: Any
    k_scales: Any  # RowScales, of caches that have them
    v_scales: Any


class TileLogitOptions(NamedTuple):
    """What turns the products of a tile into logits."""

    scale: Any
    softcap: Any
    seq: Any
    last: Any  # the last token of the sequence


class TileOutput(NamedTuple):
    """Where the output rows of a sequence and KV head go."""

    address: Any  # the first head of the first token
    token_stride: Any  # bytes
    head_stride: Any
    lse: Any
    lse_row: Any  # the element of lse for that head and token
    num_heads: Any
    sinks: Any
    head: Any  # the number of that head
    v_factor: Any  # by which values are multiplied


def signature(num_strides: int, *pointers: Any) -> Any:
    """The signature of a kernel that takes `num_strides` strides, in bytes, and `pointers` beside those of all."""
    return types.void(
        *(BYTES, FLOATS, BYTES, BYTES, BYTES),  # out, lse, q, k_cache, v_cache
        *(INTS, INTS, INTS),  # block_tables, seq_lens, query_starts
        *(FLOATS, FLOATS, FLOATS, FLOATS),  # alibi_slopes, sinks, k_scale, v_scale
        *pointers,
        *(*[int64] * 5, VISIBLE, SCALE_STRIDES),  # sizes, visible, strides of scales
        *[int64] * num_strides,
        *[int64] * 4,  # the bits of float32: scale, softcap, and k_scale and v_scale where they are numbers
    )
