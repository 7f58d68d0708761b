"""Checks that operations share: shape, dtype, strides and alignment of an array, type and range of an option.

The functions raise or return, and write to nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any, TypeGuard

import numpy as np

from ..arrays import Array, address_of
from ..environment import is_on
from ..layouts import FLOAT_DTYPES, VECTOR_BYTES
from ..placement import Placement

# The arrays whose rows kernels move in vectors of 16 bytes.
_ROWS = frozenset(("q", "k", "v", "k_cache", "v_cache", "out", "cos", "sin"))

# Those that kernels read one by one, with any strides.
SCALES_OF_ROWS = ("k_scales", "v_scales")

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).smallest_subnormal)
_OVERLAP_WORK: Any = 100_000  # NumPy's stubs know only the special values 0 and -1


def shape(name: str, x: Array, symbols: str, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless x has the expected shape; `symbols` spells it in words of the glossary."""
    if x.shape != expected:
        raise ValueError(f"{name} must have shape {symbols} = {expected}, got {x.shape}")


def ndim(name: str, x: Array, symbols: str, expected: int) -> None:
    """Raise ValueError unless x has the expected number of axes; `symbols` spells its shape in glossary words."""
    if x.ndim != expected:
        raise ValueError(f"{name} must have shape {symbols}, got {x.shape}")


def dtype(name: str, x: Array, expected: np.dtype[Any], why: str = "") -> None:
    """Raise TypeError unless x has the expected dtype; `why` says where the expectation comes from."""
    if x.dtype != expected:
        raise TypeError(f"{name} must have dtype {expected}{why}, got {x.dtype}")


def float_dtype(name: str, x: Array) -> None:
    """Raise TypeError unless x is float32, float16 or bfloat16."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must have dtype float32, float16 or bfloat16, got {x.dtype}")


def strides(name: str, x: Array) -> None:
    """Raise ValueError unless the innermost axis is contiguous and every element is aligned."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned:
        return
    if x.size and x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
        raise ValueError(f"{name} must be contiguous along its last axis, got strides {x.strides} in bytes")
    if not flags.aligned:
        raise ValueError(f"{name} must be aligned to its item size of {x.itemsize} bytes")


def scattered(name: str, x: Array) -> None:
    """Raise ValueError unless every element is aligned and all strides are positive, so that none is there twice."""
    if not x.flags.aligned:
        raise ValueError(f"{name} must be aligned to its item size of {x.itemsize} bytes")
    if any(stride <= 0 for stride, length in zip(x.strides, x.shape, strict=True) if length > 1):
        raise ValueError(f"{name} must have positive strides, got {x.strides} in bytes")


def row_alignment(name: str, x: Array, placement: Placement) -> None:
    """Raise ValueError unless CUDA kernels can move the rows of x in vectors of 16 bytes; other backends need not.

    A row is the innermost axis. If it is not a multiple of 16 bytes, the largest power of two that divides it is
    enough.
    """
    if placement.backend == "cpu" or not x.size:
        return
    vector = math.gcd(x.shape[-1] * x.itemsize, VECTOR_BYTES)
    address = address_of(x)
    if address % vector:
        raise ValueError(
            f'{name} must begin at a multiple of {vector} bytes for backend "{placement.backend}", '
            f"got address {address:#x}"
        )
    if any(stride % vector for stride, length in zip(x.strides[:-1], x.shape, strict=False) if length > 1):
        raise ValueError(
            f"{name} must have rows at multiples of {vector} bytes "
            f'for backend "{placement.backend}", got strides {x.strides} in bytes'
        )


def memory(given: Mapping[str, Array], placement: Placement) -> None:
    """Check `strides` of all arrays, and `row_alignment` of those whose rows kernels move in vectors."""
    for name, x in given.items():
        (scattered if name in SCALES_OF_ROWS else strides)(name, x)
        if name in _ROWS:
            row_alignment(name, x, placement)


def writable(name: str, x: Array) -> None:
    """Raise ValueError unless x is writable and no two indices name the same element."""
    flags = x.flags
    if not flags.writeable:
        raise ValueError(f"{name} must be writable, got a read-only array")
    if flags.c_contiguous or not x.size:
        return
    reach = 0
    for stride, length in sorted((abs(stride), length) for stride, length in zip(x.strides, x.shape, strict=True)):
        if length > 1:
            if stride < reach + x.itemsize:
                raise ValueError(f"{name} must not repeat an element, got shape {x.shape} with strides {x.strides}")
            reach += stride * (length - 1)


def no_overlap(name: str, x: Array, others: Iterable[tuple[str, Array]]) -> None:
    """Raise ValueError if x shares an element with one of the others."""
    for other, y in others:
        if np.may_share_memory(x, y) and _overlap(x, y):
            raise ValueError(f"{name} must not overlap {other}")


def _overlap(x: Array, y: Array) -> bool:
    try:
        return np.shares_memory(x, y, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


def number(name: str, value: object, *, positive: bool = False) -> float:
    """Convert a value to a float within the range of float32, or raise; an array may hold it if it has no axes."""
    if is_array_of_one(value):
        value = value[()]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:  # an int with hundreds of digits
        result = math.inf
    if not (_FLOAT32_TINY if positive else -_FLOAT32_MAX) <= result <= _FLOAT32_MAX:
        raise ValueError(f"{name} must be {'positive and ' if positive else ''}finite in float32, got {value}")
    return result


def is_array_of_one(value: object) -> TypeGuard[Array]:
    """Whether a value is a NumPy array of floats without axes."""
    return isinstance(value, np.ndarray) and not value.ndim and value.dtype.kind == "f"


def integer(name: str, value: Any) -> int:
    """Convert a value to an int, or raise TypeError; a bool is not one."""
    if type(value) is int:
        return value
    if not isinstance(value, (bool, np.bool_, type, np.ndarray)):
        with suppress(TypeError):  # a tensor has __index__ whatever it holds
            return operator.index(value)
    raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def boolean(name: str, value: object) -> None:
    """Raise TypeError unless the value is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check(value: object) -> bool:
    """Convert the option `check` to a bool; None reads the environment, other types raise TypeError."""
    if value is None:
        return is_on("PAGEDKV_CHECK")
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"check must be None, True or False, got {value!r}")
    return bool(value)
