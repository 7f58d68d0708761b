"""Arrays of any framework: which side they are on, NumPy views of those on the host, results in the caller's kind.

Frameworks are found through ``sys.modules``: nothing is imported that the caller has not imported. Arrays on a GPU are
the business of device_arrays.py.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Torch dtypes that NumPy does not know: an integer dtype of their size to go through, and what they are.
_TORCH_ONLY = {
    "bfloat16": ("int16", _BFLOAT16),
    "float8_e4m3fn": ("uint8", np.dtype(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": ("uint8", np.dtype(ml_dtypes.float8_e5m2)),
}
# Device types of DLPack: CUDA memory, and CUDA managed memory.
_DLPACK_CUDA = (2, 13)


def is_torch_tensor(x: object) -> bool:
    """True if x is a torch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_cupy_array(x: object) -> bool:
    """True if x is a CuPy array; never imports CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def on_device(name: str, x: Any) -> bool:
    """True if the array x is in the memory of a GPU, False if it is on the host.

    Raises
    ------
    TypeError
        x is not an array of NumPy, CuPy or torch, nor a device array of another framework that says so, or has no
        data of its own (meta, sparse).
    ValueError
        x is on a device that is neither the host nor a CUDA GPU.
    """
    if isinstance(x, np.ndarray):
        return False
    if is_torch_tensor(x):
        return _torch_on_device(name, x)
    if is_cupy_array(x):
        return True
    # A class may be passed for its instance: its attribute is a property then, not an interface.
    if not isinstance(x, type) and (has_interface(x) or has_device_dlpack(x)):
        return True
    raise TypeError(f"{name} must be an array (NumPy, CuPy or torch), got {kind_of(x)}")


def has_interface(x: Any) -> bool:
    """True if x has a ``__cuda_array_interface__``."""
    return isinstance(getattr(x, "__cuda_array_interface__", None), dict)


def has_device_dlpack(x: Any) -> bool:
    """True if x says, by DLPack, that it is in CUDA memory."""
    try:
        place = x.__dlpack_device__()
    except Exception:  # it is not DLPack's, or it does not know: either way it is no array of ours
        return False
    return isinstance(place, tuple) and len(place) == 2 and place[0] in _DLPACK_CUDA


def _torch_on_device(name: str, x: Any) -> bool:
    kind = x.device.type
    if kind == "meta":
        raise TypeError(f"{name} must be an array with data, got a torch meta tensor")
    if str(x.layout) != "torch.strided":
        raise TypeError(f"{name} must be a dense array, got a torch tensor of layout {str(x.layout)[6:]}")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the host or on a CUDA device, got a torch tensor on {x.device}")
    return bool(kind == "cuda")


def kind_of(x: object) -> str:
    """The type of x, as messages name it."""
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def numpy_dtype(torch_dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of a torch dtype; torch's bfloat16 and fp8 as the dtypes of ml_dtypes.

    Raises
    ------
    TypeError
        NumPy has nothing like it.
    """
    name = str(torch_dtype)[6:]
    return _TORCH_ONLY[name][1] if name in _TORCH_ONLY else np.dtype(name)


def host_view(name: str, x: Any) -> Array:
    """A NumPy view of an array on the host: the same memory, nothing copied.

    Parameters
    ----------
    name : str
        What the caller's argument is called, for messages.
    x : numpy.ndarray or torch.Tensor
        Any strides; a tensor that requires grad is detached.

    Returns
    -------
    numpy.ndarray
        The same shape, strides and memory; torch's bfloat16 and fp8 as the dtypes of ml_dtypes.

    Raises
    ------
    TypeError
        A torch tensor whose memory or dtype NumPy cannot show.
    """
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    torch = sys.modules["torch"]
    try:
        x = x.detach() if x.requires_grad else x
        other = _TORCH_ONLY.get(str(x.dtype)[6:])
        if other is None:
            view: Array = x.numpy()
            return view
        return np.asarray(x.view(getattr(torch, other[0])).numpy()).view(other[1])
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"{name} must be an array that NumPy can view, got a torch tensor of {x.dtype}: {error}"
        ) from error


def as_kind_of(like: Any, result: Array) -> Any:
    """The result as an array of the framework of `like`, in the same memory."""
    if not is_torch_tensor(like):
        return result
    torch = sys.modules["torch"]
    if result.dtype == _BFLOAT16:
        return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(result)
