"""The CUDA driver as Devices: one for each GPU and stream, and one for the graphs that are captured there.

A launch allocates nothing, waits for nothing and reads nothing back: the first launch like it makes the kernel, the
launch configuration and the workspaces.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import starmap
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..compiler.compile import Capability, CompiledKernel
from ..environment import is_on
from ..placement import Placement
from .copies import StreamCopies
from .device import REPORT
from .gpu import LEGACY_STREAM, PER_THREAD_STREAM, Gpu, bindings

MOST_PREPARED = 1024


class _Thread(threading.local):
    """An object for each thread, instead of the thread's number, which a later thread may get."""

    def __init__(self) -> None:
        self.token = object()


_lock = threading.RLock()
_thread = _Thread()
_gpus: dict[int, Gpu] = {}
_devices: dict[tuple[int, int, object, bool], CudaDevice] = {}


def cuda_device(ordinal: int, stream: int) -> CudaDevice:
    """The device of a GPU and a stream: always the same object, but another one while a graph is captured there.

    Parameters
    ----------
    ordinal : int
        Which GPU.
    stream : int
        A ``cudaStream_t``: 0 or 1 is the legacy default stream, 2 the default stream of this thread.

    Raises
    ------
    BackendUnavailableError
        There is no CUDA driver, it is too old, there is no such GPU, it is too old, or cuda-core is not installed.
    """
    stream = stream or LEGACY_STREAM
    gpu = _gpus.get(ordinal) or _gpu(ordinal)
    # Each thread has its own per-thread stream, which needs its own workspaces.
    thread = _thread.token if stream == PER_THREAD_STREAM else None
    key = (ordinal, stream, thread, gpu.is_captured(stream))
    device = _devices.get(key)
    if device is None:
        with _lock:
            device = _devices.get(key)
            if device is None:
                device = _devices[key] = CudaDevice(gpu, stream, for_graphs=key[-1])
    return device


@contextmanager
def device_of(placement: Placement) -> Iterator[CudaDevice]:
    """The device that launches the kernels of a call. It holds the stream's lock: no other thread launches there.

    Raises
    ------
    BackendUnavailableError
        As `cuda_device`.
    """
    device = cuda_device(placement.ordinal, placement.stream)
    with device.lock:
        yield device


def wants_lineinfo() -> bool:
    """Whether ``PAGEDKV_LINEINFO=1`` asks for kernels with the lines of their source, which profilers show."""
    return is_on("PAGEDKV_LINEINFO")


def cuda_devices() -> list[CudaDevice]:
    """All devices that `cuda_device` has made, in that order."""
    return list(_devices.values())


def refuse_capture(streams: Iterable[int], reason: str) -> None:
    """Raise RuntimeError if one of the streams is being captured; there is none before the first `cuda_device`.

    Parameters
    ----------
    streams : iterable of int
        As in `cuda_device`.
    reason : str
        What a CUDA graph cannot capture, and what to do instead.
    """
    given = list(streams)
    for gpu in list(_gpus.values()):  # all of them: each has its own per-thread stream
        for stream in given:
            gpu.refuse_capture(stream or LEGACY_STREAM, reason)


def capabilities() -> list[Capability]:
    """The compute capabilities of all GPUs that the driver sees, in their order.

    Raises
    ------
    BackendUnavailableError
        As `cuda_device`.
    """
    count = _gpu(0).count
    return [_gpu(ordinal).capability for ordinal in range(count)]


def _gpu(ordinal: int) -> Gpu:
    with _lock:
        if ordinal not in _gpus:
            _gpus[ordinal] = Gpu(ordinal, *bindings())
        return _gpus[ordinal]


