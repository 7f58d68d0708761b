"""On which device an address is, which only the driver knows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


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
