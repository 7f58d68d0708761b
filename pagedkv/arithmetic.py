"""Arithmetic on the host in the default floating-point environment, whatever the caller's thread has set.

A result depends on more than its operands. Each thread has a rounding mode and may flush denormals, as
`torch.set_flush_denormal` asks it to, and NumPy's errstate may turn an underflow into an exception. All threads of a
call must compute alike, and none of these settings is a reason to fail.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextvars import Context
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

_Environment = ctypes.c_char * 64  # a fenv_t has 8 to 32 bytes


def _find_fenv() -> tuple[Callable[[Any], object], Callable[[Any], object], Any]:
    """Look up fegetenv, fesetenv and FE_DFL_ENV; where the C library has none, return functions that do nothing."""
    try:
        library = ctypes.PyDLL(None)
        get, put = library.fegetenv, library.fesetenv
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library of the process
        return id, id, None
    try:
        return get, put, _Environment.in_dll(library, "_FE_DFL_ENV")  # macOS
    except ValueError:
        return get, put, ctypes.c_void_p(-1)  # glibc and musl


_get_environment, _set_environment, _DEFAULT = _find_fenv()

# NumPy keeps the errstate in a context variable. Running in a copy of a context is faster than np.errstate, and leaves
# the caller's errstate alone, so an interrupt cannot leave it changed.
_quiet = Context()
_quiet.run(np.seterr, all="ignore")


def with_default_float_env(compute: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to run in the default floating-point environment; the caller's own comes back afterwards."""

    def compute_by_defaults(*args: P.args, **kwargs: P.kwargs) -> R:
        environment = _Environment()
        _get_environment(environment)
        try:
            _set_environment(_DEFAULT)
            return _quiet.copy().run(compute, *args, **kwargs)
        finally:
            # Python handles interrupts after a C call, not before it, so this call always happens.
            _set_environment(environment)

    return compute_by_defaults
