"""Device functions of the same code and constants are one, which numba compiles once."""

import gc
import os
import weakref

import numpy as np
import pytest
from numba import cuda, float32, int32, types

import pagedkv.compiler.compile as compiling
from pagedkv.compiler.compile import compile_kernel
from pagedkv.kernels.device import source
from pagedkv.kernels.device.intrinsics.thread import unrolled
from pagedkv.kernels.device.logits import make_modify
from pagedkv.kernels.device.source import KernelSource, Steps, device_function, with_lineinfo

from ...compiler.compile_cases import Config
from ...compiler.conftest import start_again


def made(constant, default=0):
    @device_function
    def function(x, y=default):
        return x + constant + y

    return function


def another(constant, default=0):
    @device_function
    def function(x, y=default):
        return x - constant + y

    return function


def unrolled_of(count, constant):
    @unrolled(count)
    def body(i, x):
        x[i] = constant

    return body


INNER = made(1), made(2)


@pytest.mark.parametrize(
    "constant",
    [1, True, None, "1", 0.0, np.nan, np.float32(1), int32, INNER[0], Steps(INNER[0]), (1, (2.0, INNER[0])), Config(3)],
)
def test_the_same_code_and_constants_are_one_function(constant):
    assert made(constant) is made(constant)
    assert unrolled_of(3, constant) is unrolled_of(3, constant)


def test_what_is_made_again_of_the_same_parts_is_one_function():
    assert made(made(3)) is made(made(3))
    assert made(Steps(made(3))) is made(Steps(made(3)))
    assert made(unrolled_of(2, 1)) is made(unrolled_of(2, 1))


ALIKE = [1, True, 1.0, np.float32(1), 0.0, -0.0, np.float32(0), np.float32(-0.0), 2, "1", int32, INNER[0], INNER[1]]
ALIKE += [Steps(INNER[0]), Steps(INNER[1]), (1,), (True,), (1, 1), ((1,),), (INNER[0],)]


def test_other_code_or_constants_are_another_function():
    functions = [made(constant) for constant in ALIKE] + [another(1), made(1, default=1), made(1, default=True)]
    with with_lineinfo(False):
        functions.append(made(1))
    assert len(set(map(id, functions))) == len(functions)
    bodies = [unrolled_of(2, 1), unrolled_of(3, 1), unrolled_of(2, True)]
    assert len(set(map(id, bodies))) == 3


def test_the_same_code_in_another_module_of_the_same_name_is_another_function():
    functions = []
    for bias in (1, 2):
        names = {"__name__": "module", "BIAS": bias}
        exec("def function(x):\n    return x + BIAS", names)
        functions.append(device_function(names["function"]))
    assert functions[0] is not functions[1]


def test_functions_that_constants_name_are_themselves():
    """They may read globals that have changed, as a score_mod does."""
    names = {"SLOPE": 1}
    code = "def score_mod(x):\n    return x * SLOPE"
    functions = []
    for _ in range(2):
        exec(code, names)
        functions.append(names["score_mod"])
    first, second = functions
    assert made(first) is not made(second)
    assert made(Config(1, first)) is not made(Config(1, second))


@pytest.mark.parametrize("part", [lambda x: x, lambda x: (1, (x,)), Steps, lambda x: unrolled_of(2, x)])
def test_what_calls_a_score_mod_is_not_kept(part):
    """There may be a new one in every call. numba itself keeps what is unrolled, but not what calls that."""

    def score_mod(score, q_pos, k_pos, head, seq):
        return score

    function = made(made(part(make_modify(score_mod))))
    reference = weakref.ref(function)
    del function
    gc.collect()
    assert reference() is None


def make_wide(config):
    return kernel_of(config, 64)


def make_narrow(config):
    return kernel_of(config, 32)


def kernel_of(config, num_threads):
    factor = float32(config.factor)

    @device_function
    def scale(x):
        return x * factor

    def kernel(values):
        i = cuda.threadIdx.x
        values[i] = scale(values[i])

    return KernelSource(kernel, types.void(types.CPointer(float32)), num_threads)


def test_a_kernel_is_the_same_with_functions_of_another_one(monkeypatch):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", os.devnull)
    compiled = []
    make = compiling._make_ptx
    monkeypatch.setattr(compiling, "_make_ptx", lambda *args: compiled.append(args) or make(*args))
    source._jitted.cache_clear()
    alone = compile_kernel(make_narrow, Config(7)).ptx
    source._jitted.cache_clear()
    start_again(monkeypatch)
    compile_kernel(make_wide, Config(7))
    shared = source._jitted.cache_info().hits
    assert compile_kernel(make_narrow, Config(7)).ptx == alone
    assert source._jitted.cache_info().hits == shared + 1
    assert len(compiled) == 3
