"""The problems of problems.json on a GPU and in the emulator; without a GPU, in two emulators."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from pagedkv.cuda import driver
from pagedkv.cuda.bad_entries import raise_if_failed

from ...attention.kernels import assert_same_bits, new_results
from ...support.devices import CopyingDevice, OneMemory, emulator
from ...support.problems import assert_close, build
from ...support.strategies import long
from .problems import NUM_EACH, read, sources

PROBLEMS = {str(drawn): drawn for drawn in read()}
# One of each kind of kernel, for a run without a GPU.
SHORT = (
    "v1-D64-P16-float32-float32-2",
    "v2-D64-P8-float16-float16-2",
    "split-D128-G8-P16-float16-float16-0",
    "prefill-tensor_cores-0",
    "prefill-few_rows,_tensor_cores-0",
    "wgmma-128_dims-0",
    "prefill-stretches-0",
)


def gpu():
    """The GPU at hand, its compute capability, and how often it repeats a call."""
    device = driver.cuda_device(0, 0)
    return CopyingDevice(device), device.capability, 100


def other_emulator():
    """In the place of a GPU: thread blocks and warps of another schedule, on copies of the arrays."""
    device = OneMemory(seed=1)
    device.lineinfo = False
    return CopyingDevice(device), device.capability, 2


def solve(drawn, device, repeats=1):
    """[(out, lse)] of each of the calls, and the error that `check` makes of their first wrong entry."""
    problem = build(drawn.spec)
    kernel = replace(drawn.solver(), capability=device.capability)
    call = kernel.call(problem, check=drawn.wrong is not None)
    if drawn.wrong:
        array, *where, value = drawn.wrong
        getattr(call, array)[tuple(where) if array == "block_tables" else where[0]] = value
    results = [new_results(problem) for _ in range(repeats)]
    error = None
    with device:
        for out, lse in results:
            kernel.launch(device, call, out, lse)
        try:
            raise_if_failed([device])
        except (IndexError, ValueError) as raised:
            error = raised
    return [(out[: problem.num_written], lse[: problem.num_written]) for out, lse in results], error


def assert_within_rounding(result, expected):
    """Sums in another order, an exp2 that is off by two units: two roundings of the largest output, and 1e-5."""
    (out, lse), (expected_out, expected_lse) = ([x.astype(np.float64) for x in pair] for pair in (result, expected))
    eps = float(ml_dtypes.finfo(result[0].dtype).eps)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=1e-5 + 2 * eps * np.abs(expected_out).max(initial=0))
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "open_other"),
    [
        *((name, other_emulator) for name in SHORT),
        *long((name, other_emulator) for name in PROBLEMS if name not in SHORT),
        *(pytest.param(name, gpu, marks=pytest.mark.gpu) for name in PROBLEMS),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_gpu_and_the_emulator_agree(name, open_other):
    """On values within rounding, on what is wrong; and a GPU with itself, bit by bit."""
    drawn = PROBLEMS[name]
    device, capability, repeats = open_other()
    results, error = solve(drawn, device, repeats)
    own = emulator(global_race=True)
    own.capability = capability
    (expected,), expected_error = solve(drawn, own)
    assert repr(error) == repr(expected_error)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    assert_within_rounding(results[0], expected)
    if drawn.wrong is None:
        assert_close(build(drawn.spec), *results[0])


def test_every_variant_and_form_has_problems():
    """Otherwise: python -m tests.kernels.same.problems"""
    names = [drawn.name.rpartition("-")[0] for drawn in PROBLEMS.values()]
    assert names == [kernel.name for kernel in sources() for _ in range(NUM_EACH)]
    assert sum(drawn.wrong is not None for drawn in PROBLEMS.values()) == len(names) // NUM_EACH
