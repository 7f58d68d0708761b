"""Kernels with a score_mod: kept in the process alone, and refused if it does not compile or can raise."""

import math
import warnings

import numpy as np
import pytest
from numba import cuda, float32, types

from pagedkv.compiler.compile import compile_kernel
from pagedkv.kernels.device.source import KernelSource

from .compile_cases import Config, make_scale

pytestmark = pytest.mark.usefixtures("directory")


def test_a_score_mod_is_kept_in_the_process_alone(compiled, directory):
    def halve(score, q_pos, k_pos, head, seq):
        return score * 0.5 if k_pos > q_pos else math.tanh(score)

    kernel = compile_kernel(make_scale, Config(3, halve))
    assert kernel.name == "scale[factor=3, score_mod=halve]"
    assert compile_kernel(make_scale, Config(3, halve)) is kernel
    assert compile_kernel(make_scale, Config(3, lambda score, q_pos, k_pos, head, seq: score)) is not kernel
    assert len(compiled) == 2
    assert not directory.exists()


def test_a_score_mod_without_source_raises_no_warning():
    scope = {}
    exec("def double(score, q_pos, k_pos, head, seq): return score * 2", scope)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_kernel(make_scale, Config(3, scope["double"]))


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, q_pos, k_pos, head, seq: str(score),
        lambda score, q_pos, k_pos, head, seq: None,
        lambda score, q_pos, k_pos, head, seq: score * 1j,
        lambda score, q_pos, k_pos, head, seq: print(score),
        lambda score, q_pos, k_pos, head, seq: sorted([score])[0],
        lambda score: score,
        print,
        int,
    ],
    ids=["a string", "nothing", "complex", "print", "a list", "one argument", "built in", "a class"],
)
def test_a_score_mod_that_cannot_be_used_says_so(compiled, score_mod):
    with pytest.raises(TypeError, match="score_mod must be a function of \\(score, q_pos, k_pos, head, seq\\)"):
        compile_kernel(make_scale, Config(3, score_mod))
    compile_kernel(make_scale, Config(3, lambda score, q_pos, k_pos, head, seq: score))


def _asserts():
    scope = {}  # pytest writes other code for what it finds in a file
    exec("def asserts(score, q_pos, k_pos, head, seq):\n    assert score < 1e30\n    return score", scope)
    return scope["asserts"]


def _checked(score):
    if score > 1e30:
        raise ValueError("too large")
    return score


@pytest.mark.parametrize(
    "score_mod",
    [
        _asserts(),
        lambda score, q_pos, k_pos, head, seq: CHECKED(score),
        lambda score, q_pos, k_pos, head, seq: PAIR[head],
    ],
    ids=["assert", "a function that raises", "a tuple"],
)
def test_a_score_mod_that_can_raise_is_refused(compiled, score_mod):
    with pytest.raises(TypeError, match=r"^score_mod must be .* it can raise an exception, and a kernel cannot"):
        compile_kernel(make_scale, Config(3, score_mod))
    assert not compiled


CHECKED = cuda.jit(device=True)(_checked)
PAIR = (1.0, 2.0)
TABLE = np.arange(8, dtype=np.float32)


def test_a_score_mod_that_cannot_raise_is_compiled():
    def loops(score, q_pos, k_pos, head, seq):
        for i in range(0, k_pos, 2):
            score += math.sin(i) / (k_pos - q_pos) + score % head + k_pos // head + TABLE[i % 8] + head**k_pos
        return score if score < 3 else 0.5 ** float(k_pos)

    compile_kernel(make_scale, Config(3, loops))


def make_faulty(config):
    def kernel(values):
        values[0] = "text"

    return KernelSource(kernel, types.void(types.CPointer(float32)), 32)


def test_an_error_of_a_kernel_is_not_blamed_on_the_score_mod():
    with pytest.raises(Exception, match=r"text|unicode") as caught:
        compile_kernel(make_faulty, Config(3, lambda score, q_pos, k_pos, head, seq: score))
    assert "score_mod" not in str(caught.value)
