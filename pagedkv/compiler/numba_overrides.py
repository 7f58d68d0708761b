"""Overrides of numba-cuda for the length of one compilation.

Without them numba-cuda queries the current device even when told what to compile for, and orders device functions
differently in every process. It spends a third of its time on the types of `a + b`, a tenth on comparing compiler
options, and a fifth on facts that it already has or does not use. Only one thread at a time may enter, which
compiling/compile_thread.py ensures.
"""

from __future__ import annotations

import functools
import gc
import operator
import threading
from collections import Counter
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
        options_listed_at_once(),
        sizes_asked_once(),
        lifetimes_when_needed(),
        variables_by_type(),
        assignments_counted_at_once(),
        registries_read_when_needed(),
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
        return _InOrder() if threading.get_ident() == thread else set(*items)

    with _replaced(codegen, "set", make_set):
        yield


@contextmanager
def lines_without_variables() -> Iterator[None]:
    """Where PTX names lines, describe no variables beside them, in this thread only.

    Nobody asks for them, and NVVM 13.0 refuses one that holds the address of a shared array ("Symbol name with
    unsupported characters").
    """
    from numba.cuda.debuginfo import CUDADIBuilder

    thread = threading.get_ident()

    def for_others(describe: Callable[..., Any]) -> Callable[..., Any]:
        def describe_for_others(*args: Any, **options: Any) -> Any:
            return None if threading.get_ident() == thread else describe(*args, **options)

        return describe_for_others

    with (
        _replaced(CUDADIBuilder, "mark_variable", for_others(CUDADIBuilder.mark_variable)),
        _replaced(CUDADIBuilder, "update_variable", for_others(CUDADIBuilder.update_variable)),
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
def options_listed_at_once() -> Iterator[None]:
    """List the options of a compilation by one merge of dicts.

    numba-cuda hashes and compares them all for each call of an overloaded function, and asks for each by its name.
    """
    from numba.cuda.core.targetconfig import TargetConfig

    defaults: dict[type, dict[str, Any]] = {}

    def values(options: Any) -> dict[str, Any]:
        kind = type(options)
        if kind not in defaults:
            defaults[kind] = {name: option.default for name, option in kind.options.items()}
        return {**defaults[kind], **options._values}

    with _replaced(TargetConfig, "values", values):
        yield


@contextmanager
def sizes_asked_once() -> Iterator[None]:
    """Ask LLVM for the size of a type, and Python for the parameters of a function, once.

    For each variable, and each store to one, numba-cuda has LLVM parse a module to learn how large it is; for each call
    it inspects the signature of what makes the code.
    """
    from numba.cuda.core import base
    from numba.cuda.target import CUDATargetContext

    size: Callable[..., int] = CUDATargetContext.get_abi_sizeof
    known: dict[Any, int] = {}

    def size_once(context: Any, kind: Any) -> int:
        if kind not in known:
            known[kind] = size(context, kind)
        return known[kind]

    with (
        _replaced(CUDATargetContext, "get_abi_sizeof", size_once),
        _replaced(base, "_has_loc", functools.cache(base._has_loc)),
    ):
        yield


@contextmanager
def lifetimes_when_needed() -> Iterator[None]:
    """Compute the live variables only for generators, and where numba-cuda inserts deletions.

    It does so nine times for each function, and makes use of it twice.
    """
    from numba.cuda.core.postproc import PostProcessor, VariableLifetime
    from numba.cuda.core.transforms import canonicalize_cfg

    run: Callable[..., None] = PostProcessor.run

    def run_in_part(processor: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
        code = processor.func_ir
        if emit_dels or code.is_generator:
            return run(processor, emit_dels, extend_lifetimes)
        code.blocks = canonicalize_cfg(code.blocks)
        code.variable_lifetime, code.generator_info = VariableLifetime(code.blocks), None

    with _replaced(PostProcessor, "run", run_in_part):
        yield


@contextmanager
def variables_by_type() -> Iterator[None]:
    """Tell from its type, once for each, whether a value is a variable or may hold some.

    numba-cuda lists the variables of each instruction many times, and checks up to four classes for each field of it.
    """
    from numba.cuda.core import ir

    kinds = {"variable": ir.var_types, "instruction": ir.inst_types, "values": (list, tuple), "named values": dict}
    kind_of: dict[type, str] = {}

    def variables_of(instruction: Any, value: Any) -> list[Any]:
        kind = kind_of.get(type(value))
        if kind is None:
            kind = next((name for name, classes in kinds.items() if isinstance(value, classes)), "")
            kind_of[type(value)] = kind
        if not kind:
            return []
        if kind == "variable":
            return [value]
        if kind == "instruction":
            return list(value.list_vars())
        parts = value if kind == "values" else value.values()
        found = []
        for part in parts:
            if kind_of.get(type(part)) != "":
                found += variables_of(instruction, part)
        return found

    with _replaced(ir.Inst, "_rec_list_vars", variables_of):
        yield


@contextmanager
def assignments_counted_at_once() -> Iterator[None]:
    """Count the assignments to all variables of a function by one walk through it.

    For each variable numba-cuda walks through the block that assigns to it, to learn whether it does so once.
    """
    from numba.cuda.core import ir
    from numba.cuda.core.analysis import compute_use_defs, must_use_alloca
    from numba.cuda.lowering import Lower

    find: Callable[..., None] = Lower._find_singly_assigned_variable

    def find_at_once(lower: Any) -> None:
        if lower.func_ir.func_id.is_generator:
            return find(lower)
        blocks = lower.func_ir.blocks
        counts = Counter(x.target.name for block in blocks.values() for x in block.find_insts(ir.assign_types))
        elsewhere = must_use_alloca(blocks).union(*compute_use_defs(blocks).usemap.values())
        lower._singly_assigned_vars = {name for name, count in counts.items() if count == 1} - elsewhere
        lower._blk_local_varmap = {}

    with _replaced(Lower, "_find_singly_assigned_variable", find_at_once):
        yield


@contextmanager
def registries_read_when_needed() -> Iterator[None]:
    """Look for new implementations of functions only if one is missing, not at each use of an intrinsic."""
    from numba.cuda.descriptor import cuda_target
    from numba.cuda.typing.templates import _TemplateTargetHelperMixin

    cuda_target.target_context.refresh()

    def first_registry(template: Any, reason: str) -> Any:
        return next(iter(cuda_target.target_context._registries))

    with _replaced(_TemplateTargetHelperMixin, "_get_target_registry", first_registry):
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection: it would traverse all objects of the process again and again, and free next to none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or an object, whether its own, its class's or a builtin."""
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


class _InOrder:
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
