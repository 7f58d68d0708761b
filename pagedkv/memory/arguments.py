"""Checks of arguments of the memory manager, most of them integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
_USUAL = np.dtype(np.int32), np.dtype(np.int64)


def as_int(name: str, value: object, minimum: int | None = 0, maximum: int | None = None) -> int:
    """Convert a value to an int, and check its range.

    Raises
    ------
    TypeError
        The value is a bool, or not an integer.
    ValueError
        The value is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value}")
    return int(value)


def as_ints(name: str, values: Any, length: int | None = None, symbol: str = "n") -> npt.NDArray[np.int64]:
    """Convert a list, tuple or range of ints, or an array of any integer dtype, to a new 1-D int64 array.

    Parameters
    ----------
    name, symbol : str
        The names of the argument and of its length in messages.
    length : int or None
        The length that the array must have, if it is fixed.

    Raises
    ------
    TypeError
        A value is a bool or not an integer, or the array has a mask.
    ValueError
        The array is not one-dimensional, its length is not `length`, or a value does not fit in int64.
    """
    if type(values) is np.ndarray and values.ndim == 1 and values.dtype in _USUAL and length in (None, len(values)):
        return values.astype(np.int64)  # most calls of a step need no further check
    if not isinstance(values, (list, tuple, range, np.ndarray)):
        remedy = ": pass its tolist()" if hasattr(values, "tolist") else ""
        raise TypeError(f"{name} must be a list, a tuple or an array of ints, got {type(values).__name__}{remedy}")
    refuse_mask(name, values)
    expected = f"({symbol},)" if length is None else f"({symbol},) = ({length},)"
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must have shape {expected}, got a list of several lengths") from None
    if array.shape == (0,):
        array = np.empty(0, np.int64)
    if array.ndim != 1 or (length is not None and len(array) != length):
        raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must have an integer dtype, got {array.dtype}")
    if array.dtype == np.uint64 and (largest := array.max(initial=0)) > MAX_INT64:
        raise ValueError(f"{name} must be at most 2**63 - 1, got {largest}")
    if isinstance(values, (list, tuple)):
        # Only a 0 or a 1 can have been a bool.
        refuse_bools(name, [values[i] for i in np.flatnonzero(array >> 1 == 0).tolist()])
    return array.astype(np.int64)


def per_seq(name: str, value: Any, num_seqs: int) -> npt.NDArray[np.int64]:
    """Convert one int for all sequences, or one for each, to an array with one of at least 0 for each."""
    if isinstance(value, (int, np.integer)):
        return np.full(num_seqs, as_int(name, value, maximum=MAX_INT64))
    if not isinstance(value, (list, tuple, range)) and not hasattr(value, "tolist"):
        raise TypeError(
            f"{name} must be an int, or a list or array with one for each sequence, got {type(value).__name__}"
        )
    values = as_ints(name, value, num_seqs, "num_seqs")
    if values.min(initial=0) < 0:
        raise ValueError(f"{name} must be at least 0, got {values.min()}")
    return values


def bool_per_seq(name: str, value: Any, num_seqs: int) -> npt.NDArray[np.bool]:
    """Convert one bool for all sequences, or one for each, to an array with one for each."""
    if not isinstance(value, (bool, np.bool, list, tuple)) and not hasattr(value, "tolist"):
        raise TypeError(
            f"{name} must be a bool, or a list or array with one for each sequence, got {type(value).__name__}"
        )
    values = np.asarray(value)
    if values.size and values.dtype != np.bool:
        raise TypeError(f"{name} must be bools, got {values.dtype}")
    if values.shape not in ((), (num_seqs,)):
        raise ValueError(f"{name} must have shape (num_seqs,) = ({num_seqs},), got {values.shape}")
    return np.broadcast_to(values.astype(np.bool), num_seqs)


def require_callable(name: str, value: object, what: str) -> None:
    """Raise TypeError unless a value can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be {what}, got {value!r}")


def per_layer(name: str, scale: Any, num_layers: int) -> Sequence[Any]:
    """Spread one scale over all layers, or check that a list has one for each."""
    if not isinstance(scale, (list, tuple)):
        return [scale] * num_layers
    if len(scale) != num_layers:
        raise ValueError(f"{name} must be one for all layers, or a list of {num_layers}, got {len(scale)}")
    return scale


def refuse_mask(name: str, values: Any) -> None:
    """Raise TypeError for a masked array, whose mask would be lost."""
    if type(values) is not np.ndarray and hasattr(values, "mask"):
        raise TypeError(f"{name} must be no masked array, whose mask would be ignored: use values[~values.mask].data")


def refuse_bools(name: str, values: Any) -> None:
    """Raise TypeError for a list or tuple with a bool in it, which NumPy would convert to an int."""
    if isinstance(values, (list, tuple)) and not {bool, np.bool}.isdisjoint(map(type, values)):
        raise TypeError(f"{name} must hold ints, got a bool")
