"""The bytes of each buffer that a launch read and wrote."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import EmulatorError
from .memory import Buffer, Memory, sparse_zeros


class Footprint:
    """The global memory that one launch touched, by buffer name."""

    def __init__(self, buffers: list[Buffer], read: np.ndarray, written: np.ndarray) -> None:
        self._buffers = {buffer.name: buffer for buffer in buffers if not buffer.freed}
        self._flat = {"read": read, "written": written}

    def _bytes(self, what: str, name: str) -> np.ndarray:
        if name not in self._buffers:
            raise EmulatorError(f"no buffer is called {name!r}; there are {', '.join(self._buffers)}")
        return self._buffers[name].bytes_in(self._flat[what])

    def read_bytes(self, name: str) -> np.ndarray:
        """Which bytes of a buffer the launch read, as a boolean array ``(*shape, itemsize)``."""
        return self._bytes("read", name).copy()

    def written_bytes(self, name: str) -> np.ndarray:
        """Which bytes of a buffer the launch wrote, as a boolean array ``(*shape, itemsize)``."""
        return self._bytes("written", name).copy()

    def read(self, name: str) -> np.ndarray:
        """Which elements the launch read any byte of, as a boolean array of the buffer's shape."""
        return np.asarray(self._bytes("read", name).any(-1))

    def written(self, name: str) -> np.ndarray:
        """Which elements the launch wrote every byte of, as a boolean array of the buffer's shape."""
        return np.asarray(self._bytes("written", name).all(-1))

    def expect(self, name: str, *, read: Any = None, written: Any = None) -> None:
        """Assert that the launch touched exactly these elements of a buffer.

        Parameters
        ----------
        name : str
            The buffer.
        read, written : array_like of bool, optional
            The elements that must have been read, or written, and no others; broadcast to the buffer's shape. None
            skips the comparison.

        Raises
        ------
        AssertionError
            The launch touched others, or some of these only in part; the message counts them and names the first.
        """
        for what, wanted in (("read", read), ("written", written)):
            if wanted is None:
                continue
            touched = self._bytes(what, name)
            elements = np.broadcast_to(np.asarray(wanted, np.bool_), touched.shape[:-1])
            for words, wrong in (
                (f"{what} and not expected", touched.any(-1) & ~elements),
                (f"expected and not wholly {what}", elements & ~touched.all(-1)),
            ):
                if wrong.any():
                    first = tuple(int(i) for i in np.argwhere(wrong)[0])
                    raise AssertionError(f"{name}: {np.count_nonzero(wrong)} elements {words}, the first at {first}")


class FootprintRecorder:
    """Marks bytes as a launch accesses them."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        nbytes = (memory.extent + 31) // 32 * 32
        self._flat = [sparse_zeros(nbytes, np.bool_) for _ in range(2)]
        self._wide = [{size: flat.view(f"u{size}") for size in (1, 2, 4, 8)} for flat in self._flat]

    def access(self, off: np.ndarray, size: int, load: bool, store: bool) -> None:
        """Record an access of `size` bytes, aligned to its size or to 8, at each offset."""
        unit = min(size, 8)
        ones = int.from_bytes(b"\1" * unit, "little")
        group = off >> (unit.bit_length() - 1)
        for wide, touched in zip(self._wide, (load, store), strict=True):
            if touched:
                for q in range(size // unit):
                    wide[unit][group + q] = ones

    def finish(self) -> Footprint:
        """The footprint of all accesses."""
        return Footprint(list(self._memory.buffers), *self._flat)
