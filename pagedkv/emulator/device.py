"""The emulator as a device in place of a GPU: each NumPy array is a buffer with bounds of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from .errors import EmulatorError
from .machine.launch import MAX_SHARED_BYTES, Device
from .ptx.types import GLOBAL_BASE
from .state.host_array import HostArray
from .state.memory import GUARD, INITIALISED, UNALLOCATED, Buffer, extent
from .state.stats import LaunchStats
from .state.warp_trace import Warp, require_warp
from .translation.entry import Entry, Module


class Kernel(Protocol):
    """What the emulator needs to know about a compiled kernel."""

    @property
    def name(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def ptx(self) -> str: ...
    @property
    def num_threads(self) -> int | Sequence[int]: ...


@functools.lru_cache(maxsize=256)
def _entry(ptx: str, name: str) -> Entry:
    return Module(ptx).entry(name)


def _large_device() -> Device:
    try:
        return Device(1 << 40)
    except (OSError, MemoryError, ValueError):  # no overcommit: this system backs address space with memory
        return Device(1 << 20)


class EmulatorDevice:
    """Runs kernels on copies of NumPy arrays, and copies back when the ``with`` statement ends without an exception.

    Pages of an array are copied when something first touches them: a large array takes no memory for the rest. Each
    array becomes a buffer of exactly its bytes, with the array's own alignment. An access between the elements of a
    strided array, or one byte past its end, is out of bounds even if another array owns that memory. Arrays that
    overlap in part become separate copies; the same array passed twice is one buffer.

    Parameters
    ----------
    seed : int, optional
        Run thread blocks and warps in a random order; without a seed they run in lock-step.
    race, global_race, init_check : bool
        Look for races on shared memory, for conflicting accesses to global memory by different thread blocks, and for
        loads of bytes that nothing has written.
    stats, footprint : bool
        Count memory traffic; record which bytes each launch reads and writes.
    trace : Warp, optional
        Record each instruction of this warp, in every launch that has it.

    Attributes
    ----------
    capability : tuple of int
        Compute capability to compile kernels for.
    max_shared_bytes : int
        Shared memory of one thread block.
    lineinfo : bool
        Whether kernels are compiled with line information, so that faults name Python lines; it is True.
    num_blocks_at_once : int
        Thread blocks that are said to run at the same time.
    launches : list of LaunchStats
        What each launch did.
    memory : Device
        The memory that holds the buffers; allocate from it for buffers without an array.

    Raises
    ------
    EmulatorError
        `launch` raises the kernel's fault, or refuses what hardware would refuse.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> from pagedkv import emulator
    >>> def double(x):
    ...     x[cuda.threadIdx.x] *= 2
    >>> x = np.arange(32, dtype=np.float32)
    >>> device = emulator.EmulatorDevice(stats=True, seed=1)
    >>> stats = emulator.run(double, 1, 32, x, device=device)
    >>> device.launches[0].bytes_read, device.launches[0].bytes_written
    (128, 128)
    """

    capability = (9, 0)
    max_shared_bytes = MAX_SHARED_BYTES
    lineinfo = True
    num_blocks_at_once = 8  # few, so that small launches let thread blocks take several parts of the work

    def __init__(
        self,
        *,
        seed: int | None = None,
        race: bool = True,
        global_race: bool = False,
        init_check: bool = True,
        stats: bool = False,
        footprint: bool = False,
        trace: Warp | None = None,
    ) -> None:
        require_warp(trace)
        self._options: dict[str, Any] = {"seed": seed, "race": race, "global_race": global_race}
        self._options |= {"init_check": init_check, "stats": stats, "footprint": footprint, "trace": trace}
        self.memory = _large_device()
        self._arrays: dict[tuple[object, ...], tuple[np.ndarray, Buffer]] = {}
        self._scratch: dict[str, Buffer] = {}
        self.launches: list[LaunchStats] = []

    def __repr__(self) -> str:
        return f"EmulatorDevice({', '.join(f'{name}={value}' for name, value in self._options.items())})"

    def again(self, trace: Warp | None = None) -> EmulatorDevice:
        """A device with the same settings and empty memory, which appends its launches to `launches` here.

        It traces `trace` if that is given.
        """
        fresh = copy.copy(self)
        fresh.memory, fresh._arrays, fresh._scratch = _large_device(), {}, {}
        fresh._options = self._options | ({} if trace is None else {"trace": trace})
        return fresh

    def __enter__(self) -> EmulatorDevice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            for _, buffer in self._arrays.values():
                if buffer.written and buffer.source is not None:
                    _copy_back(buffer, buffer.source)

    def address(self, name: str, array: np.ndarray, *, aligned: bool = False) -> int:
        """The device address of element 0 of a NumPy array, which faults call `name`.

        Modulo 256 it is the array's own address, or, if `aligned`, that of a copy that a GPU has just allocated.
        """
        key = (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype)
        _, buffer = self._arrays.get(key, (None, None))
        if buffer is None:
            low, high = extent(array.shape, array.strides, array.itemsize)
            self.memory.reserve(high - low + 3 * GUARD)
            buffer = self.memory.mirror(array, name, aligned=aligned)
            self._arrays[key] = array, buffer
        elif buffer.read_only and array.flags.writeable:  # another view of the same array is writable
            assert buffer.source is not None
            buffer.source.rebind(array)
            buffer.read_only = False
            self._arrays[key] = array, buffer
        return buffer.address

    def scratch(self, name: str, nbytes: int) -> int:
        """The address of a workspace of at least `nbytes` bytes, one for each name.

        It is zero when it is allocated and whenever it grows. Still, a load of bytes that no kernel has written is a
        fault; only an atomic may be the first to touch them.
        """
        if nbytes < 0:
            raise EmulatorError(f"nbytes must be >= 0, got {nbytes}")
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            self.memory.reserve(nbytes + 3 * GUARD)
            if buffer is not None:
                self.memory.free(buffer)
            buffer = self._scratch[name] = self.memory.alloc(nbytes, name=name, poison=False)
            buffer.zeroed = True
        return buffer.address

    def blocks_at_once(self, kernel: Kernel, shared_bytes: int) -> int:
        """How many thread blocks a launch that lets them take several parts of the work has at most."""
        return self.num_blocks_at_once

    def launch(
        self, kernel: Kernel, grid: int | Sequence[int], args: Sequence[int | float], shared_bytes: int = 0
    ) -> None:
        """Run a kernel to completion, and append its statistics to `launches`."""
        self.launches.append(
            self.memory.launch(
                _entry(kernel.ptx, kernel.entry),
                grid,
                kernel.num_threads,
                args,
                shared_bytes,
                max_shared_bytes=self.max_shared_bytes,
                name=kernel.name,
                **self._options,
            )
        )

    # -- copies
    def copy_from_host(self, parts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Copy C-contiguous arrays to device addresses."""
        for address, source in parts:
            buffer, where = self._span(address, source.nbytes)
            if buffer.read_only:
                raise EmulatorError(f"copy into the read-only array {buffer.name}")
            self.memory.space.data[where] = source.reshape(-1).view(np.uint8)
            self.memory.space.shadow[where] = INITIALISED
            buffer.written = True

    def copy_to_host(self, parts: Sequence[tuple[np.ndarray, int]]) -> None:
        """Fill C-contiguous arrays with the bytes at device addresses."""
        for destination, address in parts:
            _, where = self._span(address, destination.nbytes)
            destination.reshape(-1).view(np.uint8)[:] = self.memory.space.data[where]

    def take(self, name: str) -> np.ndarray | None:
        """Return the bytes of a workspace, and zero them; None if `scratch` has not made it."""
        buffer = self._scratch.get(name)
        if buffer is None:
            return None
        content = buffer.view().copy()
        buffer.view()[...] = 0
        return content

    def _span(self, address: int, nbytes: int) -> tuple[Buffer, slice]:
        first = address - GLOBAL_BASE
        inside = (b for b in self.memory.buffers if b.offset <= first and first + nbytes <= b.offset + b.nbytes)
        buffer = next((b for b in inside if not b.freed), None)
        where = slice(first, first + nbytes)
        if buffer is not None:
            buffer.fetch(first - buffer.offset, first - buffer.offset + nbytes)
        if buffer is None or (self.memory.space.shadow[where] & UNALLOCATED).any():
            place = self.memory.describe(address)
            raise EmulatorError(f"copy of {nbytes} bytes at address {address:#x} out of bounds ({place})")
        return buffer, where


def _copy_back(buffer: Buffer, source: HostArray) -> None:
    """Copy only bytes that differ, since arrays that overlap must not undo each other's results."""
    for number in np.flatnonzero(~source.absent).tolist():
        page = source.page(number)
        data = buffer.memory.space.data[buffer.offset + page.start : buffer.offset + page.stop]
        np.copyto(source.bytes[page], data, where=(source.bytes[page] != data) & source.elements(page))
