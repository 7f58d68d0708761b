"""Compile a user's kernel for the arguments of a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..kernel_cache.compile_thread import made_once
from ..kernels.device.language import cuda, types
from . import require_no_simulator
from .numba_overrides import overridden
from .ptx import Capability, external_functions

MOST_KERNELS = 64


class OwnKernel(NamedTuple):
    """PTX, and the name of its launches."""

    name: str
    ptx: str


def compile_own(function: Callable[..., Any], args: Sequence[Any], capability: Capability) -> OwnKernel:
    """Compile a function as ``numba.cuda.jit`` does when it is called with these arguments, with its lines.

    Parameters
    ----------
    function : callable
        A Python function, or what ``cuda.jit`` made of one.
    args : sequence
        NumPy arrays and numbers. A Python int is an int64, a float a float64.
    capability : tuple of int

    Returns
    -------
    OwnKernel
        The same object for the same function and types, unless MOST_KERNELS others have been compiled since.

    Raises
    ------
    TypeError
        An argument is neither an array nor a number, or the kernel calls a function that no device has.
    BackendUnavailableError
        numba's simulator is on.
    numba.cuda.core.errors.TypingError
        numba cannot compile it.
    """
    require_no_simulator()
    python = getattr(function, "py_func", function)
    return _compile(python, tuple(_type_of(i, arg) for i, arg in enumerate(args)), capability)


def _type_of(position: int, value: Any) -> Any:
    from numba.cuda.core.errors import NumbaNotImplementedError
    from numba.cuda.np import numpy_support

    if isinstance(value, bool | np.bool_):
        return types.boolean
    if isinstance(value, int):
        return types.int64
    if isinstance(value, float):
        return types.float64
    try:
        if isinstance(value, np.ndarray):
            layout = "C" if value.flags.c_contiguous else "F" if value.flags.f_contiguous else "A"
            of = numpy_support.from_dtype(value.dtype)
            return types.Array(of, value.ndim, layout, readonly=not value.flags.writeable)
        if isinstance(value, np.generic):
            return numpy_support.from_dtype(value.dtype)
    except NumbaNotImplementedError:
        raise TypeError(f"argument {position} has dtype {value.dtype}, {_why_unknown(value.dtype)}") from None
    raise TypeError(f"argument {position} must be a NumPy array or a number, got {type(value).__name__}")


def _why_unknown(dtype: np.dtype) -> str:
    """Why numba does not know a dtype, and what to do."""
    if dtype != dtype.newbyteorder("="):
        return 'whose bytes are in the other order: pass a copy, x.astype(x.dtype.newbyteorder("="))'
    if dtype.itemsize > 1:
        return "which numba does not know: convert it"
    return "which numba does not know: pass a view of its bits as uint8, x.view(np.uint8)"


@made_once(most=MOST_KERNELS)
def _compile(function: Callable[..., Any], argument_types: tuple[Any, ...], capability: Capability) -> OwnKernel:
    with overridden(capability):
        ptx, _ = cuda.compile_ptx(function, types.void(*argument_types), cc=capability, lineinfo=True)
    if external := external_functions(ptx):
        raise TypeError(f"{function.__name__} calls {', '.join(external)}, which no device has")
    return OwnKernel(function.__name__, ptx)
