"""Masks of the bits of a vector of words, and their use."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..language import types
from .declare import I32, declare, emit_asm, int64, parts_of, uint32


@lru_cache
def masked(num_words: int) -> Any:
    """The device function (words, masks) -> the bitwise and of two tuples of words."""
    words = types.UniTuple(uint32, num_words)

    def emit(builder: Any, values: Any, masks: Any) -> list[Any]:
        pairs = zip(parts_of(builder, values, num_words), parts_of(builder, masks, num_words), strict=True)
        return [builder.and_(value, mask) for value, mask in pairs]

    return declare("masked", "The bitwise and of words and masks.", words, [words, words], emit)


_LOW_BITS = "{ .reg .b32 n; max.s32 n, $1, 0; shl.b32 n, 1, n; sub.u32 $0, n, 1; }"  # shl makes 0 of 1 << 32


@lru_cache
def bit_masks(num_words: int) -> Any:
    """The device function (first, last) -> words whose bits first..last-1 are set, from the lowest address up.

    Both may lie outside the words, by less than 2**31.
    """

    def low_bits(builder: Any, count: Any, word: int) -> Any:
        count = builder.sub(builder.trunc(count, I32), I32(32 * word))
        return emit_asm(builder, I32, _LOW_BITS, "=r,r", [count])

    def emit(builder: Any, first: Any, last: Any) -> list[Any]:
        return [
            builder.and_(low_bits(builder, last, w), builder.not_(low_bits(builder, first, w)))
            for w in range(num_words)
        ]

    return declare(
        "bit_masks", "Masks of the bits first..last-1.", types.UniTuple(uint32, num_words), [int64] * 2, emit
    )
