"""Tensors of torch, on the host and on CUDA devices, and calls that torch.compile must not trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import ml_dtypes
import numpy as np

from .argument import DeviceArgument, Facts, HostArgument
from .shadow import Array, Metadata, metadata_of

_P = ParamSpec("_P")
_R = TypeVar("_R")

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Torch dtypes that NumPy does not know: an integer dtype of their size to view them as, and their dtype here.
_TORCH_ONLY = {
    "bfloat16": ("int16", _BFLOAT16),
    "float8_e4m3fn": ("uint8", np.dtype(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": ("uint8", np.dtype(ml_dtypes.float8_e5m2)),
}


def tensor(name: str, x: Any) -> HostTensor | CudaTensor:
    """Classify a tensor.

    Raises
    ------
    TypeError
        It has no data of its own (meta, sparse).
    ValueError
        It is on a device that is neither the host nor a CUDA GPU.
    """
    torch = sys.modules["torch"]
    if type(x) is torch.Tensor and x.is_cpu and x.layout is torch.strided:  # the common case, without slow names
        return HostTensor(name, x)
    kind = x.device.type
    if kind == "meta":
        raise TypeError(f"{name} must be an array with data, got a torch meta tensor")
    if _name(x.layout) != "strided":
        raise TypeError(f"{name} must be a dense array, got a torch tensor of layout {_name(x.layout)}")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the host or on a CUDA device, got a torch tensor on {x.device}")
    return CudaTensor(name, x) if kind == "cuda" else HostTensor(name, x)


@lru_cache(maxsize=64)
def _name(x: Any) -> str:
    """The name of a dtype or a layout of torch; cached, since torch takes a while to make it."""
    return str(x)[6:]


class HostTensor(HostArgument):
    """A tensor on the host."""

    __slots__ = ()

    def view(self) -> Array:
        """As in `HostArgument`; bfloat16 and fp8 become the dtypes of ml_dtypes, and gradients are left behind."""
        x = self.array
        try:
            x = x.detach() if x.requires_grad else x
            other = _TORCH_ONLY.get(_name(x.dtype))
            if other is None:
                view: Array = x.numpy()
                return view
            return np.asarray(x.view(getattr(sys.modules["torch"], other[0])).numpy()).view(other[1])
        except (RuntimeError, TypeError) as error:
            raise TypeError(
                f"{self.name} must be an array that NumPy can view, got a torch tensor of {x.dtype}: {error}"
            ) from error

    def of_numpy(self, result: Array) -> Any:
        return from_numpy(result)


class CudaTensor(DeviceArgument):
    """A tensor on a CUDA device."""

    __slots__ = ()

    @staticmethod
    def facts(x: Any) -> Facts:
        address = x.data_ptr()
        of_vector = address & 15 if address else -1  # low_bits, without a call
        return address, (x.shape, x.stride(), x.dtype, x.device, x.layout, x.is_neg(), of_vector)

    @staticmethod
    def address(x: Any) -> int:
        address: int = x.data_ptr()
        return address

    def stream(self) -> int:
        torch = sys.modules["torch"]
        stream: int = torch._C._cuda_getCurrentRawStream(self.array.device.index)  # in a tenth of the time of a Stream
        return stream

    def metadata(self, stream: int) -> Metadata:
        name, x = self.name, self.array
        try:
            dtype = numpy_dtype(x.dtype)
        except TypeError:
            raise TypeError(f"{name} must be an array that NumPy knows the dtype of, got {x.dtype}") from None
        if x.is_neg() or x.is_conj():
            raise TypeError(f"{name} must be an array as it is in memory, got a torch tensor with lazy negation")
        strides = tuple(n * dtype.itemsize for n in x.stride())
        return metadata_of(name, x.data_ptr(), tuple(x.shape), strides, dtype, False, x.device.index or 0)

    def empty(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], remedy: str) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=self.array.device)


def from_numpy(x: Array) -> Any:
    """Wrap a NumPy array as a tensor, without a copy."""
    torch = sys.modules["torch"]
    if x.dtype == _BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def numpy_dtype(torch_dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of a torch dtype; bfloat16 and fp8 are those of ml_dtypes.

    Raises
    ------
    TypeError
        NumPy has nothing like it.
    """
    name = _name(torch_dtype)
    return _TORCH_ONLY[name][1] if name in _TORCH_ONLY else np.dtype(name)


def between_graphs(operation: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function so that torch.compile calls it with one graph break instead of tracing it."""
    chosen = operation

    @wraps(operation)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal chosen
        try:  # the try statement lets torch skip this function after a graph break in it, without a second break
            # torch may be imported after pagedkv, and imports its compiler where something is compiled or disabled.
            if chosen is operation and "torch._dynamo" in sys.modules:
                chosen = sys.modules["torch._dynamo"].disable(operation)
            return chosen(*args, **kwargs)
        finally:
            pass

    return call
