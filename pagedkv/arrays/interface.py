"""Arrays of other frameworks, read through their ``__cuda_array_interface__``."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from .argument import DeviceArgument, Facts, low_bits, type_name
from .shadow import Metadata, metadata_of

_PAST_ADDRESSES = 1 << 64
_TYPESTR = re.compile(r"[<>|=][biufcmMOSUV][0-9]+")


class InterfaceArray(DeviceArgument):
    """A device array of a framework that pagedkv does not know.

    Attributes
    ----------
    interface : dict
        The array's interface, read once because many frameworks build it at each access; anything else if it has none.
    """

    __slots__ = ("interface",)

    def __init__(self, name: str, array: Any) -> None:
        super().__init__(name, array)
        self.interface: Any = getattr(array, "__cuda_array_interface__", None)

    @staticmethod
    def facts(x: Any) -> Facts:
        interface = x.__cuda_array_interface__
        address, read_only = interface["data"]
        typestr = interface["typestr"]
        own = x.dtype if typestr[1] == "V" else None
        ordinal = ordinal_of(address) if has_several_devices() else 0
        key = (interface["shape"], interface.get("strides"), typestr, own, interface.get("mask"), read_only, ordinal)
        return address, (key, low_bits(address))

    @staticmethod
    def address(x: Any) -> int:
        return int(x.__cuda_array_interface__["data"][0])

    def stream(self) -> int:
        """The stream that the interface names, or the legacy default stream."""
        stream = self.interface.get("stream")
        if stream is not None and (not _is_integer(stream) or stream < 0):
            raise self._error("a stream that is None or a pointer", stream)
        return int(stream or 0)

    def metadata(self, stream: int) -> Metadata:
        name, interface = self.name, self.interface
        if interface.get("mask") is not None:
            raise TypeError(f"{name} must be an array without a mask, got a {type_name(self.array)} with one")
        for key in ("shape", "typestr", "data"):
            if key not in interface:
                raise TypeError(
                    f"{name} must have a __cuda_array_interface__ with shape, typestr and data, got no {key}"
                )
        shape, strides = self._integers("shape", interface["shape"]), interface.get("strides")
        if shape and min(shape) < 0:
            raise self._error("a shape without negative numbers", shape, ValueError)
        if strides is not None:
            strides = self._integers("strides", strides)
            if len(strides) != len(shape):
                raise self._error(f"a stride for each of {len(shape)} axes", strides, ValueError)
        address, read_only = self._data(interface["data"])
        dtype = self._dtype(interface["typestr"])
        ordinal = ordinal_of(address) if address else None
        try:
            return metadata_of(name, address, shape, strides, dtype, read_only, ordinal)
        except OverflowError as error:
            raise self._error("numbers that fit in 64 bits", interface, ValueError) from error

    def _error(self, what: str, got: object, error: type[Exception] = TypeError) -> Exception:
        return error(f"{self.name} must have a __cuda_array_interface__ with {what}, got {got!r}")

    def _integers(self, key: str, given: Any) -> tuple[int, ...]:
        if not isinstance(given, (tuple, list)) or not all(map(_is_integer, given)):
            raise self._error(f"{key} as a tuple of int", given)
        return tuple(map(int, given))

    def _data(self, data: Any) -> tuple[int, bool]:
        """The address and the read-only flag; an array without elements may have the address None, which becomes 0."""
        if isinstance(data, (tuple, list)) and len(data) == 2:
            address, read_only = data
            if (address is None or _is_integer(address)) and isinstance(read_only, (bool, int, np.bool_)):
                if not 0 <= (address or 0) < _PAST_ADDRESSES:
                    raise self._error("an address in 0..2**64-1", address, ValueError)
                return int(address or 0), bool(read_only)
        raise self._error("data as (address, read-only flag)", data)

    def _dtype(self, typestr: Any) -> np.dtype[Any]:
        # A type string cannot distinguish bfloat16 and fp8 from other types of their size; the array's dtype can.
        own = getattr(self.array, "dtype", None)
        if isinstance(own, np.dtype) and own.str == typestr:
            return own
        try:
            if isinstance(typestr, str) and _TYPESTR.fullmatch(typestr):
                return np.dtype(typestr)
        except (OverflowError, TypeError, ValueError):
            pass
        raise self._error('a typestr such as "<f4"', typestr)


def _is_integer(x: object) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


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
