"""Conversion of arguments for a function under test to its framework, and of its results to NumPy."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import numpy as np

from .problems.attention import FLOATS

Array = np.ndarray[Any, Any]
BFLOAT16 = FLOATS["bfloat16"]


def hand_over(arrays: str | Callable[[Array], Any], device: str | None = None) -> Callable[[Array], Any]:
    """Make a function that converts a NumPy array to what the function under test takes.

    Parameters
    ----------
    arrays : {"numpy", "torch", "cupy"} or callable
        A callable converts a NumPy array, such as `numba.cuda.to_device` or `jax.numpy.asarray`.
    device : str, optional
        The device of torch tensors.
    """
    if callable(arrays):
        return arrays
    if arrays == "numpy":
        return lambda x: x
    if arrays == "cupy":
        return cast(Callable[[Array], Any], import_module("cupy").asarray)
    if arrays != "torch":
        raise ValueError(f'arrays must be "numpy", "torch", "cupy" or a function, got {arrays!r}')
    torch = import_module("torch")

    def as_tensor(x: Array) -> Any:
        tensor = torch.from_numpy(x.view(np.int16) if x.dtype == BFLOAT16 else x)
        tensor = tensor.view(torch.bfloat16) if x.dtype == BFLOAT16 else tensor
        return tensor if device is None else tensor.to(device)

    return as_tensor


def as_numpy(x: Any) -> Array:
    """Convert a result on any device to NumPy; bfloat16 stays bfloat16."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":
            x = x.view(import_module("torch").int16).numpy().view(BFLOAT16)
        return np.asarray(x)
    for method in ("get", "copy_to_host"):  # of CuPy, of numba
        if hasattr(x, method):
            return np.asarray(getattr(x, method)())
    return np.asarray(x)
