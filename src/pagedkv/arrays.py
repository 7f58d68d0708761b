"""Arrays of any framework on the host: NumPy views of them, and results in the caller's kind.

Frameworks are found through ``sys.modules``: nothing is imported that the caller has not imported.
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


def is_torch_tensor(x: object) -> bool:
    """True if x is a torch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def on_device(name: str, x: Any) -> bool:
    """True if the array x is in the memory of a GPU, False if it is on the host.

    Raises
    ------
    TypeError
        x is not an array of NumPy, CuPy or torch, or has no data of its own (meta, sparse).
    ValueError
        x is on a device that is neither the host nor a CUDA GPU.
    """
    if isinstance(x, np.ndarray):
        return False
    if is_torch_tensor(x):
        return _torch_on_device(name, x)
    # A class may be passed for its instance: its attribute is a property then, not an interface.
    if not isinstance(x, type) and isinstance(getattr(x, "__cuda_array_interface__", None), dict):
        return True
    raise TypeError(f"{name} must be an array (NumPy, CuPy or torch), got {_kind_of(x)}")


def _torch_on_device(name: str, x: Any) -> bool:
    kind = x.device.type
    if kind == "meta":
        raise TypeError(f"{name} must be an array with data, got a torch meta tensor")
    if str(x.layout) != "torch.strided":
        raise TypeError(f"{name} must be a dense array, got a torch tensor of layout {str(x.layout)[6:]}")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the host or on a CUDA device, got a torch tensor on {x.device}")
    return bool(kind == "cuda")


def _kind_of(x: object) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


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
