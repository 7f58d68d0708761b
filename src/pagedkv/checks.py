"""Checks that the operations share: where an array is, its shape, dtype and strides, a number, block ids.

Every function raises or returns; none writes to what it is given.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from .arrays import Array, host_view, on_device
from .errors import BackendUnavailableError
from .layouts import FLOAT_DTYPES

BACKENDS = ("auto", "cpu", "cuda", "emulator")
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
FLOAT32 = np.dtype(np.float32)

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).smallest_subnormal)
_OVERLAP_WORK: Any = 100_000  # NumPy's stubs know only the special values 0 and -1


def host_arrays(backend: object, named: Sequence[tuple[str, Any]], *, across: bool = False) -> list[Array]:
    """NumPy views of the arrays of one call, when they are where the backend runs.

    Parameters
    ----------
    backend : str
        "auto", "cpu", "cuda" or "emulator".
    named : sequence of (name, array)
        The arrays, by the names of their arguments.
    across : bool
        The operation may go from the host to a device and back.
    """
    if not (isinstance(backend, str) and backend in BACKENDS):
        raise ValueError(f'backend must be "auto", "cpu", "cuda" or "emulator", got {backend!r}')
    views = []
    for name, x in named:
        if type(x) is np.ndarray:
            views.append(x)
        elif on_device(name, x):
            _refuse_device(backend, name, named, across)
        else:
            views.append(host_view(name, x))
    if backend == "cuda":
        raise ValueError(
            'backend "cuda" needs arrays on a CUDA device, got host arrays; move them or use backend "cpu"'
        )
    if backend == "emulator":
        raise BackendUnavailableError('this version of pagedkv has no emulator yet; use backend "cpu" or "auto"')
    return views


def _refuse_device(backend: str, name: str, named: Sequence[tuple[str, Any]], across: bool) -> None:
    for other, x in named:
        if not across and not on_device(other, x):
            raise ValueError(
                f"all arrays of a call must be on one side, got {name} on a device and {other} on the host"
            )
    if backend in ("cpu", "emulator"):
        raise ValueError(f'backend "{backend}" needs arrays on the host, got {name} on a device')
    raise BackendUnavailableError(
        f"{name} is on a device, and this version of pagedkv has no CUDA kernels yet; move the arrays to the host "
        "(cupy.asnumpy(x), tensor.cpu()) to run the CPU kernels"
    )


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


def check_option(value: object) -> None:
    """Raise TypeError unless `check` is None, True or False; host arrays are checked whatever it is."""
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"check must be None, True or False, got {value!r}")


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
