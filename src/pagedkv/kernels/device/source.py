"""What a kernel is made of: device functions, and what its factory returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any


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
        Threads of a block, which is one-dimensional.
    min_blocks : int
        Blocks that must fit on a multiprocessor at once: ptxas limits the registers of a thread for them.
    optimisation : int
        The level of ptxas, up to 3; at 1 it moves instructions less, and needs fewer registers.
    """

    function: Callable[..., None]
    signature: Any
    num_threads: int
    min_blocks: int = 1
    optimisation: int = 3


_lineinfo = ContextVar("lineinfo", default=True)


@contextmanager
def with_lineinfo(lineinfo: bool) -> Iterator[None]:
    """Whether kernels that are made here name the lines of their device functions in the PTX."""
    token = _lineinfo.set(lineinfo)
    try:
        yield
    finally:
        _lineinfo.reset(token)


def device_function(function: Callable[..., Any]) -> Any:
    """Decorate a function that kernels call: inlined, with line info in the PTX if the kernel has it.

    A module-level one, which all kernels share, always has line info. Pass constants as int64(0): a literal has a type
    of its own, for which the function would be compiled once more.
    """
    from numba import cuda

    return cuda.jit(device=True, forceinline=True, lineinfo=_lineinfo.get())(function)


class Steps(ModuleType):
    """The device functions of one subject, called as ``steps.name(...)``: a module is the one namespace numba knows."""

    def __init__(self, *functions: Any) -> None:
        super().__init__("steps")
        vars(self).update({function.__name__: function for function in functions})
