"""copy_blocks: copy whole blocks onto other blocks, as bytes, whatever their dtype.

Grid. x over pairs, y over pieces of a block, z over caches, up to MAX_CACHES of them in one launch.

Who owns what. A thread block copies a piece, and each thread up to 4 vectors of it, with all loads before the stores.
Blocks have the same shape in all caches of a launch: rows of contiguous vectors along up to three axes.

Shared memory. None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..device.bad_entries import PAIR, record
from ..device.intrinsics.thread import (
    address,
    load_written_1,
    load_written_2,
    load_written_4,
    load_written_8,
    load_written_16,
    store_1,
    store_2,
    store_4,
    store_8,
    store_16,
)
from ..device.language import cuda, int64, types, uint32
from ..device.source import KernelSource, device_function

NUM_THREADS = 128
MAX_CACHES = 8
VECTORS_PER_THREAD = 4
PIECE = NUM_THREADS * VECTORS_PER_THREAD  # vectors that a thread block copies at once


@dataclass(frozen=True, slots=True)
class CopyConfig:
    """The compile-time constants of copy_blocks.

    Attributes
    ----------
    vector_bytes : int
        16, 8, 4, 2 or 1; every address, stride and row is a multiple of it.
    num_axes : int
        Axes of a block that are not contiguous, 0 to 3.
    checked : bool
        Skip and record pairs with a block id that is out of range.
    """

    vector_bytes: int
    num_axes: int
    checked: bool = False


def make_copy_blocks(config: CopyConfig) -> KernelSource:
    """The kernel of a config.

    Its parameters are MAX_CACHES sources and MAX_CACHES destinations (unused ones may be anything), pairs,
    report, num_source_blocks, num_destination_blocks, num_vectors of a block and of a row, the lengths of axes 1 and 2
    (axis 2 is the fastest, and missing axes are the slowest), the elements from pair to pair; in bytes the block
    stride and those of the axes 0 to 2 of the sources, and of the destinations.
    """
    load, store, num_words = _make_moves(config.vector_bytes)
    offset_of = _make_offset_of(config)
    checked, num_vectors_each, num_threads, piece = config.checked, VECTORS_PER_THREAD, NUM_THREADS, PIECE
    num_buffered = VECTORS_PER_THREAD * num_words

    def copy_blocks(
        source_0, source_1, source_2, source_3, source_4, source_5, source_6, source_7,
        destination_0, destination_1, destination_2, destination_3,
        destination_4, destination_5, destination_6, destination_7,
        pairs, report,
        num_source_blocks, num_destination_blocks, num_vectors, row_vectors, length_1, length_2, pair_stride,
        source_block_stride, source_stride_0, source_stride_1, source_stride_2,
        destination_block_stride, destination_stride_0, destination_stride_1, destination_stride_2,
    ):  # fmt: skip
        pair = int64(cuda.blockIdx.x)
        source_block = pairs[pair * pair_stride]
        destination_block = pairs[pair * pair_stride + 1]
        if checked:
            is_bad = source_block < 0 or source_block >= num_source_blocks
            if is_bad or destination_block < 0 or destination_block >= num_destination_blocks:
                if cuda.threadIdx.x == 0 and cuda.blockIdx.y == 0 and cuda.blockIdx.z == 0:
                    value = source_block if is_bad else destination_block
                    record(report, PAIR, pair, int64(0) if is_bad else int64(1), value)
                return
        source = int64(source_block * source_block_stride) + pick(
            source_0, source_1, source_2, source_3, source_4, source_5, source_6, source_7
        )
        destination = int64(destination_block * destination_block_stride) + pick(
            destination_0, destination_1, destination_2, destination_3,
            destination_4, destination_5, destination_6, destination_7,
        )  # fmt: skip
        words = cuda.local.array(num_buffered, uint32)
        first = int64(cuda.blockIdx.y) * piece + int64(cuda.threadIdx.x)
        while first < num_vectors:
            for i in range(num_vectors_each):
                vector = uint32(min(first + i * num_threads, num_vectors - 1))
                offset = offset_of(
                    vector, row_vectors, length_1, length_2, source_stride_0, source_stride_1, source_stride_2
                )
                load(words, i * num_words, source + offset)
            for i in range(num_vectors_each):
                if first + i * num_threads < num_vectors:
                    offset = offset_of(
                        uint32(first + i * num_threads), row_vectors, length_1, length_2,
                        destination_stride_0, destination_stride_1, destination_stride_2,
                    )  # fmt: skip
                    store(words, i * num_words, destination + offset)
            first += int64(cuda.gridDim.y) * piece

    pointers = [types.CPointer(types.uint8)] * (2 * MAX_CACHES) + [types.CPointer(int64)] * 2
    return KernelSource(copy_blocks, types.void(*pointers, *[int64] * 15), NUM_THREADS)


@device_function
def pick(p0, p1, p2, p3, p4, p5, p6, p7):
    """The address of the blockIdx.z-th of eight pointers."""
    where = address(p0)
    where = address(p1) if cuda.blockIdx.z == 1 else where
    where = address(p2) if cuda.blockIdx.z == 2 else where
    where = address(p3) if cuda.blockIdx.z == 3 else where
    where = address(p4) if cuda.blockIdx.z == 4 else where
    where = address(p5) if cuda.blockIdx.z == 5 else where
    where = address(p6) if cuda.blockIdx.z == 6 else where
    return address(p7) if cuda.blockIdx.z == 7 else where


def _make_offset_of(config: CopyConfig) -> Any:
    """The device function (index of a vector, ...) -> its byte offset in a block."""
    num_axes, vector_bytes = config.num_axes, int64(config.vector_bytes)

    @device_function
    def offset_of(vector, row_vectors, length_1, length_2, stride_0, stride_1, stride_2):
        if num_axes == 0:
            return int64(vector) * vector_bytes
        row = uint32(vector // uint32(row_vectors))
        offset = int64(uint32(vector - uint32(row * uint32(row_vectors)))) * vector_bytes
        if num_axes == 1:
            return offset + int64(row) * stride_2
        row_1 = uint32(row // uint32(length_2))
        offset += int64(uint32(row - uint32(row_1 * uint32(length_2)))) * stride_2
        if num_axes == 2:
            return offset + int64(row_1) * stride_1
        row_0 = uint32(row_1 // uint32(length_1))
        offset += int64(uint32(row_1 - uint32(row_0 * uint32(length_1)))) * stride_1
        return offset + int64(row_0) * stride_0

    return offset_of


def _make_moves(vector_bytes: int) -> tuple[Any, Any, int]:
    """Two device functions, which load a vector into words and store it from words, and how many words that is."""
    if vector_bytes == 16:

        @device_function
        def load(words, at, source):
            words[at], words[at + 1], words[at + 2], words[at + 3] = load_written_16(source)

        @device_function
        def store(words, at, target):
            store_16(target, words[at], words[at + 1], words[at + 2], words[at + 3])

        return load, store, 4
    if vector_bytes == 8:

        @device_function
        def load_pair(words, at, source):
            words[at], words[at + 1] = load_written_8(source)

        @device_function
        def store_pair(words, at, target):
            store_8(target, words[at], words[at + 1])

        return load_pair, store_pair, 2
    load_one = {1: load_written_1, 2: load_written_2, 4: load_written_4}[vector_bytes]
    store_one = {1: store_1, 2: store_2, 4: store_4}[vector_bytes]
    cast = {1: types.uint8, 2: types.uint16, 4: uint32}[vector_bytes]

    @device_function
    def load_element(words, at, source):
        words[at] = uint32(load_one(source))

    @device_function
    def store_element(words, at, target):
        store_one(target, cast(words[at]))

    return load_element, store_element, 1
