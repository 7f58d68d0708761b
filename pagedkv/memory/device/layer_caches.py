"""LayerCaches: K and V of all layers, and the scales of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...layouts import KvFormat, as_given
from ...typing import Layout
from ..groups import LayerGroups, Shape
from ..ids import Int64Array
from .arrays import Arrays

_AT_HAND = 2**17  # bytes that malloc has without asking the system
_ALIGNED = 16  # bytes: kernels load as many at once


class LayerCaches:
    """K and V of all layers, and the scales of their rows if the format has them, zero at first.

    Where all layers have one shape, there is an allocation of each part, of K say, and the i-th layers of all groups
    share an array. Else there is one of whole blocks, in which the layers of a group lie side by side.

    Parameters
    ----------
    arrays : Arrays
    layout : str
    num_blocks, block_size : int
        N and P.
    shapes : sequence of (int, int)
        Hkv and D of all layers, or of each.
    groups : LayerGroups
    kv_format : KvFormat
        What a row is; an attribute, too.

    Attributes
    ----------
    layers : tuple of tuple of array
        The arrays of each layer as operations take them, by `CACHES`, as views.
    stacks : tuple of array
        What the layers are views of: those of each part, (group_size, N, ...), or whole blocks, (1, N, bytes).
    views : tuple of tuple of array
        The layers as NumPy sees them, where it does: operations ask nobody else then.

    Raises
    ------
    MemoryError
        The device or the host has no room for them.
    """

    def __init__(
        self,
        arrays: Arrays,
        layout: Layout,
        num_blocks: int,
        block_size: int,
        shapes: Sequence[Shape],
        groups: LayerGroups,
        kv_format: KvFormat,
    ) -> None:
        sizes = kv_format, layout, block_size
        self._arrays, self.kv_format, self.block_bytes = arrays, kv_format, bytes_of_block(groups, shapes, *sizes)
        self._num_arrays = 1 if groups.has_shapes else groups.group_size
        parts = [kv_format.parts(layout, num_blocks, block_size, *shape) for shape in shapes]
        nbytes = bytes_of_layers(shapes, *sizes)
        self._most_bytes = self.block_bytes if groups.has_shapes else max(nbytes[0])
        try:
            if groups.has_shapes:
                self.stacks = (arrays.zeros((1, num_blocks, self.block_bytes), np.dtype(np.uint8)),)
            else:
                self.stacks = tuple(arrays.zeros((self._num_arrays, *shape), dtype) for shape, dtype in parts[0])
        except (MemoryError, RuntimeError, ValueError) as error:  # of NumPy or CuPy, of torch, of sizes beyond 64 bits
            needed, free = num_blocks * self.block_bytes, arrays.free_bytes()
            if free is None or needed <= free:
                raise
            raise MemoryError(
                f"num_blocks must fit into the {free:,} bytes of memory that are free, got {num_blocks:,} blocks, "
                f"which take {needed:,} bytes"
            ) from error
        if groups.has_shapes:
            [blocks], layers = self.stacks[0], []
            for place, sizes_of, of_layer in zip(groups.place_of, nbytes, parts, strict=True):
                places = zip(accumulate(sizes_of, initial=place * sum(sizes_of)), of_layer, strict=False)
                layers.append([arrays.view(blocks, start, *part) for start, part in places])
        else:
            layers = [[stack[place] for stack in self.stacks] for place in groups.place_of]
        self.layers = tuple(as_given(layout, of_layer) for of_layer in layers)
        self.views = tuple(tuple(map(arrays.on_host, of_layer)) for of_layer in self.layers)

    def copy(self, copies: Int64Array) -> None:
        """Copy blocks in all layers, (m, 2) int64 of source and destination; no call reads these before the commit."""
        if len(copies):
            sources, destinations = self._ids(copies)
            for stack in self.stacks:
                for layers in self._layers_at_a_time(copies):
                    stack[layers, destinations] = stack[layers, sources]

    def read(self, copies: Int64Array) -> None:
        """Raise what `copy` would raise: MemoryError, or RuntimeError while a stream is captured."""
        sources, _ = self._ids(copies)
        self.stacks[0][self._layers_at_a_time(copies)[0], sources]

    def _ids(self, copies: Int64Array) -> tuple[Any, ...]:
        return tuple(self._arrays.asarray(ids) for ids in copies.T.copy())

    def _layers_at_a_time(self, copies: Int64Array) -> list[slice]:
        """The layers to copy at a time: all on a device, on the host as many as malloc has memory for at hand."""
        at_once = num_layers = self._num_arrays
        if not self._arrays.on_device:
            at_once = max(1, _AT_HAND // max(1, self._most_bytes * len(copies)))
        return [slice(first, first + at_once) for first in range(0, num_layers, at_once)]


def bytes_of_layers(
    shapes: Sequence[Shape], kv_format: KvFormat, layout: Layout, block_size: int
) -> list[tuple[int, ...]]:
    """The bytes of one block in each part of layers, aligned if several shapes share a block."""
    aligned = 1 if len(shapes) == 1 else _ALIGNED
    return [
        tuple(-(-part.nbytes // aligned) * aligned for part in kv_format.parts(layout, 1, block_size, *shape))
        for shape in shapes
    ]


def bytes_of_block(
    groups: LayerGroups, shapes: Sequence[Shape], kv_format: KvFormat, layout: Layout, block_size: int
) -> int:
    """The bytes of one block in all parts: as many as the layers of the largest group need."""
    of_layers = [sum(parts) for parts in bytes_of_layers(shapes, kv_format, layout, block_size)]
    if not groups.has_shapes:
        return groups.group_size * of_layers[0]
    return max(sum(of_layers[layer] for layer in group.layers) for group in groups.groups)
