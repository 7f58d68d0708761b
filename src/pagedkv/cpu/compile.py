"""Compile a kernel with numba, and keep the machine code on disk.

numba's own cache looks at the one file that a function stands in, so a kernel would outlive a change to a function it
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
    """What a numba dispatcher asks of a cache, with one file per compiled signature."""

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
    # All machine code of a process shares one space of symbols, made of qualified names and a counter that starts
    # again in each process: without the tag a kernel from disk could call a namesake that was compiled here.
    function.__qualname__ = f"{function.__qualname__}[{tag!r}]"


def device(tag: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that a factory makes for kernels; `tag` says for which ones."""

    def compile_device(function: Callable[..., Any]) -> Callable[..., Any]:
        _name_apart(function, tag)
        return numba.njit(nogil=True)(function)

    return compile_device


def compile_kernel(function: Callable[..., Any], tag: object, *, keep: bool) -> Callable[..., Any]:
    """A numba function without the GIL, kept on disk under its name and `tag`, or not kept."""
    _name_apart(function, tag)
    kernel: Any = numba.njit(nogil=True, error_model="numpy")(function)
    if keep:
        kernel._cache = _DiskCache(f"{function.__module__}.{function.__qualname__}")
    return kernel
