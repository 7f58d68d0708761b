"""Copies between arrays of the host and the memory of a GPU, in the order of a stream.

A GPU copies to and from pinned memory without the host. Other arrays, such as NumPy's, go through two halves of pinned
memory of this package: while the GPU copies one of them, the host copies the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays import Array

if TYPE_CHECKING:
    from .gpu import Gpu

Bytes = npt.NDArray[np.uint8]

HALF_BYTES = 4 * 1024 * 1024


class _Half:
    """Pinned memory, and the event after the last copy that uses it.

    Attributes
    ----------
    memory : (HALF_BYTES,) uint8 array
    event : CUevent
    num_used : int
        Bytes that copies use.
    arriving : list of (destination, part of memory)
        What the host copies when the event has come.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.memory = gpu.pinned(HALF_BYTES)
        self.event: Any = gpu.call(gpu.driver.cuEventCreate, int(gpu.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self.num_used = 0
        self.arriving: list[tuple[Bytes, Bytes]] = []


class StreamCopies:
    """Makes copies on one stream of one GPU, which must be current.

    Parameters
    ----------
    gpu : Gpu
    stream : int
    """

    def __init__(self, gpu: Gpu, stream: int) -> None:
        self._gpu, self._stream = gpu, stream
        self._halves: list[_Half] = []  # first the one in use; empty until they are needed

    def to_device(self, parts: Sequence[tuple[int, Array]]) -> None:
        """Copy each array of the host, C-contiguous, to its address; those that are not pinned may change at once."""
        sources = [_bytes_of(source) for _, source in parts]
        for (address, _), source, is_pinned in zip(parts, sources, self._are_pinned(sources), strict=True):
            if is_pinned:
                self._send(address, source)
                continue
            for first in range(0, len(source), HALF_BYTES):
                piece = source[first : first + HALF_BYTES]
                room = self._free_room(len(piece))
                room[:] = piece
                self._send(address + first, room)

    def to_host(self, parts: Sequence[tuple[Array, int]]) -> None:
        """Fill each array of the host, C-contiguous, from its address; those that are not pinned are filled at once."""
        destinations = [_bytes_of(destination) for destination, _ in parts]
        try:
            for (_, address), destination, is_pinned in zip(
                parts, destinations, self._are_pinned(destinations), strict=True
            ):
                if is_pinned:
                    self._fetch(destination, address)
                    continue
                for first in range(0, len(destination), HALF_BYTES):
                    piece = destination[first : first + HALF_BYTES]
                    room = self._free_room(len(piece))
                    self._fetch(room, address + first)
                    self._halves[0].arriving.append((piece, room))
            for _ in self._halves:
                if any(half.arriving for half in self._halves):
                    self._swap_halves()
        finally:
            for half in self._halves:
                half.arriving.clear()

    def _are_pinned(self, arrays: Sequence[Bytes]) -> list[bool]:
        """Find which arrays are pinned, and make pinned memory for the others."""
        pinned = [self._gpu.is_pinned(x.ctypes.data) for x in arrays]
        if not self._halves and not all(pinned):
            self._halves = [_Half(self._gpu), _Half(self._gpu)]
        return pinned

    def _free_room(self, nbytes: int) -> Bytes:
        """Take pinned memory that no copy uses."""
        if self._halves[0].num_used + nbytes > HALF_BYTES:
            self._swap_halves()
        half = self._halves[0]
        half.num_used += nbytes
        return half.memory[half.num_used - nbytes : half.num_used]

    def _swap_halves(self) -> None:
        """Change to the other half, once the GPU is done with it."""
        driver = self._gpu.driver
        self._gpu.call(driver.cuEventRecord, self._halves[0].event, self._stream)
        self._halves.reverse()
        half = self._halves[0]
        self._gpu.call(driver.cuEventSynchronize, half.event)
        for destination, room in half.arriving:
            destination[:] = room
        half.arriving.clear()
        half.num_used = 0

    def _send(self, address: int, source: Bytes) -> None:
        call, copy = self._gpu.call, self._gpu.driver.cuMemcpyHtoDAsync
        call(copy, address, source.ctypes.data, source.nbytes, self._stream)

    def _fetch(self, destination: Bytes, address: int) -> None:
        call, copy = self._gpu.call, self._gpu.driver.cuMemcpyDtoHAsync
        call(copy, destination.ctypes.data, address, destination.nbytes, self._stream)


def _bytes_of(x: Array) -> Bytes:
    return x.reshape(-1).view(np.uint8)