class CudaDevice:
    """A GPU and a stream, as `cuda.device.Device` describes it.

    A graph that was captured on the stream may be replayed on any other one, so graphs do not share workspaces with
    calls. The workspaces of graphs are never freed, since nothing tells when the last graph that uses them is gone.

    Parameters
    ----------
    gpu : Gpu
    stream : int
        Not 0.
    for_graphs : bool
        Whether it launches what is captured on the stream, and not what runs there at once.

    Attributes
    ----------
    lock : threading.RLock
        Held while a call launches: its launches share workspaces, so those of other threads must not come between.
    num_bytes : int
        Bytes of its workspaces on the GPU, with those that have been outgrown but that a graph may still use.
    epoch : int
        Another number whenever a workspace has moved or was freed.
    """

    def __init__(self, gpu: Gpu, stream: int, *, for_graphs: bool = False) -> None:
        self.capability = gpu.capability
        self.max_shared_bytes = gpu.max_shared_bytes
        self.lineinfo = wants_lineinfo()
        self._gpu = gpu
        self._handle = stream
        self._for_graphs = for_graphs
        self._stream = gpu.core.Stream.from_handle(stream)
        self._launch = gpu.core.launch
        self._start = gpu.driver.cuLaunchKernelEx
        self._current_context = gpu.driver.cuCtxGetCurrent
        self._context = gpu.context
        self._prepared: dict[tuple[CompiledKernel, tuple[int, int, int], int], tuple[Any, Any]] = {}
        self._workspaces: dict[str, tuple[int, int]] = {}
        self._copies = StreamCopies(gpu, stream)
        self.num_bytes = self.epoch = 0
        self.lock = threading.RLock()

    def address(self, name: str, array: Array) -> int:
        """The address in the array, which is never read."""
        return int(array.__array_interface__["data"][0])

    def scratch(self, name: str, nbytes: int) -> int:
        """The address of a workspace of at least `nbytes` bytes, zero when it is new; see `Device`.

        Raises
        ------
        MemoryError
            The GPU has no room for it. The old workspace is still there.
        """
        held = self._workspaces.get(name)
        if held is None or held[1] < nbytes:
            self._grow({name: nbytes}, ample=True)
            held = self._workspaces[name]
        return held[0]

    def reserve(self, needed: Mapping[str, int]) -> int:
        """Make workspaces of at least so many bytes, all or none of them, and return how many bytes that has added.

        Raises
        ------
        MemoryError
            As `scratch`.
        """
        before, held = self.num_bytes, self._workspaces
        lacking = {name: nbytes for name, nbytes in needed.items() if name not in held or held[name][1] < nbytes}
        if lacking:
            self._grow(lacking, ample=False)
        return self.num_bytes - before

    def _grow(self, needed: Mapping[str, int], *, ample: bool) -> None:
        """Replace workspaces by larger ones, all or none.

        If `ample`, they grow by half if there is room, so that growing, which waits for the GPU, is rare.
        """
        outgrown = [self._workspaces[name] for name in needed if name in self._workspaces]
        made: dict[str, tuple[int, int]] = {}
        with self._gpu.relaxed():
            if outgrown and not self._for_graphs:
                self._gpu.call(self._gpu.driver.cuStreamSynchronize, self._handle)
            try:
                for name, nbytes in needed.items():
                    _, held = self._workspaces.get(name, (0, 0))
                    made[name] = self._allocate(name, _round_up(nbytes), _round_up(held + held // 2) if ample else 0)
            except BaseException:
                for address, _ in made.values():
                    self._gpu.driver.cuMemFree(address)
                raise
            self.epoch += 1
            self._workspaces.update(made)
            self.num_bytes += sum(nbytes for _, nbytes in made.values())
            if not self._for_graphs:
                for workspace in outgrown:
                    self._free(*workspace)

    def _allocate(self, name: str, nbytes: int, ample: int) -> tuple[int, int]:
        if ample > nbytes:
            with suppress(MemoryError):
                return self._gpu.allocate(ample), ample
        try:
            return self._gpu.allocate(nbytes), nbytes
        except MemoryError as error:
            raise MemoryError(
                f"workspace {name} needs {nbytes} bytes ({error}): make room, as pagedkv.release_workspaces(), "
                "torch.cuda.empty_cache() and cupy.get_default_memory_pool().free_all_blocks() do, or give a lower "
                "max_seq_len, narrower block_tables or fewer sequences"
            ) from error

    def _free(self, address: int, nbytes: int) -> None:
        self.num_bytes -= nbytes
        try:
            self._gpu.call(self._gpu.driver.cuMemFree, address)
        except RuntimeError:
            self.num_bytes += nbytes
            raise

    def release(self) -> int:
        """Wait until the GPU is done, free the workspaces that no graph uses, and return how many bytes they were.

        Bad entries that have not been raised stay.
        """
        if self._for_graphs:
            return 0
        with self.lock, self._gpu.relaxed():
            before = self.num_bytes
            names = [name for name in self._workspaces if name != REPORT]
            if names:
                # Wait for the whole GPU: the stream may have been destroyed since.
                self._gpu.call(self._gpu.driver.cuCtxSynchronize)
            self.epoch += 1
            for name in names:
                held = self._workspaces.pop(name)  # before it is freed: an interrupt may come right after
                try:
                    self._free(*held)
                except RuntimeError:
                    self._workspaces[name] = held
                    raise
            return before - self.num_bytes

    def blocks_at_once(self, kernel: CompiledKernel, shared_bytes: int) -> int:
        """How many thread blocks of a kernel run at the same time; see `Device`."""
        with self._gpu.relaxed():
            return self._gpu.blocks_at_once(kernel, shared_bytes)

    def launch(
        self, kernel: CompiledKernel, grid: tuple[int, int, int], args: Sequence[int | float], shared_bytes: int = 0
    ) -> None:
        """Start a kernel on the stream; see `Device`."""
        prepared = self._prepared.get((kernel, grid, shared_bytes))
        if prepared is None:
            with self._gpu.relaxed():  # around the launch too: the driver may load the kernel's code only then
                self._launch(self._stream, *self._prepare(kernel, grid, shared_bytes), *args)
        elif self._current_context()[1] == self._context:
            self._launch(self._stream, *prepared, *args)
        else:
            with self._gpu.current():
                self._launch(self._stream, *prepared, *args)

    def prepare_all(
        self, launches: Sequence[tuple[CompiledKernel, tuple[int, int, int], int, Any]]
    ) -> list[tuple[Any, ...]]:
        """Load kernels, and return their launches for `start`.

        Parameters
        ----------
        launches : sequence of (kernel, grid, shared_bytes, parameters)
            `parameters` is a ctypes array of the addresses of the parameters, which are read at each start.
        """
        driver, prepared = self._gpu.driver, []
        with self._gpu.relaxed():
            for kernel, grid, shared_bytes, parameters in launches:
                config = driver.CUlaunchConfig()
                config.gridDimX, config.gridDimY, config.gridDimZ = grid
                config.blockDimX, config.blockDimY, config.blockDimZ = kernel.num_threads, 1, 1
                config.sharedMemBytes, config.hStream = shared_bytes, driver.CUstream(self._handle)
                handle = int(self._gpu.kernel(kernel, shared_bytes).handle)
                prepared.append((config, driver.CUfunction(handle), parameters, 0))
        return prepared

    def start(self, prepared: Sequence[tuple[Any, ...]], is_ready: bool) -> None:
        """Start kernels in order; no interrupt can come between two of them.

        Parameters
        ----------
        prepared : sequence
            From `prepare_all`.
        is_ready : bool
            Whether they were started before: else the driver may load their code only now.
        """
        if is_ready and self._current_context()[1] == self._context:
            results = [*starmap(self._start, prepared)]  # a loop of C, in which Python looks for no interrupt
        else:
            with self._gpu.current() if is_ready else self._gpu.relaxed():
                results = [*starmap(self._start, prepared)]
        for result in results:
            if result[0]:
                self._gpu.values_of(self._start, result)

    def _prepare(self, kernel: CompiledKernel, grid: tuple[int, int, int], shared_bytes: int) -> tuple[Any, Any]:
        config = self._gpu.core.LaunchConfig(grid=grid, block=kernel.num_threads, shmem_size=shared_bytes)
        with _lock:
            prepared = config, self._gpu.kernel(kernel, shared_bytes)
            if len(self._prepared) >= MOST_PREPARED:
                self._prepared.clear()
            self._prepared[kernel, grid, shared_bytes] = prepared
        return prepared

    def copy_from_host(self, parts: Sequence[tuple[int, Array]]) -> None:
        """Copy arrays of the host to addresses, in the order of the stream; see `Device`.

        Raises
        ------
        RuntimeError
            The stream is being captured.
        MemoryError
            The host has no room for pinned memory.
        """
        with self._copying() as copies:
            copies.to_device(parts)

    def copy_to_host(self, parts: Sequence[tuple[Array, int]]) -> None:
        """Fill arrays of the host from addresses, in the order of the stream; see `Device`.

        Raises
        ------
        RuntimeError, MemoryError
            As `copy_from_host`.
        """
        with self._copying() as copies:
            copies.to_host(parts)

    @contextmanager
    def _copying(self) -> Iterator[StreamCopies]:
        if self._for_graphs:
            raise RuntimeError(
                "the stream is being captured by a CUDA graph, and copies between host and device are not for a "
                "replay: make them before the capture"
            )
        with self._gpu.relaxed():
            yield self._copies

    def take(self, name: str) -> npt.NDArray[np.uint8] | None:
        """Wait until the GPU is done, return the bytes of a workspace, and zero them; see `Device`."""
        if name not in self._workspaces:
            return None
        # Under the lock: between the copy and the memset, a write by another thread's kernel would be lost.
        with self.lock, self._gpu.relaxed():
            address, nbytes = self._workspaces[name]
            content = np.empty(nbytes, np.uint8)
            # Wait for the whole GPU: the stream may have been destroyed since.
            self._gpu.call(self._gpu.driver.cuCtxSynchronize)
            self._gpu.call(self._gpu.driver.cuMemcpyDtoH, content.ctypes.data, address, nbytes)
            if content.any():
                self._gpu.call(self._gpu.driver.cuMemsetD8, address, 0, nbytes)
                self._gpu.call(self._gpu.driver.cuCtxSynchronize)
        return content


def _round_up(nbytes: int) -> int:
    return -(-nbytes // 256) * 256
