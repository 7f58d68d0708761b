"""Compile a kernel with numba for one signature, and keep its machine code on disk.

numba's own cache checks only the file that defines a function, so a kernel would survive a change of a function that it
calls, and it unpickles what it finds. The key of this one has all sources of the CPU backend, the kernel's config and
signature, the versions, numba's settings and the processor, and it keeps machine code with three names, never a pickle.

Compile on a thread that no signal reaches (`compile_thread`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
import numpy as np
from numba import _dynfunc
from numba.core import config as settings
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import Environment
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from ..environment import cache_dir
from ..errors import BackendUnavailableError
from ..kernel_cache.files import Store, hash_of_sources
from ..kernel_cache.progress import showing_progress

if settings.DISABLE_JIT:
    raise BackendUnavailableError(
        "NUMBA_DISABLE_JIT is set, and attention on the CPU has to be compiled: unset it, or call "
        "pagedkv.reference, which needs no compiler"
    )

SUFFIX = ".kernel"
SOURCES = hash_of_sources(Path(__file__).parent)

# numba's settings that change machine code; those of the processor are in `magic_tuple`.
CODE_SETTINGS = (
    *("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS", "DISABLE_INTEL_SVML"),
    *("BOUNDSCHECK", "DEBUGINFO_DEFAULT", "EXTEND_VARIABLE_LIFETIMES", "DEBUG_NRT", "NRT_STATS"),
)


class _Symbols(NamedTuple):
    """The names of a library of machine code, of the function that Python calls, and of the cell of its globals."""

    library: str
    entry: str
    environment: str


def _tag_name(function: Callable[..., Any], tag: object) -> None:
    # All machine code of a process shares one symbol table. A symbol is a qualified name and a counter that restarts in
    # every process, so without the tag a kernel from disk could call a namesake that was compiled here.
    function.__qualname__ = f"{function.__qualname__}[{tag!r}]"


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a device function whose code depends on nothing. Only kernels may call it: from Python it would crash.

    It has no wrappers for Python and C: kernels compile faster by a sixth without them.
    """
    return numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def device(tag: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a device function that a factory makes; `tag` is all that its code depends on."""

    def compile_device(function: Callable[..., Any]) -> Callable[..., Any]:
        _tag_name(function, tag)
        return helper(function)

    return compile_device


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that becomes part of the kernel that calls it.

    This is for outer loops: LLVM would optimize a device function with all that it calls, and again in its caller.
    """
    return numba.njit(nogil=True, inline="always")(function)


@global_compiler_lock  # a thread of the user's may be compiling too
def compile_kernel(
    function: Callable[..., Any], signature: tuple[Any, ...], tag: object, *, keep: bool
) -> Callable[..., Any]:
    """Compile a kernel, which releases the GIL, for arguments of the numba types `signature`.

    The result is machine code that Python calls. It takes arguments of exactly these types: unlike a dispatcher of
    numba it does not look at them and never compiles. `keep` stores it on disk under its name and `tag`.
    """
    _tag_name(function, tag)
    store = Store(cache_dir("cpu"), SUFFIX, keep=keep)
    key = _key(f"{function.__module__}.{function.__qualname__}", signature)
    with suppress(ValueError, TypeError):
        header, code = (store.load(key) or b"").split(b"\n", 1)
        return _load(function, _Symbols(**json.loads(header)), code)
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    with showing_progress(f"{function.__name__} for the CPU"):
        dispatcher.compile(signature)
    (compiled,) = dispatcher.overloads.values()
    library = compiled.library
    symbols = _Symbols(library.name, compiled.fndesc.llvm_cpython_wrapper_name, compiled.fndesc.env_name)
    # Constants that are Python objects, and functions that numba runs before the code, are in no machine code.
    if not compiled.environment.consts and not compiled.reload_init:
        store.save(key, json.dumps(symbols._asdict()).encode() + b"\n" + library._get_compiled_object())
    return _callable(function, library, symbols, compiled.environment, dispatcher)


def _key(name: str, signature: tuple[Any, ...]) -> bytes:
    settings.reload_config()  # as numba does before it compiles
    facts = (numba.__version__, llvmlite.__version__, np.__version__, sys.version)
    processor = cpu_target.target_context.codegen().magic_tuple()
    chosen = [(setting, getattr(settings, setting, None)) for setting in CODE_SETTINGS]
    return repr((name, str(signature), facts, processor, chosen)).encode() + SOURCES


def _load(function: Callable[..., Any], symbols: _Symbols, code: bytes) -> Callable[..., Any]:
    context = cpu_target.target_context
    rtsys.initialize(context)  # compiled code allocates from it
    library = context.codegen().create_library(symbols.library)
    library.enable_object_caching()
    library._set_compiled_object(code)
    library._finalize_final_module()
    environment = Environment(function.__globals__)
    library.codegen.set_env(symbols.environment, environment)
    return _callable(function, library, symbols, environment)


def _callable(
    function: Callable[..., Any], library: Any, symbols: _Symbols, environment: Any, *owners: Any
) -> Callable[..., Any]:
    """A Python function whose body is the machine code at an entry point, and which keeps its `owners` alive."""
    address = library.codegen._engine.get_function_address(symbols.entry)
    kernel: Callable[..., Any] = _dynfunc.make_function(
        sys.modules[function.__module__], function.__qualname__, "", address, environment, (library, *owners)
    )
    return kernel
