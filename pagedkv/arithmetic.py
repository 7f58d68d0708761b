"""Arithmetic on the host under the defaults, whatever the caller's thread has set.

A result depends on more than its operands: on the rounding mode and the flushing of denormals, which a thread has and
`torch.set_flush_denormal` sets, and on NumPy's errstate, by which a value that underflows is an exception. The threads
of a call must agree about all of it, and none of it is a reason to stop.
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


def _of_the_c_library() -> tuple[Callable[[Any], object], Callable[[Any], object], Any]:
    """fegetenv, fesetenv and FE_DFL_ENV; functions that do nothing where there are none."""
    try:
        library = ctypes.PyDLL(None)
        get, put = library.fegetenv, library.fesetenv
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library of the process
        return id, id, None
    try:
        return get, put, _Environment.in_dll(library, "_FE_DFL_ENV")  # macOS
    except ValueError:
        return get, put, ctypes.c_void_p(-1)  # glibc and musl


_get_environment, _set_environment, _DEFAULT = _of_the_c_library()

# NumPy keeps the errstate in a context variable. To compute in a copy of a context is quicker than np.errstate, and the
# caller's errstate is never touched: there is nothing that an interrupt could leave undone.
_quiet = Context()
_quiet.run(np.seterr, all="ignore")


def with_default_float_env(compute: Callable[P, R]) -> Callable[P, R]:
    """A function that computes under the defaults, in a thread that is afterwards as it was before."""

    def compute_by_defaults(*args: P.args, **kwargs: P.kwargs) -> R:
        environment = _Environment()
        _get_environment(environment)
        try:
            _set_environment(_DEFAULT)
            return _quiet.copy().run(compute, *args, **kwargs)
        finally:
            # Python looks for interrupts after calls of C, not before: this one happens.
            _set_environment(environment)

    return compute_by_defaults
