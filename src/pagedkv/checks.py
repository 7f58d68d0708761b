"""Checks that the operations share: of an array its shape, dtype, strides and alignment; a number, block ids.

Every function raises or returns; none writes to what it is given.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np

from .arrays import Array
from .layouts import FLOAT_DTYPES, VECTOR_BYTES
from .placement import Side

INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
FLOAT32 = np.dtype(np.float32)

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).smallest_subnormal)
_OVERLAP_WORK: Any = 100_000  # NumPy's stubs know only the special values 0 and -1


def shape(name: str, x: Array, symbols: str, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless x has the expected shape, called `symbols` in the glossary's words."""
    if x.shape != expected:
        raise ValueError(f"{name} must have shape {symbols} = {expected}, got {x.shape}")


def ndim(name: str, x: Array, symbols: str, expected: int) -> None:
    """Raise ValueError unless x has the expected number of axes, called `symbols` in the glossary's words."""
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


def row_alignment(name: str, x: Array, side: Side) -> None:
    """Raise ValueError unless CUDA kernels, where they run, can move the rows of x in vectors of 16 bytes.

    A row is the innermost axis. Where it is no multiple of 16 bytes, the largest power of two that divides it is
    enough.
    """
    if side.backend == "cpu" or not x.size:
        return
    vector = math.gcd(x.shape[-1] * x.itemsize, VECTOR_BYTES)
    address = address_of(x)
    if address % vector:
        raise ValueError(
            f'{name} must begin at a multiple of {vector} bytes for backend "{side.backend}", got address {address:#x}'
        )
    if any(stride % vector for stride, length in zip(x.strides[:-1], x.shape, strict=False) if length > 1):
        raise ValueError(
            f"{name} must have rows at multiples of {vector} bytes "
            f'for backend "{side.backend}", got strides {x.strides} in bytes'
        )


def address_of(x: Array) -> int:
    """The address of element 0."""
    address: int = x.__array_interface__["data"][0]
    return address


def writable(name: str, x: Array) -> None:
    """Raise ValueError unless x can be written and has no element twice."""
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


def apart(name: str, x: Array, others: Iterable[tuple[str, Array]]) -> None:
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
    """The value as a float that float32 can hold, or raise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:  # an int with hundreds of digits
        result = math.inf
    if not (_FLOAT32_TINY if positive else -_FLOAT32_MAX) <= result <= _FLOAT32_MAX:
        raise ValueError(f"{name} must be {'positive and ' if positive else ''}finite in float32, got {value}")
    return result


def integer(name: str, value: Any) -> int:
    """The value as an int, or raise TypeError; a bool is none."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__") or isinstance(value, np.ndarray):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    return operator.index(value)


def boolean(name: str, value: object) -> None:
    """Raise TypeError unless the value is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_option(value: object) -> bool:
    """Whether kernels check values in device arrays: `check`, or what the environment says where it is None.

    Host arrays are checked on the host whatever it is. Anything but None, True and False is a TypeError.
    """
    if value is None:
        return os.environ.get("PAGEDKV_CHECK") == "1"
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"check must be None, True or False, got {value!r}")
    return bool(value)


def block_pairs(pairs: Array, num_sources: int, num_destinations: int, *, one_pool: bool) -> None:
    """Raise unless pairs (n, 2) names blocks there are and no destination twice, nor, in one pool, as a source."""
    if not len(pairs):
        return
    for column, what, count in ((0, "source", num_sources), (1, "destination", num_destinations)):
        bad = pairs[:, column].view(np.uint64) >= count
        if bad.any():
            row = int(bad.argmax())
            raise IndexError(
                f"pairs must hold block ids in 0..num_blocks-1 = 0..{count - 1}, "
                f"got {what} {pairs[row, column]} in pair {row}"
            )
    written = np.sort(pairs[:, 1])
    again = written[1:] == written[:-1]
    if again.any():
        raise ValueError(f"pairs must name a destination once, got destination {written[1:][again][0]} twice")
    if one_pool:
        both = np.isin(pairs[:, 0], written)
        if both.any():
            raise ValueError(f"pairs must not use a destination as a source, got block {pairs[both, 0][0]} as both")
