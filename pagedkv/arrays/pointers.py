"""The device that an address belongs to, as the driver knows it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def _driver() -> Any:
    """The driver if it has several devices, otherwise None."""
    try:
        from cuda.bindings import driver

        (failed,), (error, count) = driver.cuInit(0), driver.cuDeviceGetCount()
    except (ImportError, RuntimeError):
        return None
    return None if int(failed) or int(error) or count < 2 else driver


def has_several_devices() -> bool:
    """Whether the driver has more than one device."""
    return _driver() is not None


def ordinal_of(address: int) -> int:
    """The device that an address belongs to; 0 if there is at most one device, or the driver does not know."""
    driver = _driver()
    if driver is None:
        return 0
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, ordinal = driver.cuPointerGetAttribute(attribute, address)
    return int(ordinal) if int(error) == 0 else 0
