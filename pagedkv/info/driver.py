"""Facts about the CUDA driver and the GPUs, read without any package."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class Driver(NamedTuple):
    """The CUDA driver of this machine, and its GPUs.

    Attributes
    ----------
    version : tuple of int
        The newest CUDA version that it supports, such as (13, 0).
    gpus : list of str
        Name, compute capability and memory of each GPU that this process may use.
    """

    version: tuple[int, int]
    gpus: list[str]

    @property
    def extra(self) -> str:
        """The extra of pagedkv whose packages this driver can run."""
        return "cu13" if self.version[0] >= 13 else "cu12"


def find_driver() -> Driver | None:
    """Find the driver; None if there is none.

    Raises
    ------
    RuntimeError
        It cannot be loaded, or a function of it failed.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except FileNotFoundError:
        return None
    except OSError as error:
        if LIBRARY in str(error) and "no such file" in str(error).lower():  # not of another library that it needs
            return None
        raise RuntimeError(f"{LIBRARY} cannot be loaded: {error}") from None
    version, count = ctypes.c_int(), ctypes.c_int()
    _call(library, "cuDriverGetVersion", ctypes.byref(version))
    major, rest = divmod(version.value, 1000)
    _call(library, "cuInit", 0)
    _call(library, "cuDeviceGetCount", ctypes.byref(count))
    return Driver((major, rest // 10), [_describe_gpu(library, ordinal) for ordinal in range(count.value)])


def _describe_gpu(library: Any, ordinal: int) -> str:
    name, num_bytes = ctypes.create_string_buffer(256), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(library, "cuDeviceGetName", name, len(name), ordinal)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(num_bytes), ordinal)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, ordinal)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, ordinal)
    capability = f"compute capability {major.value}.{minor.value}"
    return f"{name.value.decode(errors='replace')}, {capability}, {num_bytes.value / 2**30:.1f} GiB"


def _call(library: Any, function: str, *args: Any) -> None:
    code = getattr(library, function)(*args)
    if code:
        raise RuntimeError(f"{function} of {LIBRARY} failed with code {code}: see what nvidia-smi says")
