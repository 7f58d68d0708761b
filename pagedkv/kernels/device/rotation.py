"""The arithmetic of rotary embedding: the position of a token, and the rotation of a pair of dims."""

from __future__ import annotations

from .intrinsics.thread import address, load_4, load_8, multiply
from .language import float32, int32, int64, uint64
from .source import device_function


@device_function
def position_of(positions, position_bytes, token):
    """The position of a token as int64, from an element of 4 or 8 bytes."""
    if position_bytes == 4:
        return int64(int32(load_4(address(positions) + 4 * token)))
    low, high = load_8(address(positions) + 8 * token)
    return int64(uint64(high) << uint64(32) | uint64(low))


@device_function
def rotate_dim(x, other, cosine, sine):
    """x * cosine + other * sine, without a fused multiply-add: each product is rounded before they are added.

    That is the second dim of a pair; with -sine it is the first one, bit for bit a difference of products.
    """
    return float32(multiply(x, cosine) + multiply(other, sine))
