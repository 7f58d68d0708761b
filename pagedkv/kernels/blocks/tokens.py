"""How write_kv and gather_kv divide their work among threads.

A thread moves `elements` neighbouring elements of one row, which is one (token, KV head) of k or v. Rows of a cache are
contiguous in the layouts NHD and HND. In the layout vllm rows of K are chunks of 16 bytes, a column stride apart, and
rows of V single elements; there neighbouring tokens are adjacent in memory, so 32 of them share a warp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..device.language import cuda, types
from ..device.sizes import ELEMENT_BITS, WARP_SIZE
from ..device.source import device_function

NUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class RowShape:
    """Where the elements of one cache row lie, and how threads share them.

    Attributes
    ----------
    itemsize : int
        Bytes of an element of the cache.
    elements : int
        Elements that a thread moves, 8 or 16 bytes of a contiguous row; a row is a multiple of them.
    num_vectors : int
        Groups of `elements` in a row; of the lanes that share a row, see `lanes_of_row`, a power of two up to a warp.
    chunk : int
        Contiguous elements of the row; chunks are a column stride apart.
    tile : int
        Tokens of which neighbouring threads move the same group of elements.
    """

    itemsize: int
    elements: int
    num_vectors: int
    chunk: int
    tile: int


def row_shape(kind: str, head_dim: int, *, is_vllm: bool, is_v: bool) -> RowShape:
    """The RowShape of K or V in a cache of a kind."""
    itemsize = ELEMENT_BITS[kind] // 8
    elements = 4 if itemsize == 4 else 8
    if not is_vllm:
        return RowShape(itemsize, elements, head_dim // elements, head_dim, 1)
    return RowShape(itemsize, elements, head_dim // elements, 1 if is_v else 16 // itemsize, 32)


def lanes_of_row(shape: RowShape) -> RowShape:
    """The same rows, each for neighbouring lanes of a warp that find a number of the whole row together."""
    lanes = min(1 << (shape.num_vectors - 1).bit_length(), WARP_SIZE)
    return replace(shape, num_vectors=lanes, tile=1)


def num_items(num_tokens: int, shape: RowShape) -> int:
    """Threads that the tokens of one KV head need."""
    return -(-num_tokens // shape.tile) * shape.tile * shape.num_vectors


def make_item(shape: RowShape) -> Any:
    """The device function () -> (token, first element) of what this thread moves, as uint64 and uint32."""
    uint32, uint64 = types.uint32, types.uint64
    tile, num_vectors, elements = uint64(shape.tile), uint64(shape.num_vectors), uint32(shape.elements)
    num_threads = uint64(NUM_THREADS)

    @device_function
    def item() -> Any:
        index = uint64(uint64(cuda.blockIdx.x) * num_threads + uint64(cuda.threadIdx.x))
        group = uint64(index // tile)
        token = uint64(uint64(group // num_vectors) * tile + index % tile)
        return token, uint32(uint32(group % num_vectors) * elements)

    return item
