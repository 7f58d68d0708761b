"""LayerCaches: K and V of all layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...layouts import cache_shapes
from ...typing import Layout
from ..groups import LayerGroups
from ..ids import Int64Array
from .arrays import Arrays

_AT_HAND = 2**17  # bytes that malloc has without asking the system


class LayerCaches:
    """K and V of all layers, in one allocation each, zero at first; layers of different groups share arrays.

    Parameters
    ----------
    arrays : Arrays
    layout : str
    sizes : tuple of int
        N, P, Hkv and D.
    groups : LayerGroups
    dtype : numpy.dtype
        What they are stored in.

    Attributes
    ----------
    k_caches, v_caches : tuple of array
        Those of each layer, as views.
    both : tuple of array
        K and V, (group_size, ...) each.
    views : tuple
        k_caches and v_caches as NumPy sees them, where it does: operations ask nobody else then.

    Raises
    ------
    MemoryError
        The device or the host has no room for them.
    """

    def __init__(
        self,
        arrays: Arrays,
        layout: Layout,
        sizes: tuple[int, int, int, int],
        groups: LayerGroups,
        dtype: np.dtype[Any],
    ) -> None:
        shapes = cache_shapes(layout, *sizes, dtype.itemsize)
        self._arrays, self._num_arrays = arrays, groups.group_size
        num_elements = sum(math.prod(shape[1:]) for shape in shapes)
        self.block_bytes = groups.group_size * dtype.itemsize * num_elements
        try:
            self.both = tuple(arrays.zeros((groups.group_size, *shape), dtype) for shape in shapes)
        except (MemoryError, RuntimeError, ValueError) as error:  # of NumPy or CuPy, of torch, of sizes beyond 64 bits
            needed, free = sizes[0] * self.block_bytes, arrays.free_bytes()
            if free is None or needed <= free:
                raise
            raise MemoryError(
                f"num_blocks must fit into the {free:,} bytes of memory that are free, got {sizes[0]:,} blocks, which "
                f"take {needed:,} bytes"
            ) from error
        self.k_caches, self.v_caches = (tuple(stack[place] for place in groups.place_of) for stack in self.both)
        self.views = tuple(tuple(map(arrays.on_host, caches)) for caches in (self.k_caches, self.v_caches))

    def copy(self, copies: Int64Array) -> None:
        """Copy blocks in all layers, (m, 2) int64 of source and destination; no call reads these before the commit."""
        if len(copies):
            sources, destinations = self._ids(copies)
            for stack in self.both:
                for layers in self._layers_at_a_time(copies):
                    stack[layers, destinations] = stack[layers, sources]

    def read(self, copies: Int64Array) -> None:
        """Raise what `copy` would raise: MemoryError, or RuntimeError while a stream is captured."""
        sources, _ = self._ids(copies)
        self.both[0][self._layers_at_a_time(copies)[0], sources]

    def _ids(self, copies: Int64Array) -> tuple[Any, ...]:
        return tuple(self._arrays.asarray(ids) for ids in copies.T.copy())

    def _layers_at_a_time(self, copies: Int64Array) -> list[slice]:
        """The layers to copy at a time: all on a device, on the host as many as malloc has memory for at hand."""
        num_layers = self._num_arrays
        at_once = num_layers
        if not self._arrays.on_device:
            at_once = max(1, _AT_HAND * 2 * num_layers // max(1, self.block_bytes * len(copies)))
        return [slice(first, first + at_once) for first in range(0, num_layers, at_once)]
