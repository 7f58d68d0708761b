"""Arrays in the memory of a GPU: what their metadata says, NumPy shadows of them, the caller's stream, new arrays.

A *shadow* is a NumPy array with the address, shape, strides, dtype and writeable flag of a device array, so that
shapes, dtypes, strides, alignment and overlap are checked in one way on every side. ITS MEMORY IS NOT THE HOST'S:
reading or writing one element of it ends the process. Ask a shadow for its attributes and for views, and compare
addresses with numpy.may_share_memory and numpy.shares_memory; everything else that NumPy does by ufuncs or functions
is refused with a TypeError, but not its methods that read (copy, tolist, item) or an index that names one element.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .arrays import has_interface, is_cupy_array, is_torch_tensor, kind_of, numpy_dtype

LEGACY_STREAM = 1  # what DLPack and the CUDA array interface call the legacy default stream
_PAST_ADDRESSES = 1 << 64
_TYPESTR = re.compile(r"[<>|=][biufcmMOSUV][0-9]+")
_HARMLESS = (np.shares_memory, np.may_share_memory)


class Shadow(np.ndarray[Any, np.dtype[Any]]):
    """The metadata of a device array as a NumPy array; see the module: its memory must never be touched."""

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
    """Something that NumPy makes an array of."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


class Metadata(NamedTuple):
    """Everything that is known of a device array.

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
    """A shadow of device memory.

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
    # NumPy makes such arrays of its own dtypes alone: raw bytes of the same size stand in for the others.
    plain = dtype if dtype.isbuiltin == 1 else np.dtype(f"V{dtype.itemsize}")
    interface = {"shape": shape, "strides": strides, "typestr": plain.str, "data": (address, read_only), "version": 3}
    return np.asarray(_Interface(interface)).view(dtype, Shadow)


def metadata(name: str, x: Any, stream: int) -> Metadata:
    """The shadow and the device of an array for which `arrays.on_device` is true.

    Parameters
    ----------
    name : str
        What the caller's argument is called, for messages.
    x : array
        Of CuPy or torch, or of anything that has a ``__cuda_array_interface__`` or speaks DLPack.
    stream : int
        The stream of the call, behind which a producer that only speaks DLPack puts itself.

    Raises
    ------
    TypeError
        An interface that does not say what it should, or says what an array here cannot be (a mask, lazy negation).
    ValueError
        An array with elements but without memory, or with numbers that no array has.
    BackendUnavailableError
        The array only speaks DLPack, and cuda-core, which reads it, is not installed.
    """
    if is_cupy_array(x):
        data = x.data
        return _metadata(name, data.ptr, x.shape, x.strides, x.dtype, False, data.device_id)
    if is_torch_tensor(x):
        return _torch_metadata(name, x)
    if has_interface(x):
        return _interface_metadata(name, x)
    from .cuda.interop import read_dlpack

    address, shape, strides, dtype, read_only, ordinal = read_dlpack(name, x, stream or LEGACY_STREAM)
    return _metadata(name, address, shape, strides, dtype, read_only, ordinal)


def _metadata(
    name: str,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: np.dtype[Any],
    read_only: bool,
    ordinal: int | None,
) -> Metadata:
    if dtype.hasobject or not dtype.itemsize:
        raise TypeError(f"{name} must be an array of numbers, got dtype {dtype}")
    if not address and all(shape):
        raise ValueError(f"{name} must have memory, got the address 0 with shape {shape}")
    try:
        return Metadata(make_shadow(address, shape, strides, dtype, read_only), ordinal)
    except ValueError as error:  # what no memory can hold
        raise ValueError(f"{name} must be an array that NumPy can describe: {error}") from error


def _torch_metadata(name: str, x: Any) -> Metadata:
    try:
        dtype = numpy_dtype(x.dtype)
    except TypeError:
        raise TypeError(f"{name} must be an array that NumPy knows the dtype of, got {x.dtype}") from None
    if x.is_neg() or x.is_conj():
        raise TypeError(f"{name} must be an array as it is in memory, got a torch tensor with lazy negation")
    strides = tuple(n * dtype.itemsize for n in x.stride())
    return _metadata(name, x.data_ptr(), tuple(x.shape), strides, dtype, False, x.device.index or 0)


