"""The CUDA driver as a Device: one for each GPU and stream.

Everything that touches the driver or cuda.core is here. A launch allocates nothing, waits for nothing and reads nothing
back: the first call like it makes its kernel, launch configuration and workspaces, outside of stream capture.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..errors import BackendUnavailableError
from ..placement import Placement
from . import INSTALL
from .compiler.compile import Capability, CompiledKernel
from .copies import Copies

# The default stream is named by what it always is, not by 0, which an environment variable can redefine.
LEGACY_STREAM, PER_THREAD_STREAM = 1, 2
FIRST_CAPABILITY = (8, 0)
MOST_PREPARED = 1024
_NO_GPU = 'or use backend="emulator" on host arrays'
_BEFORE_CAPTURE = "make one call with the largest shapes on this stream before the capture"

_lock = threading.RLock()
_gpus: dict[int, Gpu] = {}
_devices: dict[tuple[int, int, int], CudaDevice] = {}


def cuda_device(ordinal: int, stream: int) -> CudaDevice:
    """The device of a GPU and a stream, always the same one.

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
    # The per-thread stream is another one in each thread, and needs workspaces of its own.
    key = (ordinal, stream or LEGACY_STREAM, threading.get_ident() if stream == PER_THREAD_STREAM else 0)
    device = _devices.get(key)
    if device is None:
        with _lock:
            device = _devices.get(key)
            if device is None:
                device = _devices[key] = CudaDevice(_gpu(ordinal), key[1])
    return device


@contextmanager
def device_of(placement: Placement) -> Iterator[CudaDevice]:
    """What launches the kernels of a call. The stream's lock is held: no other thread launches on it meanwhile.

    Raises
    ------
    BackendUnavailableError
        As `cuda_device`.
    """
    device = cuda_device(placement.ordinal, placement.stream)
    with device.lock:
        yield device


def wants_lineinfo() -> bool:
    """True if ``PAGEDKV_LINEINFO=1`` asks for kernels with the lines of their source, which profilers show."""
    return os.environ.get("PAGEDKV_LINEINFO") == "1"


def cuda_devices() -> list[CudaDevice]:
    """Every device that `cuda_device` has given out, in that order."""
    return list(_devices.values())


def refuse_capture(streams: Iterable[int], reason: str) -> None:
    """Raise RuntimeError if one of the streams is being captured; none is before `cuda_device` has given out a device.

    Parameters
    ----------
    streams : iterable of int
        As in `cuda_device`.
    reason : str
        What a CUDA graph cannot capture, and what to do instead.
    """
    if gpu := next(iter(_gpus.values()), None):
        for stream in streams:
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
            _gpus[ordinal] = Gpu(ordinal, *_bindings())
        return _gpus[ordinal]


@cache
def _bindings() -> tuple[Any, Any]:
    """cuda.bindings.driver, started, and cuda.core."""
    try:
        import cuda.bindings
        import cuda.core as core
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendUnavailableError(
            f"kernels are launched by cuda-core, which cannot be imported ({error}): {INSTALL}"
        ) from error
    major = int(cuda.bindings.__version__.split(".")[0])
    wanted = f"the NVIDIA driver >= {525 if major == 12 else 580}"
    try:
        status, version = driver.cuDriverGetVersion()
    except RuntimeError as error:
        library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
        raise BackendUnavailableError(f"no CUDA driver ({library}) was found: install {wanted}, {_NO_GPU}") from error
    if int(status) == 0 and version < 1000 * major:
        raise BackendUnavailableError(
            f"the CUDA driver is for CUDA {version // 1000}.{version % 1000 // 10}, and the CUDA {major} packages are "
            f'installed: install {wanted}, or pip install "pagedkv[cu12]"'
        )
    (status,) = driver.cuInit(0)
    if int(status) != 0:
        raise BackendUnavailableError(
            f"the CUDA driver finds no GPU that it can use ({status.name}): see what nvidia-smi and "
            f"CUDA_VISIBLE_DEVICES say, {_NO_GPU}"
        )
    return driver, core


