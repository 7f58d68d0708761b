"""What only the driver and cuda-core can say of other frameworks' arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import BackendUnavailableError


@lru_cache(maxsize=1)
def _driver() -> Any:
    """The driver, if there is one and it has several devices to tell apart; otherwise None."""
    try:
        from cuda.bindings import driver

        (failed,), (error, count) = driver.cuInit(0), driver.cuDeviceGetCount()
    except (ImportError, RuntimeError):
        return None
    return None if int(failed) or int(error) or count < 2 else driver


def has_several_devices() -> bool:
    """True if there is a driver and more than one device."""
    return _driver() is not None


def ordinal_of(address: int) -> int:
    """The device whose memory an address is; 0 if there is one device or no driver, or the driver does not know."""
    driver = _driver()
    if driver is None:
        return 0
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, ordinal = driver.cuPointerGetAttribute(attribute, address)
    return int(ordinal) if int(error) == 0 else 0


def read_dlpack(
    name: str, x: Any, stream: int
) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, np.dtype[Any], bool, int]:
    """What DLPack says of a device array: address, shape, strides in bytes, dtype, whether it is read-only, device.

    The producer orders its work before what comes on the stream (a pointer; 1 is the legacy default stream).

    Raises
    ------
    TypeError
        A dtype that NumPy has not, or an array that will not be exported.
    BackendUnavailableError
        cuda-core is not installed.
    """
    try:
        from cuda.core.utils import StridedMemoryView
    except ImportError:
        raise BackendUnavailableError(
            f"{name} only speaks DLPack, which needs cuda-core: pip install 'pagedkv[cu13]' (or [cu12] for CUDA 12)"
        ) from None
    try:
        view = StridedMemoryView.from_dlpack(x, stream)
        dtype = np.dtype(view.dtype)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array that DLPack can show: {error}") from error
    strides = None if view.strides is None else tuple(n * dtype.itemsize for n in view.strides)
    return int(view.ptr), tuple(view.shape), strides, dtype, bool(view.readonly), int(view.device_id)
