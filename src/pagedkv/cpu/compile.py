"""Compile a kernel with numba, and keep the machine code on disk.

numba's own cache looks at the one file that a function stands in, so a kernel would outlive a change to a function it
calls; this one is keyed by all sources of the CPU backend, the kernel's config and signature, the versions and the
processor.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.compiler import CompileResult

SUFFIX = ".kernel"
MOST_FILES = 400


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``PAGEDKV_CACHE_DIR``, or the user's own cache directory."""
    if chosen := os.environ.get("PAGEDKV_CACHE_DIR"):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pagedkv" / "cpu"


def _hash_of_sources() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


# Taken while the sources are imported: a file that changes under a running process must not pass for what runs.
SOURCES = _hash_of_sources()


class _DiskCache:
    """What a numba dispatcher asks of a cache, with one file per compiled signature."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.cache_path = str(cache_dir())

    def _path(self, signature: Any, codegen: Any) -> Path:
        facts = (numba.__version__, llvmlite.__version__, np.__version__, sys.version, codegen.magic_tuple())
        key = repr((self._name, str(signature), facts)).encode() + SOURCES
        return Path(self.cache_path) / (hashlib.sha256(key).hexdigest()[:40] + SUFFIX)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        path = self._path(signature, target_context.codegen())
        try:
            payload = path.read_bytes()
            checksum, body = payload[:32], payload[32:]
            if hashlib.sha256(body).digest() != checksum:
                return None
            return CompileResult._rebuild(target_context, *pickle.loads(body))
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError):
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        from numba.core.serialize import dumps

        body = dumps(result._reduce())
        path = self._path(signature, result.codegen)
        # A cache that cannot be written costs time at the next start, nothing else.
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Named like a kernel, so that one that a killed process leaves is dropped in its turn.
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix="new-", suffix=SUFFIX, delete=False) as file:
                try:
                    file.write(hashlib.sha256(body).digest() + body)
                    file.close()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._drop_oldest(path.parent)

    @staticmethod
    def _drop_oldest(directory: Path) -> None:
        files = list(directory.glob("*" + SUFFIX))
        if len(files) > MOST_FILES:
            for path in sorted(files, key=lambda path: path.stat().st_mtime)[: len(files) - MOST_FILES]:
                path.unlink(missing_ok=True)

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
        # A user without a home directory has no cache.
        with contextlib.suppress(RuntimeError):
            kernel._cache = _DiskCache(f"{function.__module__}.{function.__qualname__}")
    return kernel
