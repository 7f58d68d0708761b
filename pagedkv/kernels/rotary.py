"""apply_rotary: rotate pairs of dims of queries and keys by the angles of their tokens' positions.

Grid. x over (token, vector of pairs), y over heads, those of k after those of q. z = 0 rotates, z = 1 copies the dims
from rotary_dim on; it is not launched if there are none, or if results replace q and k.

Who owns what. A thread loads a vector of cosines and one of sines, and rotates these pairs of several heads, as many
heads apart as the grid has in y. It alone loads the elements that it overwrites, so results may replace q and k.

Shared memory. None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .device.bad_entries import POSITION, record
from .device.intrinsics.thread import address
from .device.language import cuda, float32, int64, types, uint64
from .device.rotation import position_of, rotate_dim
from .device.sizes import ELEMENT_BITS
from .device.source import KernelSource, device_function
from .device.vectors import make_load, make_store

NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """The compile-time constants of apply_rotary.

    Attributes
    ----------
    kind : str
        Elements of q, k and the results: "float32", "float16" or "bfloat16".
    table_kind : str
        Elements of cos and sin: "float32", or `kind`.
    head_dim, rotary_dim : int
        D, and how many of its dims are rotated.
    interleaved : bool
        Pairs are neighbours, not half of rotary_dim apart.
    checked : bool
        Skip and record positions that the tables have no row for.
    """

    kind: str
    table_kind: str
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    checked: bool = False

    @property
    def pairs(self) -> int:
        """Pairs that a thread rotates: a power of two whose first dims, and second ones, are aligned."""
        return math.gcd(self.rotary_dim // 2, 128 // ELEMENT_BITS[self.kind])

    @property
    def copied_bytes(self) -> int:
        """Bytes that a thread copies: 4, 8 or 16."""
        return math.gcd(self.rotary_dim * ELEMENT_BITS[self.kind] // 8, 16)

    @property
    def num_rotated(self) -> int:
        """Threads that rotate a head of a token."""
        return self.rotary_dim // 2 // self.pairs

    @property
    def num_copied(self) -> int:
        """Threads that copy the rest of a head of a token."""
        return (self.head_dim - self.rotary_dim) * ELEMENT_BITS[self.kind] // 8 // self.copied_bytes


def make_apply_rotary(config: RotaryConfig) -> KernelSource:
    """The kernel of a config.

    Its parameters are q, k, cos, sin, positions, q_out, k_out, report, num_tokens, num_heads, num_heads + num_kv_heads,
    max_positions, bytes of a position, and in bytes token and head strides of q and of k, row strides of cos and of
    sin, token and head strides of q_out and of k_out.
    """
    rotate, load_table = _make_rotate(config), make_load(config.table_kind, config.pairs)
    num_words = config.copied_bytes // 4
    load_words, store_words = make_load("float32", num_words, written=True), make_store("float32", num_words)
    num_rotated, num_copied, num_threads = (uint64(n) for n in (config.num_rotated, config.num_copied, NUM_THREADS))
    rotary_bytes, copied_bytes = config.rotary_dim * ELEMENT_BITS[config.kind] // 8, config.copied_bytes
    num_pairs, checked, has_rest = config.pairs, config.checked, config.num_copied > 0

    def apply_rotary(
        q, k, cos, sin, positions, q_out, k_out, report,
        num_tokens, num_heads, num_all_heads, max_positions, position_bytes,
        q_token_stride, q_head_stride, k_token_stride, k_head_stride, cos_stride, sin_stride,
        q_out_token_stride, q_out_head_stride, k_out_token_stride, k_out_head_stride,
    ):  # fmt: skip
        copies = has_rest and cuda.blockIdx.z == 1
        item = uint64(uint64(cuda.blockIdx.x) * num_threads + uint64(cuda.threadIdx.x))
        per_token = num_copied if copies else num_rotated
        token, vector = int64(item // per_token), int64(item % per_token)
        if token >= num_tokens:
            return
        position = position_of(positions, position_bytes, token)
        if checked and (position < 0 or position >= max_positions):
            if cuda.blockIdx.z == 0 and cuda.blockIdx.y == 0 and vector == 0:
                record(report, POSITION, token, int64(0), position)
            return
        cosines, sines = cuda.local.array(num_pairs, float32), cuda.local.array(num_pairs, float32)
        words = cuda.local.array(num_words, float32)
        if not copies:
            load_table(cosines, address(cos) + position * cos_stride, vector)
            load_table(sines, address(sin) + position * sin_stride, vector)
        head = int64(cuda.blockIdx.y)
        while head < num_all_heads:
            if head < num_heads:
                source = address(q) + token * q_token_stride + head * q_head_stride
                target = address(q_out) + token * q_out_token_stride + head * q_out_head_stride
            else:
                source = address(k) + token * k_token_stride + (head - num_heads) * k_head_stride
                target = address(k_out) + token * k_out_token_stride + (head - num_heads) * k_out_head_stride
            if copies:
                load_words(words, source + rotary_bytes, vector)
                store_words(target + rotary_bytes + vector * copied_bytes, words)
            else:
                rotate(source, target, vector, cosines, sines)
            head += int64(cuda.gridDim.y)

    bytes_, longs = types.CPointer(types.uint8), types.CPointer(int64)
    return KernelSource(apply_rotary, types.void(*[bytes_] * 7, longs, *[int64] * 15), NUM_THREADS)


def _make_rotate(config: RotaryConfig) -> Any:
    """The device function (source, target, vector, cosines, sines) that rotates the vector-th pairs of a head."""
    num_pairs, itemsize = config.pairs, ELEMENT_BITS[config.kind] // 8
    if config.interleaved:
        both, both_bytes = 2 * num_pairs, 2 * num_pairs * itemsize
        load_both, store_both = make_load(config.kind, both, written=True), make_store(config.kind, both)

        @device_function
        def rotate_neighbours(source, target, vector, cosines, sines):
            values = cuda.local.array(both, float32)
            load_both(values, source, vector)
            for i in range(num_pairs):
                a, b, c, s = values[2 * i], values[2 * i + 1], cosines[i], sines[i]
                values[2 * i], values[2 * i + 1] = rotate_dim(a, b, c, float32(-s)), rotate_dim(b, a, c, s)
            store_both(target + vector * both_bytes, values)

        return rotate_neighbours
    load, store = make_load(config.kind, num_pairs, written=True), make_store(config.kind, num_pairs)
    vector_bytes, half_bytes = num_pairs * itemsize, config.rotary_dim // 2 * itemsize

    @device_function
    def rotate_halves(source, target, vector, cosines, sines):
        firsts, seconds = cuda.local.array(num_pairs, float32), cuda.local.array(num_pairs, float32)
        load(firsts, source, vector)
        load(seconds, source + half_bytes, vector)
        for i in range(num_pairs):
            a, b, c, s = firsts[i], seconds[i], cosines[i], sines[i]
            firsts[i], seconds[i] = rotate_dim(a, b, c, float32(-s)), rotate_dim(b, a, c, s)
        store(target + vector * vector_bytes, firsts)
        store(target + half_bytes + vector * vector_bytes, seconds)

    return rotate_halves
