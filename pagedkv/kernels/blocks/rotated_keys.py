"""Rotate a vector of keys by the angles of its token's position, on its way into a cache.

Each thread rotates the elements that it stores. It also loads the other dim of each pair, even if another thread stores
that one: the load hits a cache, and no thread waits for another.
"""

from __future__ import annotations

import math
from typing import Any

from ..device.conversions import narrow, unpack
from ..device.language import cuda, float32, int64, uint32
from ..device.rotation import rotate_dim
from ..device.source import device_function
from ..device.vectors import make_load


def make_rotate(
    kind: str, table_kind: str, rotary_dim: int, num_elements: int, convert: Any, *, interleaved: bool
) -> Any:
    """The device function (codes, row, first, cosines, sines, scale) that rotates elements and stores their codes.

    Parameters
    ----------
    kind, table_kind : str
        Elements of keys, and of cos and sin.
    rotary_dim : int
        First dims of a key that are rotated, not 0.
    num_elements : int
        Elements that `codes` has room for, 4 or 8; the first one is the element `first` of the key.
    convert : device function or None
        (float32, scale) -> bits of an element of the cache; None for caches of the keys' own kind.
    interleaved : bool
        Pairs are neighbours, not half of rotary_dim apart.

    `row`, `cosines` and `sines` are addresses of rows.
    """
    finish, half_dims = _make_finish(kind, convert), rotary_dim // 2
    rotary_dim, half = uint32(rotary_dim), uint32(half_dims)
    if interleaved:
        # The pairs taken at a time divide both a vector and the rotated dims: all of them are rotated, or none.
        pairs = math.gcd(half_dims, num_elements // 2)
        both = 2 * pairs
        num_parts, part = num_elements // both, uint32(both)
        load, load_table = make_load(kind, both), make_load(table_kind, pairs)

        @device_function
        def rotate_neighbours(codes, row, first, cosines, sines, scale):
            x = cuda.local.array(both, float32)
            c, s = cuda.local.array(pairs, float32), cuda.local.array(pairs, float32)
            for i in range(num_parts):
                at = uint32(first + i * part)
                if at < rotary_dim:
                    load(x, row, int64(at // part))
                    load_table(c, cosines, int64(at // part))
                    load_table(s, sines, int64(at // part))
                    for j in range(pairs):
                        a, b = x[2 * j], x[2 * j + 1]
                        codes[i * both + 2 * j] = finish(rotate_dim(a, b, c[j], float32(-s[j])), scale)
                        codes[i * both + 2 * j + 1] = finish(rotate_dim(b, a, c[j], s[j]), scale)

        return rotate_neighbours
    size = math.gcd(half_dims, num_elements)
    num_parts, part = num_elements // size, uint32(size)
    load, load_table = make_load(kind, size), make_load(table_kind, size)

    @device_function
    def rotate_halves(codes, row, first, cosines, sines, scale):
        x, other = cuda.local.array(size, float32), cuda.local.array(size, float32)
        c, s = cuda.local.array(size, float32), cuda.local.array(size, float32)
        for i in range(num_parts):
            at = uint32(first + i * part)
            if at < rotary_dim:
                is_first = at < half
                pair = at if is_first else uint32(at - half)
                load(x, row, int64(at // part))
                load(other, row, int64(uint32(at + half if is_first else pair) // part))
                load_table(c, cosines, int64(pair // part))
                load_table(s, sines, int64(pair // part))
                for j in range(size):
                    sine = float32(-s[j]) if is_first else s[j]
                    codes[i * size + j] = finish(rotate_dim(x[j], other[j], c[j], sine), scale)

    return rotate_halves


def _make_finish(kind: str, convert: Any) -> Any:
    """The device function (float32, scale) -> bits of an element of the cache, by way of the keys' own kind."""
    round_, widen = narrow(kind), unpack(kind)
    as_is = convert is None

    @device_function
    def finish(x, scale):
        bits = round_(x)
        return bits if as_is else convert(widen(bits)[0], scale)

    return finish
