"""Byte-addressed memory with a shadow byte for every byte, and named buffers in it."""

from __future__ import annotations

import bisect
import math
import mmap
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import EmulatorError
from ..ptx.types import GLOBAL_BASE, VIEW_DTYPE
from .host_array import HostArray

# States of a byte. Allocated but never written is 0, so that untouched pages of large buffers cost nothing.
# PENDING: a cp.async is still writing it.
UNALLOCATED, INITIALISED, PENDING = 1, 2, 4
_STATES = np.uint8(INITIALISED), np.uint8(UNALLOCATED)  # marks of an element's bytes and of gaps
GUARD = 256  # unallocated bytes between buffers
_ONES: dict[int, Any] = {
    1: np.uint8(0x01),
    2: np.uint16(0x0101),
    4: np.uint32(0x01010101),
    8: np.uint64(0x0101010101010101),
}
_FAR = 1 << 20
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def sparse_zeros(count: int, dtype: Any = np.uint8) -> np.ndarray:
    """Zeros that take memory only where they are written."""
    nbytes = count * np.dtype(dtype).itemsize
    if nbytes < 1 << 26 or not _MAP_NORESERVE:
        return np.zeros(count, dtype)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return np.frombuffer(pages, dtype)


class ByteSpace:
    """Data bytes, their shadow bytes, and typed views of both."""

    def __init__(self, nbytes: int) -> None:
        nbytes = (max(nbytes, 32) + 31) // 32 * 32
        self.data = sparse_zeros(nbytes)
        self.shadow = sparse_zeros(nbytes)
        self.views = {name: self.data.view(dtype) for name, dtype in VIEW_DTYPE.items()}
        self._wide = {size: self.shadow.view(f"u{size}") for size in (1, 2, 4, 8)}

    def __len__(self) -> int:
        return len(self.data)

    def verify(self, off: np.ndarray, size: int, load: bool, init_check: bool) -> bool:
        """Whether accesses, aligned and in range, are all allowed; a store marks its bytes initialised."""
        unit = min(size, 8)
        group = off >> (unit.bit_length() - 1)
        wide, one = self._wide[unit], _ONES[unit]
        ready, blocked = one * one.dtype.type(INITIALISED), one * one.dtype.type(UNALLOCATED | PENDING)
        for q in range(size // unit):
            states = wide[group + q if q else group]
            if load and init_check:
                if not (states == ready).all():
                    return False
            elif np.bitwise_or.reduce(states) & blocked:
                return False
        if not load:
            for q in range(size // unit):
                wide[group + q if q else group] = ready
        return True

    def diagnose(self, off: np.ndarray, size: int) -> tuple[int, str]:
        """The index of the first bad access, and what is wrong with it."""
        states = np.stack([self.shadow[off + q] for q in range(size)])
        for state, reason in ((UNALLOCATED, "out of bounds"), (PENDING, "cp.async still in flight")):
            bad = ((states & state) != 0).any(0)
            if bad.any():
                return int(bad.argmax()), reason
        return int((states != INITIALISED).any(0).argmax()), "uninitialised"


class Buffer:
    """A named array in device memory, without the gaps that its strides leave between elements.

    Attributes
    ----------
    name : str
        Its name in faults.
    address : int
        Device address of element 0, to pass for a pointer.
    shape, strides, dtype
        As those of a NumPy array.
    nbytes : int
        Bytes from its lowest to its highest, gaps included.
    read_only : bool
        Whether a store to it is a fault.
    zeroed : bool
        Whether its bytes began as zeros that an atomic may be the first to access.
    written : bool
        Whether a kernel has stored to it.
    source : HostArray or None
        The contents as long as nothing has touched them; without it the bytes are uninitialised.
    """

    def __init__(
        self, memory: Memory, offset: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], name: str
    ) -> None:
        self.memory, self.shape, self.dtype, self.strides, self.name = memory, shape, np.dtype(dtype), strides, name
        low, high = extent(shape, strides, self.dtype.itemsize)
        self.offset, self.nbytes, self._origin = offset, high - low, offset - low
        self.size = math.prod(shape)
        self.freed = self.read_only = self.zeroed = self.written = False
        self.source: HostArray | None = None

    @property
    def address(self) -> int:
        return GLOBAL_BASE + self._origin

    def bytes_in(self, flat: np.ndarray) -> np.ndarray:
        """This buffer's part, ``(*shape, itemsize)``, of a uint8 or bool array over all of device memory."""
        if self.freed:
            raise EmulatorError(f"buffer {self.name!r} was freed")
        shape, strides = (*self.shape, self.dtype.itemsize), (*self.strides, 1)
        return np.ndarray(shape, flat.dtype, flat, self._origin, strides)

    def fetch(self, low: int = 0, high: int | None = None) -> bool:
        """Copy the bytes `low` to `high` from its source, and return whether any were left to copy."""
        if self.freed:
            raise EmulatorError(f"buffer {self.name!r} was freed")
        source = self.source
        if source is None:
            return False
        first = max(low, 0) // source.page_bytes
        last = ((self.nbytes if high is None else high) - 1) // source.page_bytes
        return self._copy(first + np.flatnonzero(source.absent[first : last + 1]))

    def fetch_at(self, off: np.ndarray, size: int) -> bool:
        """As `fetch`, for `size` bytes at each offset in device memory that lies in the buffer."""
        source = self.source
        if source is None:
            return False
        low, high = int(off.min()) - self.offset, int(off.max()) - self.offset + size
        first, last = max(low, 0) // source.page_bytes, (high - 1) // source.page_bytes
        if not source.absent[first : last + 1].any():
            return False
        wanted = np.zeros(len(source.absent), np.bool_)
        for at in (off - self.offset, off - (self.offset - size + 1)):
            if low < 0 or high > self.nbytes:
                at = at[(at >= 0) & (at < self.nbytes)]
            wanted[at // source.page_bytes] = True
        return self._copy(np.flatnonzero(wanted & source.absent))

    def _copy(self, pages: np.ndarray) -> bool:
        space, source = self.memory.space, self.source
        assert source is not None
        for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1) if len(pages) else ():
            span = slice(source.page(run[0]).start, source.page(run[-1]).stop)
            there = slice(self.offset + span.start, self.offset + span.stop)
            space.data[there] = source.bytes[span]
            elements = source.elements(span)
            space.shadow[there] = INITIALISED if elements is True else np.where(elements, *_STATES)
        source.absent[pages] = False
        return len(pages) > 0

    def view(self) -> np.ndarray:
        """A writable view of the device bytes; a write through it does not mark them initialised."""
        self.fetch()
        data = self.memory.space.data
        return np.ndarray(self.shape, self.dtype, data, self._origin, self.strides)

    def get(self) -> np.ndarray:
        """A copy of the contents."""
        return self.view().copy()

    def set(self, array: Any) -> None:
        """Fill the buffer."""
        self.view()[...] = array
        self.mark(True)

    def initialised(self) -> np.ndarray:
        """Which elements have been written completely, as a boolean array of the buffer's shape."""
        self.fetch()
        return np.asarray((self.bytes_in(self.memory.space.shadow) == INITIALISED).all(-1))

    def mark(self, initialised: bool, where: Any = ...) -> None:
        """Mark the elements at a NumPy index as initialised or not."""
        self.fetch()
        itemsize, state = self.dtype.itemsize, INITIALISED if initialised else 0
        if itemsize not in _ONES:
            self.bytes_in(self.memory.space.shadow)[where] = state
        else:  # one store for all bytes of an element
            shadow = np.ndarray(self.shape, f"u{itemsize}", self.memory.space.shadow, self._origin, self.strides)
            shadow[where] = _ONES[itemsize] * shadow.dtype.type(state)

    def place(self, offset: int) -> str:
        """Describe where in the buffer an offset in device memory lies."""
        words = f"byte {offset - self.offset} of {self.nbytes} in {'freed ' if self.freed else ''}{self.name}"
        left, index = offset - self._origin, [0] * len(self.shape)
        if min(self.strides, default=0) < 0 or 0 in self.shape:
            return words
        for axis in sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis]):
            if self.strides[axis]:
                index[axis] = min(left // self.strides[axis], self.shape[axis] - 1)
                left -= index[axis] * self.strides[axis]
        element = f"{self.name}[{', '.join(map(str, index))}]"
        return f"{words}, {'at' if left < self.dtype.itemsize else 'in the gap after'} {element}"

    def __repr__(self) -> str:
        return f"Buffer({self.name!r}, {self.shape}, {self.dtype}, address={self.address:#x})"


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """The first byte of a strided array and one past the last, relative to element 0."""
    if 0 in shape:
        return 0, 0
    spans = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    return sum(min(span, 0) for span in spans), sum(max(span, 0) for span in spans) + itemsize


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


class Memory:
    """Global memory: buffers, with guard zones between them.

    No address is reused, so that every use after free is detected.

    Parameters
    ----------
    memory_bytes : int
        Address space. It takes memory only where it is written: hundreds of GiB are fine on Linux.
    """

    def __init__(self, memory_bytes: int = 64 << 20) -> None:
        if memory_bytes < 0:
            raise EmulatorError(f"memory_bytes must be >= 0, got {memory_bytes}")
        self.space = ByteSpace(memory_bytes)
        self.buffers: list[Buffer] = []
        self._starts: list[int] = []
        self.extent = GUARD  # the end of the last buffer and its guard; all above is unallocated
        self.space.shadow[: self.extent] = UNALLOCATED
        self._symbols: dict[tuple[int, str], tuple[Buffer, Mapping[str, np.ndarray]]] = {}

    def reserve(self, nbytes: int) -> None:
        """Make room for `nbytes` more bytes, in a larger address space if need be."""
        need = self.extent + nbytes
        if need > len(self.space):
            old, self.space = self.space, ByteSpace(max(need, 2 * len(self.space)))
            self.space.data[: self.extent] = old.data[: self.extent]
            self.space.shadow[: self.extent] = old.shadow[: self.extent]

    def _place(
        self, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], name: str | None, align: int, phase: int
    ) -> Buffer:
        """A guarded buffer whose lowest byte is `phase` modulo `align`; its bytes are uninitialised."""
        offset = self.extent + (phase - self.extent) % align
        buffer = Buffer(self, offset, shape, dtype, strides, name or f"buffer{len(self.buffers)}")
        end = offset + buffer.nbytes
        if end + GUARD > len(self.space):
            raise MemoryError(f"device memory exhausted: {buffer.name} needs {buffer.nbytes} bytes at offset {offset}")
        self.space.shadow[self.extent : offset] = UNALLOCATED
        self.space.shadow[end : end + GUARD] = UNALLOCATED
        self.extent = end + GUARD
        self.buffers.append(buffer)
        self._starts.append(offset)
        return buffer

    def alloc(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = np.uint8,
        name: str | None = None,
        *,
        align: int = 256,
        poison: bool = True,
    ) -> Buffer:
        """Allocate a contiguous buffer of uninitialised bytes.

        Parameters
        ----------
        shape : int or tuple of int
            Shape of the array.
        dtype : dtype
            The elements' dtype.
        name : str, optional
            Its name in faults.
        align : int
            Alignment in bytes.
        poison : bool
            Fill it with 0xA5; False for a buffer so large that its pages must stay untouched.

        Returns
        -------
        Buffer

        Raises
        ------
        EmulatorError
            A size is negative, or the alignment is not positive.
        MemoryError
            The address space is exhausted.
        """
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if min(shape, default=0) < 0:
            raise EmulatorError(f"shape must be sizes >= 0, got {shape}")
        if align < 1:
            raise EmulatorError(f"align must be >= 1, got {align}")
        dtype = np.dtype(dtype)
        buffer = self._place(shape, dtype, _contiguous(shape, dtype.itemsize), name, align, 0)
        if poison:
            self.space.data[buffer.offset : buffer.offset + buffer.nbytes] = 0xA5
        return buffer

    def upload(self, array: Any, name: str | None = None, *, align: int = 256) -> Buffer:
        """Copy an array into a new contiguous buffer; `name` and `align` as in `alloc`."""
        array = np.asarray(array)
        buffer = self.alloc(array.shape, array.dtype, name, align=align, poison=False)
        buffer.set(array)
        return buffer

    def mirror(self, array: np.ndarray, name: str | None = None, *, aligned: bool = False) -> Buffer:
        """A new buffer with an array's strides, read-only flag, and address modulo 256, which is 0 if `aligned`.

        A part of the array is copied when something first touches it.
        """
        address = array.__array_interface__["data"][0]
        low, _ = extent(array.shape, array.strides, array.itemsize)
        phase = 0 if aligned else (address + low) % 256
        buffer = self._place(array.shape, array.dtype, array.strides, name, 256, phase)
        buffer.source = HostArray(array)
        buffer.read_only = not array.flags.writeable
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Free a buffer; any later access to it is a fault."""
        self.space.shadow[buffer.offset : buffer.offset + buffer.nbytes] = UNALLOCATED
        buffer.freed, buffer.source = True, None

    def fetch(self, off: np.ndarray, size: int) -> bool:
        """Copy what an access needs and is still on the host, and return whether there was anything."""
        first = bisect.bisect_right(self._starts, int(off.min())) - 1
        last = bisect.bisect_right(self._starts, int(off.max()) + size - 1) - 1
        touched = [buffer for buffer in self.buffers[max(first, 0) : last + 1] if buffer.source is not None]
        return sum([buffer.fetch_at(off, size) for buffer in touched]) > 0

    def describe(self, address: int) -> str:
        """Describe where an address points."""
        offset = int(address) - GLOBAL_BASE
        i = bisect.bisect_right(self._starts, offset) - 1
        near: list[tuple[int, str]] = []
        for buffer in self.buffers[max(i, 0) : i + 2]:
            if buffer.offset <= offset < buffer.offset + buffer.nbytes:
                return buffer.place(offset)
            if buffer.offset <= offset:
                near.append((offset - buffer.offset - buffer.nbytes, f"bytes past the end of {buffer.name}"))
            else:
                near.append((buffer.offset - offset, f"bytes before {buffer.name}"))
        distance, words = min(near, default=(_FAR, ""))
        return f"{distance} {words}" if distance < _FAR else "far from every buffer"

    def buffer_index(self, off: np.ndarray) -> np.ndarray:
        """The indices into `buffers` of valid byte offsets."""
        return np.searchsorted(np.asarray(self._starts), off, side="right") - 1

    def note_store(self, off: np.ndarray) -> int | None:
        """Mark buffers as written, and return the index of the first offset into a read-only one, or None."""
        first = bisect.bisect_right(self._starts, int(off.min())) - 1
        last = bisect.bisect_right(self._starts, int(off.max())) - 1
        if first == last:
            touched = [first]
        else:
            index = self.buffer_index(off)
            touched = np.unique(index).tolist()
        for i in touched:
            if self.buffers[i].read_only:
                return 0 if first == last else int((index == i).argmax())
        for i in touched:
            self.buffers[i].written = True
        return None

    def zeroed(self, off: np.ndarray) -> bool:
        """Whether all offsets lie in buffers that began as zeros."""
        return all(self.buffers[i].zeroed for i in np.unique(self.buffer_index(off)).tolist())

    def module_symbol(self, variables: Mapping[str, np.ndarray], name: str) -> Buffer:
        """The buffer of a module's .global or .const variable, made when it is first used."""
        key = (id(variables), name)
        if key not in self._symbols:
            contents = variables[name]
            self.reserve(contents.nbytes + 2 * GUARD)
            # Keep the mapping alive, since its id is the key.
            self._symbols[key] = (self.upload(contents, f"symbol {name[:60]}"), variables)
        return self._symbols[key][0]
