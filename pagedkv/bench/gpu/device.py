"""A GPU for benches, through torch or CuPy: arrays, events, a cold cache, graphs, and a kernel that only reads."""

from __future__ import annotations

import re
from contextlib import suppress
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...arrays.torch_tensor import from_numpy
from ...errors import BackendUnavailableError
from ...extras import pip_install
from ..contest import Call
from ..report import Row

COPY_BYTES = 2**30
QUICK_COPY_BYTES = 2**26
FLUSH_BYTES = 2**28
FLUSH_L2 = 8
TURNS = 4  # of a thread block that reads `copy_bytes`
ELSEWHERE = "`python -m pagedkv bench cpu` needs none"


class Gpu(Protocol):
    """The interface to a GPU that benches use; work goes to the framework's current stream.

    Attributes
    ----------
    framework : str
        "torch" or "cupy".
    facts : dict
        Device, driver and versions.
    num_multiprocessors : int
    copy_bytes : int
        Bytes of one `copy`, and the most of a `read`.
    """

    framework: str
    facts: Row
    num_multiprocessors: int
    copy_bytes: int

    def array(self, x: npt.NDArray[Any]) -> Any:
        """Copy an array to the GPU."""

    def arranged(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Make a contiguous copy with the axes in this order."""

    def numpy(self, x: Any) -> npt.NDArray[np.float32]:
        """Copy an array to the host, in float32."""

    def record(self) -> Any:
        """Record a new event in the stream."""

    def passed(self, event: Any) -> bool:
        """Whether the GPU has passed the event."""

    def milliseconds(self, start: Any, stop: Any) -> float:
        """The milliseconds between two events that have passed."""

    def flush(self) -> None:
        """Read a buffer of 8 times the L2 cache, at least 256 MiB.

        That leaves nothing else in the cache, and nothing to write back. It also keeps the GPU busy while the host
        enqueues what comes next.
        """

    def copy(self) -> None:
        """Copy `copy_bytes` from one buffer to another with cudaMemcpyAsync."""

    def read(self, num_bytes: int, turns: int = 1) -> None:
        """Read as many bytes with a kernel that does nothing else, or launch it with none; see kernels/read.py."""

    def capture(self, call: Call, times: int) -> Call:
        """Capture a CUDA graph of that many calls, and return its replay; `call` must have run before."""

    def synchronize(self) -> None:
        """Wait for the GPU."""

    def release(self) -> None:
        """Free the memory of dead arrays."""


class TorchGpu:
    """The first GPU, through torch."""

    framework = "torch"

    def __init__(self, torch: ModuleType, copy_bytes: int = COPY_BYTES) -> None:
        self._torch, self.copy_bytes = torch, copy_bytes
        properties = torch.cuda.get_device_properties(0)
        self.num_multiprocessors = properties.multi_processor_count
        self.facts = _facts(properties.name, properties.L2_cache_size, torch.__version__, str(torch.version.cuda))
        self._source, self._target = (torch.zeros(copy_bytes // 4, dtype=torch.int32, device="cuda") for _ in range(2))
        self._sums = torch.zeros(num_sums(copy_bytes), dtype=torch.int32, device="cuda")
        nbytes = max(FLUSH_BYTES, FLUSH_L2 * properties.L2_cache_size)
        self._flushed = torch.zeros(nbytes // 4, dtype=torch.int32, device="cuda")

    def array(self, x: npt.NDArray[Any]) -> Any:
        return from_numpy(x).cuda()

    def arranged(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.permute(axes).contiguous()

    def numpy(self, x: Any) -> npt.NDArray[np.float32]:
        result: npt.NDArray[np.float32] = x.float().cpu().numpy()
        return result

    def record(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, event: Any) -> bool:
        return bool(event.query())

    def milliseconds(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop))

    def flush(self) -> None:
        self._flushed.sum()

    def copy(self) -> None:
        self._target.copy_(self._source)

    def read(self, num_bytes: int, turns: int = 1) -> None:
        stream = self._torch.cuda.current_stream().cuda_stream
        _read(stream, self._source.data_ptr(), self._sums.data_ptr(), num_bytes, turns)

    def capture(self, call: Call, times: int) -> Call:
        cuda = self._torch.cuda
        graph, stream = cuda.CUDAGraph(), cuda.Stream()
        self.synchronize()
        with cuda.stream(stream):
            call()
        self.synchronize()
        with cuda.graph(graph, stream=stream):
            for _ in range(times):
                call()
        replay: Call = graph.replay
        return replay

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def release(self) -> None:
        self._torch.cuda.empty_cache()


class CupyGpu:
    """The first GPU, through CuPy."""

    framework = "cupy"

    def __init__(self, cupy: ModuleType, copy_bytes: int = COPY_BYTES) -> None:
        self._cupy, self.copy_bytes = cupy, copy_bytes
        runtime = cupy.cuda.runtime
        properties, cuda = runtime.getDeviceProperties(0), runtime.runtimeGetVersion()
        self.num_multiprocessors = int(properties["multiProcessorCount"])
        name, l2_bytes = properties["name"].decode(), int(properties["l2CacheSize"])
        self.facts = _facts(name, l2_bytes, cupy.__version__, f"{cuda // 1000}.{cuda % 1000 // 10}", "CuPy")
        self._source, self._target = (cupy.zeros(copy_bytes // 4, np.int32) for _ in range(2))
        self._sums = cupy.zeros(num_sums(copy_bytes), np.int32)
        self._flushed = cupy.zeros(max(FLUSH_BYTES, FLUSH_L2 * l2_bytes) // 4, np.int32)

    def array(self, x: npt.NDArray[Any]) -> Any:
        return self._cupy.asarray(x)

    def arranged(self, x: Any, axes: tuple[int, ...]) -> Any:
        return self._cupy.ascontiguousarray(x.transpose(axes))

    def numpy(self, x: Any) -> npt.NDArray[np.float32]:
        result: npt.NDArray[np.float32] = self._cupy.asnumpy(x).astype(np.float32)
        return result

    def record(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def passed(self, event: Any) -> bool:
        return bool(event.done)

    def milliseconds(self, start: Any, stop: Any) -> float:
        return float(self._cupy.cuda.get_elapsed_time(start, stop))

    def flush(self) -> None:
        self._flushed.sum()

    def copy(self) -> None:
        self._target.data.copy_from_device_async(self._source.data, self.copy_bytes)

    def read(self, num_bytes: int, turns: int = 1) -> None:
        stream = self._cupy.cuda.get_current_stream().ptr
        _read(stream, self._source.data.ptr, self._sums.data.ptr, num_bytes, turns)

    def capture(self, call: Call, times: int) -> Call:
        self.synchronize()
        with self._cupy.cuda.Stream(non_blocking=True) as stream:
            call()
            stream.synchronize()
            stream.begin_capture()
            for _ in range(times):
                call()
            graph = stream.end_capture()
        return lambda: graph.launch(self._cupy.cuda.get_current_stream())

    def synchronize(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()

    def release(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()


# The imports below need numba-cuda; without it a bench still names the missing packages.
def num_sums(num_bytes: int, turns: int = 1) -> int:
    """How many words `read` writes: one for each thread block."""
    from ...kernels.read import TURN_BYTES

    return -(-num_bytes // (turns * TURN_BYTES)) or 1


def read(device: Any, source: int, sums: int, num_bytes: int, turns: int = 1) -> None:
    """Read bytes at an address once, rounded up to whole chunks, and write a word for each thread block."""
    from ...cuda.plans.plan import compile_for
    from ...kernels.read import ReadConfig, make_read

    kernel, grid = compile_for(device, make_read, ReadConfig()), (num_sums(num_bytes, turns), 1, 1)
    device.launch(kernel, grid, [source, sums, turns if num_bytes else 0])


def _read(stream: int, source: int, sums: int, num_bytes: int, turns: int) -> None:
    from ...cuda import driver

    read(driver.cuda_device(0, stream), source, sums, num_bytes, turns)


def _facts(device: str, l2_bytes: int, version: str, cuda: str, framework: str = "torch") -> Row:
    driver = "unknown"
    with suppress(OSError), open("/proc/driver/nvidia/version") as file:
        driver = driver_version(file.read())
    versions = {framework: version, "CUDA": cuda}
    return {"device": device, "driver": driver, **versions, "L2 MiB": l2_bytes / 2**20}


def driver_version(text: str) -> str:
    """Read the driver's version from the text of /proc/driver/nvidia/version, or return "unknown"."""
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return found.group() if found else "unknown"


def open_gpu(copy_bytes: int = COPY_BYTES) -> Gpu:
    """Open the first GPU, through torch if it has CUDA, otherwise through CuPy.

    Raises
    ------
    BackendUnavailableError
        There is no GPU, no CUDA driver, or no framework to make arrays with.
    """
    try:
        from ...cuda import driver

        driver.capabilities()
    except BackendUnavailableError as error:
        raise BackendUnavailableError(f"this bench measures a GPU, and {error}; {ELSEWHERE}") from error
    with suppress(ImportError, OSError):
        import torch

        if torch.cuda.is_available():
            return TorchGpu(torch, copy_bytes)
    with suppress(ImportError, OSError):
        import cupy

        return CupyGpu(cupy, copy_bytes)
    raise BackendUnavailableError(
        f"arrays on the GPU are made by CuPy or by torch with CUDA, and there is neither: {pip_install('cu13')} (or "
        f"[cu12] for CUDA 12). Without a GPU, {ELSEWHERE}"
    )
