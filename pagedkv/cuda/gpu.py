"""What the streams of a GPU share under the CUDA driver."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cached_property import cached_property
from ..compiler.compile import Capability, CompiledKernel
from ..errors import BackendUnavailableError
from ..extras import pip_install

# The default stream by its own name: an environment variable can redefine 0.
LEGACY_STREAM, PER_THREAD_STREAM = 1, 2
FIRST_CAPABILITY = (8, 0)
_NO_GPU = 'or use backend="emulator" on host arrays'


@cache
def bindings() -> tuple[Any, Any]:
    """Start the CUDA driver, and return cuda.bindings.driver and cuda.core."""
    import cuda.bindings
    import cuda.core as core
    from cuda.bindings import driver

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
            f"installed: install {wanted}, or {pip_install('cu12')}"
        )
    (status,) = driver.cuInit(0)
    if int(status) != 0:
        raise BackendUnavailableError(
            f"the CUDA driver finds no GPU that it can use ({status.name}): see what nvidia-smi and "
            f"CUDA_VISIBLE_DEVICES say, {_NO_GPU}"
        )
    return driver, core


class Gpu:
    """What the streams of a GPU share.

    Attributes
    ----------
    driver, core : module
        cuda.bindings.driver and cuda.core.
    ordinal, count : int
        The number of this GPU, and how many there are.
    handle : CUdevice
    capability : tuple of int
    max_shared_bytes : int
        Shared memory that one block can have when it opts in.
    num_multiprocessors : int
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
        self.num_multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        # Kept here, since every call asks whether its stream is captured.
        self._is_capturing = driver.cuStreamIsCapturing
        self._not_captured = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        # Never emptied: a captured CUDA graph, or a launch that has not run yet, may need any of them.
        self._kernels: dict[CompiledKernel, Any] = {}
        self._opted_in: dict[CompiledKernel, int] = {}

    @cached_property
    def context(self) -> Any:
        """The primary context, which CuPy and torch use as well; made when it is first needed."""
        return self.call(self.driver.cuDevicePrimaryCtxRetain, self.handle)

    def call(self, function: Any, *args: Any) -> Any:
        """Call a driver function, and return its results without the error code.

        Raises
        ------
        MemoryError
            The device, or the host where memory is pinned, has no room.
        RuntimeError
            Any other error code; if a capture forbids the call, the message says what to do.
        """
        return self.values_of(function, function(*args))

    def values_of(self, function: Any, results: tuple[Any, ...]) -> Any:
        """The results that a driver function has returned, without the error code; raises as `call`."""
        error, *values = results
        if int(error) != 0:
            codes, message = self.driver.CUresult, f"{function.__name__} failed on GPU {self.ordinal}: {error.name}"
            if error == codes.CUDA_ERROR_OUT_OF_MEMORY:
                raise MemoryError(message)
            if error in (codes.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, codes.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT):
                raise RuntimeError(
                    f"a stream of GPU {self.ordinal} is being captured, by this or another thread: call this after "
                    f"the capture ({message})"
                )
            raise RuntimeError(message)
        return values[0] if values else None

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call(self.driver.cuDeviceGetAttribute, attribute, self.handle))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU the thread's current one, and restore the previous one at the end."""
        self.call(self.driver.cuCtxPushCurrent, self.context)
        try:
            yield
        finally:
            self.call(self.driver.cuCtxPopCurrent)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """As `current`, but the driver also allocates and loads code while this or another thread captures a graph.

        None of that becomes part of the graph; whatever its replays need must not be freed.
        """
        driver = self.driver
        exchange, relaxed = driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode
        with self.current():
            mode = self.call(exchange, relaxed.CU_STREAM_CAPTURE_MODE_RELAXED)
            try:
                yield
            finally:
                self.call(exchange, mode)

    def kernel(self, compiled: CompiledKernel, shared_bytes: int) -> Any:
        """Load a kernel, and allow it this much dynamic shared memory; call it in `relaxed`."""
        kernel = self._kernels.get(compiled)
        if kernel is None:
            code = self.core.ObjectCode.from_cubin(compiled.cubin, name=compiled.name)
            kernel = self._kernels[compiled] = code.get_kernel(compiled.entry)
        if shared_bytes > self._opted_in.get(compiled, 0):
            attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call(self.driver.cuKernelSetAttribute, attribute, shared_bytes, kernel.handle, self.handle)
            self._opted_in[compiled] = shared_bytes
        return kernel

    def blocks_at_once(self, compiled: CompiledKernel, shared_bytes: int) -> int:
        """Thread blocks of a kernel that run on this GPU at the same time; call it in `relaxed`."""
        handle = self.driver.CUfunction(int(self.kernel(compiled, shared_bytes).handle))
        of_one = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return int(self.call(of_one, handle, compiled.num_threads, shared_bytes)) * self.num_multiprocessors

    def is_captured(self, stream: int) -> bool:
        """Whether a graph is being captured on the stream, which is not 0; any GPU may be current, or none."""
        if stream == LEGACY_STREAM:  # it is never captured, and asking fails while a stream that waits for it is
            return False
        if stream != PER_THREAD_STREAM:
            error, status = self._is_capturing(stream)
            if int(error) == 0:
                return bool(status != self._not_captured)
        with self.current():  # the query needs a current context, which the per-thread stream belongs to
            return bool(self.call(self._is_capturing, stream) != self._not_captured)

    def refuse_capture(self, stream: int, reason: str) -> None:
        """Raise RuntimeError if a graph is being captured on the stream."""
        if self.is_captured(stream):
            raise RuntimeError(f"the stream is being captured by a CUDA graph, and {reason}")

    def allocate(self, nbytes: int) -> int:
        """Allocate memory that is zero, and return its address; call it in `relaxed`."""
        # On the caller's stream the memset could become part of a graph, and each replay would repeat it.
        driver, stream = self.driver, self._own_stream
        address = int(self.call(driver.cuMemAlloc, nbytes))
        try:
            self.call(driver.cuMemsetD8Async, address, 0, nbytes, stream)
            self.call(driver.cuStreamSynchronize, stream)
        except BaseException:
            driver.cuMemFree(address)
            raise
        return address

    @cached_property
    def _own_stream(self) -> int:
        return int(self.call(self.driver.cuStreamCreate, int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def is_pinned(self, address: int) -> bool:
        """Whether memory of the host is pinned, so that the GPU copies to and from it without the host."""
        attribute = self.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        error, kind = self.driver.cuPointerGetAttribute(attribute, address)
        return int(error) == 0 and int(kind) == int(self.driver.CUmemorytype.CU_MEMORYTYPE_HOST)

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate pinned memory of the host, which is never freed; this GPU must be current."""
        address = int(self.call(self.driver.cuMemHostAlloc, nbytes, self.driver.CU_MEMHOSTALLOC_PORTABLE))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
