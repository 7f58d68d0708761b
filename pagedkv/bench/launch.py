"""Host time of decode_attention on device arrays, up to the launch; no GPU is needed.

The arrays are addresses without memory, and the device records launches instead of starting them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from ..operations.attention import decode_attention
from ..typing import Kernel
from .report import Row, median, spread

NUM_SEQS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, MAX_BLOCKS = 32, 32, 8, 128, 16, 128
CALLS_PER_REPEAT = 500


class RecordingDevice:
    """A `cuda.device.Device` with an H100's limits that records launches instead of starting them.

    Attributes
    ----------
    launches : list of tuple
        A (kernel, grid, args, shared_bytes) for each.
    lock : threading.RLock
        As on a CUDA device.
    """

    capability = (9, 0)
    max_shared_bytes = 227 * 1024
    lineinfo = False

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[int, int, int], tuple[int | float, ...], int]] = []
        self._workspaces: dict[str, int] = {}
        self.lock = threading.RLock()

    def address(self, name: str, array: Any) -> int:
        """The address in a shadow."""
        return int(array.__array_interface__["data"][0])

    def scratch(self, name: str, nbytes: int) -> int:
        """An address for each name, without memory behind it."""
        return self._workspaces.setdefault(name, (len(self._workspaces) + 1) << 40)

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], args: Sequence[int | float], shared_bytes: int = 0
    ) -> None:
        """Record a launch."""
        self.launches.append((kernel, grid, tuple(args), shared_bytes))

    def launch_all(self, launches: Sequence[Any]) -> None:
        """Record launches."""
        for launch in launches:
            self.launch(*launch)


@contextmanager
def recording_device() -> Iterator[RecordingDevice]:
    """Replace every GPU and stream by one recording device."""
    device = RecordingDevice()
    with patch("pagedkv.cuda.driver.cuda_device", lambda ordinal, stream: device):
        yield device


class InterfaceArray:
    """An array with nothing but a ``__cuda_array_interface__``, rebuilt at each access as frameworks do."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._address, self._shape, self._typestr = address, shape, np.dtype(dtype).str

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self._shape,
            "typestr": self._typestr,
            "strides": None,
            "data": (self._address, False),
            "stream": 1,
            "version": 3,
        }


class CupyShaped:
    """An array with those attributes of CuPy's that the package reads."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        like = np.lib.stride_tricks.as_strided(np.zeros((), dtype), shape, _contiguous(shape, np.dtype(dtype).itemsize))
        self.shape, self.strides, self.dtype = like.shape, like.strides, like.dtype
        self.data = SimpleNamespace(ptr=address, device_id=0)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = np.cumprod((itemsize, *shape[:0:-1]))[::-1]
    return tuple(int(stride) for stride in strides)


def _cupy() -> ModuleType:
    module = ModuleType("cupy")
    stream = SimpleNamespace(ptr=0)
    vars(module).update(ndarray=CupyShaped, cuda=SimpleNamespace(get_current_stream=lambda device: stream))
    return module


@contextmanager
def _as_cupy() -> Iterator[None]:
    """Pass `CupyShaped` off as CuPy's array. Restores this one module: others may be imported meanwhile."""
    before = sys.modules.get("cupy")
    sys.modules["cupy"] = _cupy()
    try:
        yield
    finally:
        del sys.modules["cupy"]
        if before is not None:
            sys.modules["cupy"] = before


def _call(kind: type, kernel: Kernel) -> Callable[[], Any]:
    """A decode call on arrays of one kind, with `out` given."""
    x = 8
    k_shape = (1024, NUM_KV_HEADS, HEAD_DIM // x, BLOCK_SIZE, x)
    q_shape = (NUM_SEQS, NUM_HEADS, HEAD_DIM)
    shapes: list[tuple[tuple[int, ...], Any]] = [
        (q_shape, np.float16),
        (k_shape, np.float16),
        ((1024, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE), np.float16),
        ((NUM_SEQS, MAX_BLOCKS), np.int32),
        ((NUM_SEQS,), np.int32),
        (q_shape, np.float16),
    ]
    *arrays, out = [kind((i + 1) << 36, *shape) for i, shape in enumerate(shapes)]
    return lambda: decode_attention(*arrays, layout="vllm", kernel=kernel, out=out)


def run(*, repeats: int = 9, progress: Callable[[str], Any] = print) -> list[Row]:
    """Time calls on arrays with only the interface, and on arrays that look like CuPy's.

    Parameters
    ----------
    repeats : int
        Medians are over 500 times as many calls.
    progress : callable
        Called with what is being measured.

    Returns
    -------
    list of dict
        Launches of a call, median microseconds of a call, and interquartile range over the median.
    """
    rows: list[Row] = []
    with recording_device() as device, _as_cupy():
        for name, kind in (("interface only", InterfaceArray), ("like CuPy", CupyShaped)):
            for kernel in ("v1", "v2"):
                progress(f"launch, {name}, {kernel}")
                call = _call(kind, kernel)
                call()
                before, times = len(device.launches), []
                for _ in range(repeats * CALLS_PER_REPEAT):
                    start = perf_counter_ns()
                    call()
                    times.append((perf_counter_ns() - start) / 1000)
                launches = (len(device.launches) - before) / len(times)
                rows.append(
                    {
                        "arrays": name,
                        "kernel": kernel,
                        "launches": launches,
                        "us": median(times),
                        "spread": spread(times),
                    }
                )
    return rows