def _interface_metadata(name: str, x: Any) -> Metadata:
    interface = x.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise TypeError(f"{name} must be an array without a mask, got a {kind_of(x)} with one")
    for key in ("shape", "typestr", "data"):
        if key not in interface:
            raise TypeError(f"{name} must have a __cuda_array_interface__ with shape, typestr and data, got no {key}")
    shape, strides = _integers(name, "shape", interface["shape"]), interface.get("strides")
    if shape and min(shape) < 0:
        raise _wrong(name, "a shape without negative numbers", shape, ValueError)
    if strides is not None:
        strides = _integers(name, "strides", strides)
        if len(strides) != len(shape):
            raise _wrong(name, f"a stride for each of {len(shape)} axes", strides, ValueError)
    address, read_only = _data(name, interface["data"])
    dtype = _interface_dtype(name, interface["typestr"], getattr(x, "dtype", None))
    try:
        return _metadata(name, address, shape, strides, dtype, read_only, ordinal_of(address))
    except OverflowError as error:
        raise _wrong(name, "numbers that fit in 64 bits", interface, ValueError) from error


def _wrong(name: str, what: str, got: object, error: type[Exception] = TypeError) -> Exception:
    return error(f"{name} must have a __cuda_array_interface__ with {what}, got {got!r}")


def _is_integer(x: object) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _integers(name: str, key: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, (tuple, list)) or not all(map(_is_integer, given)):
        raise _wrong(name, f"{key} as a tuple of int", given)
    return tuple(map(int, given))


def _data(name: str, data: Any) -> tuple[int, bool]:
    """The address and the read-only flag; 0 for the address None, which arrays without elements may have."""
    if isinstance(data, (tuple, list)) and len(data) == 2:
        address, read_only = data
        if (address is None or _is_integer(address)) and isinstance(read_only, (bool, int, np.bool_)):
            if not 0 <= (address or 0) < _PAST_ADDRESSES:
                raise _wrong(name, "an address in 0..2**64-1", address, ValueError)
            return int(address or 0), bool(read_only)
    raise _wrong(name, "data as (address, read-only flag)", data)


def _interface_dtype(name: str, typestr: Any, own: Any) -> np.dtype[Any]:
    # A type string cannot tell bfloat16 and fp8 from other things of their size; the array itself may.
    if isinstance(own, np.dtype) and own.str == typestr:
        return own
    try:
        if isinstance(typestr, str) and _TYPESTR.fullmatch(typestr):
            return np.dtype(typestr)
    except (OverflowError, TypeError, ValueError):
        pass
    raise _wrong(name, 'a typestr such as "<f4"', typestr)


def ordinal_of(address: int | None) -> int | None:
    """The device that an address belongs to, by the driver; 0 where there is one device, or no driver to ask."""
    from .cuda.interop import ordinal_of as ask

    return ask(address) if address else None


def framework_of(kind: type) -> str | None:
    """Whose arrays are of this type: "cupy", "torch", or None for any other framework."""
    for name, array in (("cupy", "ndarray"), ("torch", "Tensor")):
        module = sys.modules.get(name)
        if module is not None and issubclass(kind, getattr(module, array)):
            return name
    return None


def current_stream(x: Any, name: str = "the array") -> int:
    """The stream that work on a device array goes to, as a pointer: its framework's current one.

    Of an array that only has an interface, the stream that it names; 0, the legacy default stream, where none is named.

    Raises
    ------
    TypeError
        The interface names something else as its stream; the message calls the array `name`.
    """
    if is_cupy_array(x):
        return int(sys.modules["cupy"].cuda.get_current_stream(x.data.device_id).ptr)
    if is_torch_tensor(x):
        return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)
    interface = getattr(x, "__cuda_array_interface__", None)
    stream = interface.get("stream") if isinstance(interface, dict) else None
    if stream is not None and (not _is_integer(stream) or stream < 0):
        raise _wrong(name, "a stream that is None or a pointer", stream)
    return int(stream or 0)


def current_streams() -> list[int]:
    """The current stream of every framework that is loaded and uses a GPU, as pointers."""
    streams = []
    if cupy := sys.modules.get("cupy"):
        streams.append(int(cupy.cuda.get_current_stream().ptr))
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        streams.append(int(torch.cuda.current_stream().cuda_stream))
    return streams


def empty(name: str, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], remedy: str) -> Any:
    """A new array beside another, in its framework and on its device.

    Parameters
    ----------
    name : str
        What the new array is called, for messages.
    like : array
        Of CuPy or torch.
    shape, dtype
        Of the new array, in NumPy's terms.
    remedy : str
        What the caller can do instead, for messages.

    Raises
    ------
    ValueError
        Nothing is known of the framework of `like` but its interface.
    """
    if is_cupy_array(like):
        with like.device:
            return sys.modules["cupy"].empty(shape, dtype)
    if is_torch_tensor(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=like.device)
    raise ValueError(f"{name} can only be made for arrays of CuPy and torch, got a {kind_of(like)}; {remedy}")
