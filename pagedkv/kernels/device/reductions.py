"""Reductions over lanes, by shuffles. The whole warp calls them, and every lane gets the result."""

from __future__ import annotations

from .intrinsics.thread import larger
from .intrinsics.warp import exchange
from .language import float32, uint32
from .source import device_function


@device_function
def largest_of_warp(x):
    """The largest of the lanes' float32; a number wins over a NaN."""
    for b in range(5):
        x = larger(x, exchange(x, uint32(1 << b)))
    return x


@device_function
def sum_of_warp(x):
    """The sum of the lanes' float32: neighbours first, then pairs of them, and so on."""
    for b in range(5):
        x = float32(x + exchange(x, uint32(1 << b)))
    return x


@device_function
def largest_of_quad(x):
    """The largest float32 of four neighbouring lanes, which have the same row of an mma's result."""
    x = larger(x, exchange(x, 1))
    return larger(x, exchange(x, 2))


@device_function
def sum_of_quad(x):
    """The sum of the float32 of four neighbouring lanes: the next one first, then the other two."""
    x = float32(x + exchange(x, 1))
    return float32(x + exchange(x, 2))
