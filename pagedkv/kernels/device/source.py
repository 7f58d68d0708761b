"""What kernels are made of: device functions, namespaces of them, and what a kernel's factory returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from types import ModuleType
from typing import Any

from .language import cuda

MOST_FUNCTIONS = 4096  # a kernel of split has some 75


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel before it is compiled.

    Attributes
    ----------
    function : callable
        Device code, undecorated; its closure variables are its compile-time constants.
    signature : numba signature
        ``types.void(...)`` of pointers, int64 and float64 only, so that a launch passes 8 bytes per argument.
    num_threads : int
        Threads of a thread block, which is one-dimensional.
    min_blocks : int
        Thread blocks that must fit on a multiprocessor, for which ptxas limits the registers of a thread. While ptxas
        spills, the linker asks for one fewer, down to two.
    is_specific : bool
        Whether it has instructions of one compute capability alone, such as wgmma of 9.0: the target is sm_90a, and the
        machine code runs on no other.
    """

    function: Callable[..., None]
    signature: Any
    num_threads: int
    min_blocks: int = 1
    is_specific: bool = False


_lineinfo = ContextVar("lineinfo", default=True)


@contextmanager
def with_lineinfo(lineinfo: bool) -> Iterator[None]:
    """Decide whether kernels that are made meanwhile name the lines of their device functions in the PTX."""
    token = _lineinfo.set(lineinfo)
    try:
        yield
    finally:
        _lineinfo.reset(token)


def device_function(function: Callable[..., Any]) -> Any:
    """Decorate a function that kernels call: inlined, with line info in the PTX if the kernel has it.

    Functions with the same code and constants are one object, which numba compiles once for all kernels of a process.
    Those at module level always have line info. Pass constants as int64(0): a literal has its own type, for which numba
    would compile the function once more.
    """
    return cached(_jitted, _SameCode(function), _lineinfo.get())


def user_function(function: Callable[..., Any]) -> Any:
    """The device function of a user's function, for one kernel.

    No cache keeps it or what calls it, since users may make a new function for each call.
    """
    made = cuda.jit(device=True)(function)
    made.is_transient = True
    return made


def cached(make: Any, *parts: Any) -> Any:
    """Call a function that has an lru_cache, but without the cache if one of the parts calls a user's function."""
    is_transient = any(map(_is_transient, parts))
    made = (make.__wrapped__ if is_transient else make)(*parts)
    made.is_transient = is_transient
    return made


class Steps(ModuleType):
    """Device functions that belong together, called as ``steps.name(...)``; numba knows no namespaces but modules."""

    def __init__(self, *functions: Any) -> None:
        super().__init__("steps")
        vars(self).update({function.__name__: function for function in functions})


class _SameCode:
    """A function, which equals others with the same code and constants."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        constants = [cell.cell_contents for cell in function.__closure__ or ()]
        # Globals are compared by identity: a module may be loaded twice, once edited. They live as long as `function`.
        self._content = id(function.__globals__), function.__code__, _content((*constants, function.__defaults__))
        self.is_transient = any(map(_is_transient, constants))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameCode) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)


@lru_cache(MOST_FUNCTIONS)
def _jitted(same: _SameCode, lineinfo: bool) -> Any:
    return cuda.jit(device=True, forceinline=True, lineinfo=lineinfo)(same.function)


def _is_transient(constant: Any) -> bool:
    if isinstance(constant, Steps):
        return any(map(_is_transient, vars(constant).values()))
    if isinstance(constant, tuple):
        return any(map(_is_transient, constant))
    return getattr(constant, "is_transient", False)


def _content(constant: Any) -> Hashable:
    if isinstance(constant, Steps):
        return tuple((name, step) for name, step in vars(constant).items() if not name.startswith("__"))
    if isinstance(constant, tuple):
        return type(constant), *map(_content, constant)
    return type(constant), repr(constant) if isinstance(constant, Real) else constant  # 1 == True, 0.0 == -0.0
