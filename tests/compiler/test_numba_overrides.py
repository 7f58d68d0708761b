"""What numba-cuda does otherwise while it compiles, and that it is itself again afterwards."""

import gc
import operator
import threading
from contextlib import nullcontext

import pytest
from numba import types
from numba.core.errors import TypingError
from numba.cuda import codegen, compiler, dispatcher
from numba.cuda.debuginfo import CUDADIBuilder
from numba.cuda.descriptor import cuda_target

import pagedkv.compiler.compile as compiling
from pagedkv.compiler import numba_overrides
from pagedkv.compiler.compile import compile_kernel
from pagedkv.compiler.numba_overrides import (
    current_device_is,
    functions_in_order,
    operators_typed_once,
    overridden,
)
from pagedkv.kernels.paged.attention import make_v1
from pagedkv.kernels.paged.config import AttentionConfig

from .compile_cases import Config, make_scale

CONTEXT = cuda_target.typing_context


def state():
    """Everything that is overridden."""
    return (
        *(dispatcher.get_current_device, compiler.get_current_device),
        *("set" in vars(codegen), types.Function.get_call_type, gc.isenabled()),
        *(CUDADIBuilder.mark_variable, CUDADIBuilder.update_variable),
    )


def interrupt(override):
    with override:
        raise KeyboardInterrupt


def test_a_compilation_has_every_override():
    before = state()
    with overridden((9, 0)):
        assert all(during != outside for during, outside in zip(state(), before, strict=True))


@pytest.mark.usefixtures("directory")
def test_numba_is_itself_after_a_compilation_and_after_an_error():
    before = state()
    compile_kernel(make_scale, Config(3))
    assert state() == before
    with pytest.raises(TypeError):
        compile_kernel(make_scale, Config(3, print))
    assert state() == before
    with pytest.raises(KeyboardInterrupt):
        interrupt(overridden((9, 0)))
    assert state() == before


def test_another_thread_asks_the_real_device(monkeypatch):
    seen = []

    def ask():
        seen.append(dispatcher.get_current_device())
        seen.append(codegen.set([1, 1]))

    monkeypatch.setattr(dispatcher, "get_current_device", lambda: "the real one")
    with current_device_is((8, 6)), functions_in_order():
        assert dispatcher.get_current_device().compute_capability == (8, 6)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert not isinstance(codegen.set(), set), "one without an order"
    assert seen == ["the real one", {1}]


@pytest.mark.usefixtures("directory")
def test_lines_come_without_variables(monkeypatch):
    """NVVM 13.0 refuses one that holds the address of a shared array."""
    given, compile_ir = [], codegen.nvvm.compile_ir

    def compile_and_tell(modules, **options):
        given.extend([modules] if isinstance(modules, str) else modules)
        return compile_ir(modules, **options)

    monkeypatch.setattr(codegen.nvvm, "compile_ir", compile_and_tell)
    kernel = compile_kernel(make_scale, Config(3), lineinfo=True)
    assert "\t.loc\t" in kernel.ptx
    assert any("!DILocation" in module for module in given)
    assert not any('call void @"llvm.dbg' in module for module in given)


@pytest.fixture
def asked(monkeypatch):
    """What numba is asked the type of: functions, and their numbers of arguments."""
    CONTEXT.refresh()  # as the first compilation does, to know any function
    calls = []
    resolve = types.Function.get_call_type

    def ask(function, context, args, kwargs):
        calls.append((function.typing_key, len(args)))
        return resolve(function, context, args, kwargs)

    monkeypatch.setattr(types.Function, "get_call_type", ask)
    return calls


def type_of(function, *args, **kwargs):
    return CONTEXT.resolve_function_type(CONTEXT.resolve_value_type(function), args, kwargs).return_type


def test_an_operator_is_typed_once_for_the_same_scalars(asked):
    with operators_typed_once():
        for _ in range(3):
            assert type_of(operator.add, types.int32, types.int32) == types.int64
            assert type_of(operator.add, types.int32, types.float32) == types.float64
            assert type_of(operator.mul, types.int32, types.int32) == types.int64
            assert type_of(bool, types.uint32) == types.boolean
    assert asked == [(operator.add, 2), (operator.add, 2), (operator.mul, 2), (bool, 1)]


def test_what_is_no_operator_on_scalars_is_typed_each_time(asked):
    array = types.Array(types.float32, 1, "C")
    with operators_typed_once():
        for _ in range(2):
            assert type_of(operator.getitem, array, types.int64) == types.float32
            assert type_of(min, types.int64, types.int64) == types.int64
    assert len(asked) == 4


def test_an_operator_that_scalars_do_not_have_is_an_error_each_time(asked):
    with operators_typed_once():
        for _ in range(2):
            with pytest.raises(TypingError):
                type_of(operator.lshift, types.float32, types.float32)
    assert len(asked) == 2


def ptx():
    with overridden((9, 0)):
        config = AttentionConfig(64, 16, "float32", "float32")
        return compiling._make_ptx(make_v1, config, (9, 0), False, "pagedkv_v1")


def test_the_override_that_saves_time_makes_the_same_kernel(monkeypatch):
    with_all = ptx()
    monkeypatch.setattr(numba_overrides, "operators_typed_once", nullcontext)
    assert ptx() == with_all


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_as_before_a_compilation(enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with overridden((9, 0)):
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
