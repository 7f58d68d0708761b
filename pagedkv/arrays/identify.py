"""Find an argument's framework without importing it: the caller has imported it, so it is in ``sys.modules``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .argument import DeviceArgument, HostArgument, NumpyArray, type_name
from .cupy_array import CupyArray
from .dlpack import DlpackArray, is_on_cuda
from .interface import InterfaceArray
from .torch_tensor import CudaTensor, tensor


def identify(name: str, x: Any) -> HostArgument | DeviceArgument:
    """Classify an array; messages call it `name`.

    Raises
    ------
    TypeError
        x is not an array of NumPy, CuPy or torch, nor a device array of another framework that says so, or has no
        data of its own (meta, sparse).
    ValueError
        x is on a device that is neither the host nor a CUDA GPU.
    """
    kind = type(x)
    if kind is np.ndarray:
        return NumpyArray(name, x)
    if isinstance(x, np.ndarray):
        if _is_masked(x):
            raise TypeError(
                f"{name} must be an array without a mask, got a numpy.ma.MaskedArray: "
                "fill what is masked (x.filled(value)), or give x.data if nothing is"
            )
        return NumpyArray(name, x)
    if _is_torch(kind):
        return tensor(name, x)
    if _is_cupy(kind):
        return CupyArray(name, x)
    # Of a class, passed in place of an instance, the attribute is a property and no interface.
    if not isinstance(x, type):
        argument = InterfaceArray(name, x)
        if isinstance(argument.interface, dict):
            return argument
        if is_on_cuda(x):
            return DlpackArray(name, x)
    raise TypeError(f"{name} must be an array (NumPy, CuPy or torch), got {type_name(x)}")


def host_view(x: Any) -> Any:
    """View an array on the host with NumPy; return one on a device unchanged."""
    argument = identify("x", x)
    return x if argument.on_device else argument.view()


def to_host(x: Any) -> Any:
    """Convert an array of torch or CuPy to NumPy, with a copy from a device; return anything else unchanged."""
    if _is_torch(type(x)):
        return host_view(x.cpu())
    return x.get() if _is_cupy(type(x)) else x


class _DeviceKinds(dict[type, type[DeviceArgument]]):
    def __missing__(self, kind: type) -> type[DeviceArgument]:
        self[kind] = CupyArray if _is_cupy(kind) else CudaTensor if _is_torch(kind) else InterfaceArray
        return self[kind]


# The class for device arrays of each type, if they support more than DLPack.
device_kinds = _DeviceKinds()


def current_streams() -> list[int]:
    """The current streams of all loaded frameworks that use a GPU, as pointers."""
    streams = []
    if cupy := sys.modules.get("cupy"):
        streams.append(int(cupy.cuda.get_current_stream().ptr))
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        streams.append(int(torch.cuda.current_stream().cuda_stream))
    return streams


def _is_masked(x: object) -> bool:
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(x, masked.MaskedArray)


def _is_torch(kind: type) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.Tensor)


def _is_cupy(kind: type) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and issubclass(kind, cupy.ndarray)
