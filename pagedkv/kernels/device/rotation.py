"""The rotary embedding's arithmetic: where a token stands, and what becomes of a pair of dims."""

from __future__ import annotations

from .intrinsics.thread import address, load_4, load_8, multiply
from .language import float32, int32, int64, uint64
from .source import device_function


@device_function
def position_of(positions, position_bytes, token):
    """The position of a token, as int64: an element of 4 or 8 bytes."""
    if position_bytes == 4:
        return int64(int32(load_4(address(positions) + 4 * token)))
    low, high = load_8(address(positions) + 8 * token)
    return int64(uint64(high) << uint64(32) | uint64(low))


@device_function
def turn(x, other, cosine, sine):
    """x * cosine + other * sine, each product rounded before they are added: no fused multiply-add.

    That is the second dim of a pair; with -sine it is the first, bit for bit a difference of products.
    """
    return float32(multiply(x, cosine) + multiply(other, sine))
