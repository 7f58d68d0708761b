"""NumPy shadows of arrays in the memory of a GPU.

A *shadow* is a NumPy array with the address, shape, strides, dtype and writeable flag of a device array, so that one
validation serves the host and devices. ITS MEMORY IS NOT THE HOST'S: reading or writing an element ends the process.
Read only its attributes, take views, and compare addresses with numpy.may_share_memory and numpy.shares_memory. Other
functions and ufuncs of NumPy raise TypeError, but methods that read (copy, tolist, item) and the index of an element
do not, and end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, c_char
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]  # a view of an array on the host, or a Shadow

_EXPORTED = "efBHIil"  # the characters of common dtypes whose memory NumPy exports as a buffer
# Bits of `flags.num`: contiguous, aligned and writable; and that of what broadcast_arrays returns, which says it is
# writable though NumPy does not lend its memory.
_LENT, _WARNS_ON_WRITE = 0x0501, 0x80000000
_ANYWHERE = 256  # for arrays without elements, since NumPy before 2.4 takes an interface at address 0 for a number
_HARMLESS = (np.shares_memory, np.may_share_memory)


class Shadow(np.ndarray[Any, np.dtype[Any]]):
    """The metadata of a device array as a NumPy array whose memory must never be touched; see the module."""

    __array_ufunc__ = None  # type: ignore[assignment]

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if func in _HARMLESS:
            return super().__array_function__(func, types, args, kwargs)
        raise TypeError(f"numpy.{func.__name__} would read memory of a GPU from the host")

    def __repr__(self) -> str:
        return f"<Shadow at {self.ctypes.data:#x}, shape {self.shape}, strides {self.strides}, dtype {self.dtype}>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("memory of a GPU cannot be pickled or copied from the host")

    __deepcopy__ = __reduce_ex__


class _Interface:
    """An object that NumPy converts to an array."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


class Metadata(NamedTuple):
    """What pagedkv knows of a device array.

    Attributes
    ----------
    shadow : Shadow
    ordinal : int or None
        The device it is on, as CUDA numbers them; None if it has no elements and does not say.
    """

    shadow: Shadow
    ordinal: int | None


def make_shadow(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype[Any], read_only: bool
) -> Shadow:
    """Make a shadow of device memory.

    Parameters
    ----------
    address : int
        Of element 0; 0 only where there are no elements.
    shape : tuple of int
    strides : tuple of int or None
        In bytes; None if C-contiguous.
    dtype : numpy.dtype
    read_only : bool
    """
    # NumPy accepts such an interface for its own dtypes only: raw bytes of the same size stand in for the others.
    plain = dtype if dtype.isbuiltin == 1 else np.dtype(f"V{dtype.itemsize}")
    data = (address or _ANYWHERE, read_only)
    interface = {"shape": shape, "strides": strides, "typestr": plain.str, "data": data, "version": 3}
    return np.asarray(_Interface(interface)).view(dtype, Shadow)


def metadata_of(
    name: str,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: np.dtype[Any],
    read_only: bool,
    ordinal: int | None,
) -> Metadata:
    """The metadata of a device array that a framework describes so, with the parameters of `make_shadow`.

    Raises
    ------
    TypeError
        The dtype is not one of numbers.
    ValueError
        Elements but no memory, or a shape that no memory can hold.
    """
    if dtype.hasobject or not dtype.itemsize:
        raise TypeError(f"{name} must be an array of numbers, got dtype {dtype}")
    if not address and all(shape):
        raise ValueError(f"{name} must have memory, got the address 0 with shape {shape}")
    try:
        return Metadata(make_shadow(address, shape, strides, dtype, read_only), ordinal)
    except ValueError as error:
        raise ValueError(f"{name} must be an array that NumPy can describe: {error}") from error


def address_of(x: Array) -> int:
    """The address of element 0."""
    if x.flags.num & (_LENT | _WARNS_ON_WRITE) == _LENT and x.dtype.char in _EXPORTED and x.size:
        lender: Any = x  # NumPy's stubs know of no buffer
        return addressof(c_char.from_buffer(lender))  # in a fifth of the time
    address: int = x.__array_interface__["data"][0]
    return address