class Gpu:
    """What is the same for all streams of a GPU.

    Attributes
    ----------
    driver, core : module
        cuda.bindings.driver and cuda.core.
    ordinal, count : int
        Which GPU, of how many.
    handle : CUdevice
    capability : tuple of int
    max_shared_bytes : int
        What one block can have when it opts in.
    """

    def __init__(self, ordinal: int, driver: Any, core: Any) -> None:
        self.driver, self.core, self.ordinal = driver, core, ordinal
        self.count = int(self.call(driver.cuDeviceGetCount))
        if ordinal >= self.count:
            raise BackendUnavailableError(f"there is no GPU {ordinal}: the CUDA driver sees {self.count}")
        self.handle = self.call(driver.cuDeviceGet, ordinal)
        self.capability: Capability = (
            self._attribute("COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        if self.capability < FIRST_CAPABILITY:
            raise BackendUnavailableError(
                f"GPU {ordinal} has compute capability {self.capability[0]}.{self.capability[1]}, and kernels need "
                f'{FIRST_CAPABILITY[0]}.{FIRST_CAPABILITY[1]} (Ampere) or newer: use backend="cpu" on host arrays'
            )
        self.max_shared_bytes = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        # Never forgotten: a captured CUDA graph, or a launch that has not run yet, may need any of them.
        self._kernels: dict[CompiledKernel, Any] = {}
        self._opted_in: dict[CompiledKernel, int] = {}

    @cached_property
    def context(self) -> Any:
        """The primary context, which CuPy and torch use as well; made when it is first needed."""
        return self.call(self.driver.cuDevicePrimaryCtxRetain, self.handle)

    def call(self, function: Any, *args: Any) -> Any:
        """What a function of the driver returns beside its error code.

        Raises
        ------
        MemoryError
            The device, or the host where memory is pinned, has no room.
        RuntimeError
            Any other error code.
        """
        error, *values = function(*args)
        if int(error) != 0:
            kind = MemoryError if error == self.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
            raise kind(f"{function.__name__} failed on GPU {self.ordinal}: {error.name}")
        return values[0] if values else None

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call(self.driver.cuDeviceGetAttribute, attribute, self.handle))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU the thread's current one, and restore the one before at the end."""
        self.call(self.driver.cuCtxPushCurrent, self.context)
        try:
            yield
        finally:
            self.call(self.driver.cuCtxPopCurrent)

    def kernel(self, compiled: CompiledKernel, shared_bytes: int, stream: int) -> Any:
        """The kernel, loaded and allowed as much dynamic shared memory; this GPU must be current."""
        kernel = self._kernels.get(compiled)
        if kernel is None:
            self.refuse_capture(stream, f"kernel {compiled.name} has to be loaded: {_BEFORE_CAPTURE}")
            code = self.core.ObjectCode.from_cubin(compiled.cubin, name=compiled.name)
            kernel = self._kernels[compiled] = code.get_kernel(compiled.entry)
        if shared_bytes > self._opted_in.get(compiled, 0):
            attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call(self.driver.cuKernelSetAttribute, attribute, shared_bytes, kernel.handle, self.handle)
            self._opted_in[compiled] = shared_bytes
        return kernel

    def refuse_capture(self, stream: int, reason: str) -> None:
        """Raise RuntimeError if the stream is being captured."""
        status = self.call(self.driver.cuStreamIsCapturing, stream)
        if status != self.driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            raise RuntimeError(f"the stream is being captured by a CUDA graph, and {reason}")

    def is_pinned(self, address: int) -> bool:
        """True if memory of the host is known to the driver, so that the GPU copies to and from it by itself."""
        attribute = self.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        error, kind = self.driver.cuPointerGetAttribute(attribute, address)
        return int(error) == 0 and int(kind) == int(self.driver.CUmemorytype.CU_MEMORYTYPE_HOST)

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """New pinned memory of the host, which is never given back; this GPU must be current."""
        address = int(self.call(self.driver.cuMemHostAlloc, nbytes, self.driver.CU_MEMHOSTALLOC_PORTABLE))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class CudaDevice:
    """A GPU and a stream, as `cuda.device.Device` describes it.

    Workspaces and pinned memory are never given back: a captured graph may still use them. Each is at least one and a
    half times as large as the one before it.

    Parameters
    ----------
    gpu : Gpu
    stream : int
        Not 0.

    Attributes
    ----------
    lock : threading.RLock
        Held while a call launches: its launches share workspaces, so no other thread's may come between them.
    """

    def __init__(self, gpu: Gpu, stream: int) -> None:
        self.capability = gpu.capability
        self.max_shared_bytes = gpu.max_shared_bytes
        self.lineinfo = wants_lineinfo()
        self._gpu = gpu
        self._handle = stream
        self._stream = gpu.core.Stream.from_handle(stream)
        self._launch = gpu.core.launch
        self._current_context = gpu.driver.cuCtxGetCurrent
        self._context = int(gpu.context)
        self._prepared: dict[tuple[CompiledKernel, tuple[int, int, int], int], tuple[Any, Any]] = {}
        self._workspaces: dict[str, tuple[int, int]] = {}
        self._copies = Copies(gpu, stream)
        self.lock = threading.RLock()

    def address(self, name: str, array: Array) -> int:
        """The address that the array, which is never read, carries."""
        return int(array.__array_interface__["data"][0])

    def scratch(self, name: str, nbytes: int) -> int:
        """The address of a workspace of at least `nbytes` bytes, zero when it is new; see `Device`.

        Raises
        ------
        RuntimeError
            It would have to grow while the stream is being captured.
        MemoryError
            The GPU has no room for it.
        """
        held = self._workspaces.get(name)
        if held is None or held[1] < nbytes:
            with _lock:
                held = self._workspaces.get(name)
                if held is None or held[1] < nbytes:
                    held = self._workspaces[name] = self._allocate(name, nbytes, held[1] if held else 0)
        return held[0]

    def _allocate(self, name: str, nbytes: int, before: int) -> tuple[int, int]:
        nbytes = _grown(nbytes, before)
        with self._gpu.current():
            reason = f"workspace {name} has to grow to {nbytes} bytes: {_BEFORE_CAPTURE}"
            self._gpu.refuse_capture(self._handle, reason)
            address = int(self._gpu.call(self._gpu.driver.cuMemAlloc, nbytes))
            self._gpu.call(self._gpu.driver.cuMemsetD8Async, address, 0, nbytes, self._handle)
        return address, nbytes

    def launch(
        self, kernel: CompiledKernel, grid: tuple[int, int, int], args: Sequence[int | float], shared_bytes: int = 0
    ) -> None:
        """Start a kernel on the stream; see `Device`.

        Raises
        ------
        RuntimeError
            The kernel's first launch, while the stream is being captured.
        """
        prepared = self._prepared.get((kernel, grid, shared_bytes))
        if prepared is None:
            prepared = self._prepare(kernel, grid, shared_bytes)
        if int(self._current_context()[1]) == self._context:
            self._launch(self._stream, *prepared, *args)
        else:
            with self._gpu.current():
                self._launch(self._stream, *prepared, *args)

    def _prepare(self, kernel: CompiledKernel, grid: tuple[int, int, int], shared_bytes: int) -> tuple[Any, Any]:
        config = self._gpu.core.LaunchConfig(grid=grid, block=kernel.num_threads, shmem_size=shared_bytes)
        with _lock, self._gpu.current():
            prepared = config, self._gpu.kernel(kernel, shared_bytes, self._handle)
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
    def _copying(self) -> Iterator[Copies]:
        with self._gpu.current():
            self._gpu.refuse_capture(
                self._handle, "copies between host and device are not for a replay: make them before the capture"
            )
            yield self._copies

    def take(self, name: str) -> npt.NDArray[np.uint8] | None:
        """The bytes of a workspace once all work of the GPU is done, and zero from then on; see `Device`."""
        held = self._workspaces.get(name)
        if held is None:
            return None
        content = np.empty(held[1], np.uint8)
        with self._gpu.current():
            # Of the whole GPU: the stream may have been destroyed since.
            self._gpu.call(self._gpu.driver.cuCtxSynchronize)
            self._gpu.call(self._gpu.driver.cuMemcpyDtoH, content.ctypes.data, held[0], held[1])
            if content.any():
                self._gpu.call(self._gpu.driver.cuMemsetD8, held[0], 0, held[1])
                self._gpu.call(self._gpu.driver.cuCtxSynchronize)
        return content


def _grown(nbytes: int, before: int) -> int:
    return -(-max(nbytes, before + before // 2, 1) // 256) * 256
