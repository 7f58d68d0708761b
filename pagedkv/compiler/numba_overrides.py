"""Overrides of numba-cuda for the length of one compilation.

Without them numba-cuda queries the current device even when told what to compile for, orders device functions
differently in every process, and describes variables in a way that some versions of NVVM refuse. It also resolves the
types of each `a + b` anew, and meanwhile the garbage collector traverses all objects of the process. Only one thread at
a time may enter, which kernel_cache/compile_thread.py ensures. CONTRIBUTING.md says which patches of numba-cuda would
make them unnecessary.
"""

from __future__ import annotations

import gc
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def overridden(capability: tuple[int, int]) -> Iterator[None]:
    """Apply all overrides of this file, to compile for `capability`."""
    with (
        current_device_is(capability),
        functions_in_order(),
        lines_without_variables(),
        operators_typed_once(),
        no_collection(),
    ):
        yield


@contextmanager
def current_device_is(capability: tuple[int, int]) -> Iterator[None]:
    """Answer numba-cuda's queries of the current device, in this thread only.

    When a kernel calls a device function, numba-cuda queries the compute capability although it was told which one to
    compile for; without a driver the query fails.
    """
    from numba.cuda import compiler, dispatcher

    ask = dispatcher.get_current_device
    thread = threading.get_ident()

    def answer() -> Any:
        return SimpleNamespace(compute_capability=capability) if threading.get_ident() == thread else ask()

    with _replaced(dispatcher, "get_current_device", answer), _replaced(compiler, "get_current_device", answer):
        yield


@contextmanager
def functions_in_order() -> Iterator[None]:
    """Keep the device functions of a kernel in the order of their first use, in this thread only.

    numba-cuda keeps them in sets, whose order differs between processes, and with it the PTX.
    """
    from numba.cuda import codegen

    thread = threading.get_ident()

    def make_set(*items: Any) -> Any:
        return _OrderedSet() if threading.get_ident() == thread else set(*items)

    with _replaced(codegen, "set", make_set):
        yield


@contextmanager
def lines_without_variables() -> Iterator[None]:
    """Describe no variables in PTX that names lines, in this thread only.

    No tool needs them, and NVVM 13.0 refuses a variable that holds the address of a shared array ("Symbol name with
    unsupported characters").
    """
    from numba.cuda.debuginfo import CUDADIBuilder

    thread = threading.get_ident()

    def in_other_threads(describe: Callable[..., Any]) -> Callable[..., Any]:
        def describe_in_other_threads(*args: Any, **options: Any) -> Any:
            return None if threading.get_ident() == thread else describe(*args, **options)

        return describe_in_other_threads

    with (
        _replaced(CUDADIBuilder, "mark_variable", in_other_threads(CUDADIBuilder.mark_variable)),
        _replaced(CUDADIBuilder, "update_variable", in_other_threads(CUDADIBuilder.update_variable)),
    ):
        yield


@contextmanager
def operators_typed_once() -> Iterator[None]:
    """Resolve the type of an operator once for the same scalar types.

    For each `a + b` of two integers numba-cuda tries some twenty implementations, including those for strings and
    arrays, and compares all compiler options for each: once when it infers types, and again when it makes code. Nothing
    that the result depends on changes during a compilation.
    """
    from numba import types
    from numba.cuda.descriptor import cuda_target

    resolve: Callable[..., Any] = types.Function.get_call_type
    scalars = (types.Number, types.Boolean)  # and literals of them
    operators = {bool, *filter(callable, vars(operator).values())}
    known: dict[Any, Any] = {}

    def resolve_once(function: Any, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            kwargs
            or context is not cuda_target.typing_context
            or function.typing_key not in operators
            or not all(isinstance(arg, scalars) for arg in args)
        ):
            return resolve(function, context, args, kwargs)
        key = function, tuple(args)
        if key not in known:
            known[key] = resolve(function, context, args, kwargs)
        return known[key]

    with _replaced(types.Function, "get_call_type", resolve_once):
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage: the collector would traverse all objects of the process often, and free next to none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or an object, be it its own, its class's or a builtin."""
    is_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class _OrderedSet:
    """The part of a set that numba-cuda's code libraries use, iterated in insertion order."""

    def __init__(self) -> None:
        self._items: dict[Any, None] = {}

    def add(self, item: Any) -> None:
        self._items[item] = None

    def update(self, items: Iterable[Any]) -> None:
        self._items.update(dict.fromkeys(items))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
