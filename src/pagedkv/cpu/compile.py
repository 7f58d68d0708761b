"""Compile a kernel with numba, and keep the machine code on disk.

numba's own cache checks only the file that defines a function, so a kernel would survive a change to a function it
calls; this one is keyed by all sources of the CPU backend, the kernel's config and signature, the versions and the
processor.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.compiler import CompileResult

from ..kernel_cache import Store, cache_dir, hash_of_sources

SUFFIX = ".kernel"
SOURCES = hash_of_sources(Path(__file__).parent)


class _DiskCache:
    """The cache interface that a numba dispatcher expects, with one file per compiled signature."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._store = Store(cache_dir("cpu"), SUFFIX)
        self.cache_path = str(self._store.directory)

    def _key(self, signature: Any, codegen: Any) -> bytes:
        facts = (numba.__version__, llvmlite.__version__, np.__version__, sys.version, codegen.magic_tuple())
        return repr((self._name, str(signature), facts)).encode() + SOURCES

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        body = self._store.load(self._key(signature, target_context.codegen()))
        if body is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(body))
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError):
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        from numba.core.serialize import dumps

        self._store.save(self._key(signature, result.codegen), dumps(result._reduce()))

    def enable(self) -> None:
        pass

    def disable(self) -> None:
        pass

    def flush(self) -> None:
        pass


def _name_apart(function: Callable[..., Any], tag: object) -> None:
    # All machine code of a process shares one symbol table. A symbol is a qualified name and a counter that restarts in
    # every process, so without the tag a kernel from disk could call a namesake that was compiled here.
    function.__qualname__ = f"{function.__qualname__}[{tag!r}]"


def device(tag: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a device function that a factory makes; `tag` is all that its code depends on."""

    def compile_device(function: Callable[..., Any]) -> Callable[..., Any]:
        _name_apart(function, tag)
        # Only kernels call it: without the wrappers for Python and C it compiles faster.
        return numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)

    return compile_device


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that becomes part of the kernel that calls it.

    For outer loops: LLVM optimizes a device function together with everything it calls, and then again in its caller.
    """
    return numba.njit(nogil=True, inline="always")(function)


def compile_kernel(function: Callable[..., Any], tag: object, *, keep: bool) -> Callable[..., Any]:
    """Compile a kernel, which releases the GIL; `keep` stores it on disk under its name and `tag`."""
    _name_apart(function, tag)
    kernel: Any = numba.njit(nogil=True, error_model="numpy")(function)
    if keep:
        kernel._cache = _DiskCache(f"{function.__module__}.{function.__qualname__}")
    return kernel
