"""The array module of a cache (numpy, torch or cupy), reduced to the few functions that the cache needs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays import host_view
from ...errors import BackendUnavailableError
from ...extras import pip_install


class Arrays:
    """Makes arrays of one module on one device.

    Parameters
    ----------
    module : module or str
        numpy, torch or cupy, or the name of one.
    device : device of torch, or None
        Where torch's arrays are; None for the default one, and for the other modules. CuPy's current device is used.

    Raises
    ------
    ValueError
        The module is none of the three, or it takes no device.
    ModuleNotFoundError
        The module is not installed.
    BackendUnavailableError
        CuPy finds no GPU.
    """

    def __init__(self, module: ModuleType | str, device: Any = None) -> None:
        name = module if isinstance(module, str) else getattr(module, "__name__", None)
        if name not in ("numpy", "torch", "cupy"):
            raise ValueError(f"array_module must be numpy, torch or cupy, or the name of one, got {module!r}")
        if device is not None and name != "torch":
            raise ValueError(f"device is for array_module torch, got {device!r} for {name}")
        try:
            self._module = import_module(name)
        except ModuleNotFoundError as error:
            install = pip_install("torch") if name == "torch" else f"{pip_install('cu13')} (or [cu12] for CUDA 12)"
            raise ModuleNotFoundError(
                f"array_module {name} cannot be imported ({error}): {install}", name=error.name
            ) from error
        self._is_torch = name == "torch"
        # Later arrays go to the same device, even if another one is current then.
        if self._is_torch:
            self._device: Any = self._module.empty(0, device=device).device
            self.on_device = bool(self._device.type != "cpu")
        else:
            self._device = _device_of_cupy(self._module) if name == "cupy" else nullcontext()
            self.on_device = name == "cupy"
        self._on_cuda = self._is_torch and bool(self._device.type == "cuda")

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Make an array of zeros."""
        if self._is_torch:
            with self._module.inference_mode(False):  # tensors made in it could not be written in place outside of it
                return self._module.zeros(shape, dtype=getattr(self._module, dtype.name), device=self._device)
        with self._device:
            return self._module.zeros(shape, dtype=dtype)

    def view(self, blocks: Any, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """View some bytes of each block, from `start` on, as an array of a shape; `blocks` are (N, bytes) uint8."""
        elements = blocks.view(getattr(self._module, dtype.name) if self._is_torch else dtype)  # CuPy views all or none
        first = start // dtype.itemsize
        return elements[:, first : first + math.prod(shape[1:])].reshape(shape)

    def as_bytes(self, x: Any) -> Any:
        """View an array in order as its bytes, (num_bytes,) uint8."""
        return x.reshape(-1).view(self._module.uint8)

    def apart(self, x: Any, others: Sequence[Any]) -> Any:
        """Return an array without its gradients, or a copy of it if it may share memory with others."""
        if not self._is_torch:
            return x.copy() if any(self._module.may_share_memory(x, other) for other in others) else x
        start = x.untyped_storage().data_ptr()
        shares = any(other.untyped_storage().data_ptr() == start for other in others)
        return x.detach().clone() if shares else x.detach()

    def asarray(self, x: npt.NDArray[Any]) -> Any:
        """Convert a NumPy array to one of the module, sharing memory where possible.

        A copy to a GPU goes through pinned memory, in stream order: the host does not wait, and may change `x` at once.

        Raises
        ------
        RuntimeError
            The device's current stream is being captured in a CUDA graph: every replay would copy what is in the
            pinned memory by then.
        """
        if self._module is np:
            return x
        if self._is_torch and x.dtype.name == "bfloat16":  # torch knows NumPy's other dtypes alone
            return self.asarray(x.view(np.int16)).view(self._module.bfloat16)
        if self._is_capturing():
            raise RuntimeError(
                "the current stream of the cache's device is being captured by a CUDA graph, and tables and slots come "
                "from the host: ask for them before the capture"
            )
        if self._on_cuda:
            # torch's allocator does not reuse this pinned memory before the copy ends; CuPy does all of this itself.
            return self._module.from_numpy(x).pin_memory().to(self._device, non_blocking=True)
        if self._is_torch:
            return self._module.asarray(x, device=self._device)
        with self._device:
            return self._module.asarray(x)

    def on_host(self, x: Any) -> Any:
        """View an array of the module with NumPy; return one on a device unchanged."""
        return x if self.on_device else host_view(x)

    def free_bytes(self) -> int | None:
        """Free bytes now: of the device, or on the host what the system can give without swapping, if it says."""
        if self._on_cuda:
            return int(self._module.cuda.mem_get_info(self._device)[0])
        if self.on_device and not self._is_torch:
            with self._device:
                return int(self._module.cuda.runtime.memGetInfo()[0])
        with suppress(OSError, ValueError):
            [kib] = re.findall(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
            return int(kib) * 1024
        with suppress(AttributeError, ValueError):  # Windows and macOS do not say
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return None

    def _is_capturing(self) -> bool:
        if self._on_cuda:
            with self._module.cuda.device(self._device):  # torch asks about the current stream of the current device
                return bool(self._module.cuda.is_current_stream_capturing())
        if self.on_device and not self._is_torch:
            with self._device:
                return bool(self._module.cuda.get_current_stream().is_capturing())
        return False


def _device_of_cupy(cupy: ModuleType) -> Any:
    try:
        return cupy.empty(0).device
    except RuntimeError as error:  # of CUDA's runtime
        raise BackendUnavailableError(
            f"CuPy finds no GPU that it can use ({error}): see what nvidia-smi and CUDA_VISIBLE_DEVICES say, or take "
            "array_module numpy"
        ) from error
