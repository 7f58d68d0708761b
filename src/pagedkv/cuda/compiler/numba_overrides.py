"""What numba-cuda does otherwise while it compiles a kernel for this package.

It asks the current device where it was told which one to compile for, puts device functions in an order of its own for
each process, and takes a quarter of its time for the types of `a + b`. The overrides are for one compilation, and are
taken back after it; one thread at a time may enter, which compile.py's lock sees to.
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
    """numba-cuda with the overrides of this file, to compile for `capability`."""
    with current_device_is(capability), functions_in_order(), operators_typed_once(), no_collection():
        yield


@contextmanager
def current_device_is(capability: tuple[int, int]) -> Iterator[None]:
    """Answer, in this thread alone, what numba-cuda asks the current device when a kernel calls a device function.

    It asks for the compute capability although it was told which one to compile for, and without a driver that is an
    error.
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
    """Keep the device functions of a kernel in the order in which they are met, in this thread alone.

    numba-cuda keeps them in sets, whose order changes from process to process, and with it the PTX.
    """
    from numba.cuda import codegen

    thread = threading.get_ident()

    def make_set(*items: Any) -> Any:
        return _InOrder() if threading.get_ident() == thread else set(*items)

    with _replaced(codegen, "set", make_set):
        yield


@contextmanager
def operators_typed_once() -> Iterator[None]:
    """Find the type of an operator once for the same types of scalars.

    For each `a + b` of two integers numba-cuda tries some twenty implementations, those for strings and arrays among
    them, and compares all options of the compiler for each. Nothing that scalars depend on changes meanwhile.
    """
    from numba import types
    from numba.cuda.descriptor import cuda_target

    context = cuda_target.typing_context
    resolve: Callable[..., Any] = context.resolve_function_type
    scalars = (types.Number, types.Boolean)  # literals of them, too
    operators = {bool, *filter(callable, vars(operator).values())}
    known: dict[Any, Any] = {}

    def resolve_once(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            kwargs
            or not isinstance(function, types.Function)
            or function.typing_key not in operators
            or not all(isinstance(arg, scalars) for arg in args)
        ):
            return resolve(function, args, kwargs)
        key = function, tuple(args)
        if key not in known:
            known[key] = resolve(function, args, kwargs)
        return known[key]

    with _replaced(context, "resolve_function_type", resolve_once):
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection: it would go through all objects of the process, again and again, to find next to none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of a module's or an object's attribute, which may be its class's or a builtin else."""
    own = {name: vars(owner)[name]} if name in vars(owner) else {}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(own)


class _InOrder:
    """As much of a set as numba-cuda's code libraries use, iterated in the order of insertion."""

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
