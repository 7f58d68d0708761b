"""The plugin for pytest: its fixture, and what a failing test shows."""

import pytest

from pagedkv.emulator import KernelFault
from pagedkv.testing import plugin

pytest_plugins = ["pytester"]

# A store past the end of an array of one element, in PTX that says it comes from line 3 of kernels.py.
TESTS = '''
import numpy as np, pytest
from types import SimpleNamespace

PTX = """
.version 8.5
.target sm_90
.address_size 64
.visible .entry store(.param .u64 p0)
{
.reg .b64 %rd<2>; .reg .b32 %r<2>;
.loc 1 3 0
ld.param.u64 %rd1, [p0];
mov.u32 %r1, %tid.x;
st.global.u32 [%rd1+4], %r1;
ret;
}
.file 1 "FILE"
"""

def launch(device, n):
    x = np.zeros(n, np.uint32)
    with device:
        kernel = SimpleNamespace(name="store", entry="", ptx=PTX, num_threads=1)
        device.launch(kernel, 1, [device.address("x", x)])
    return x

def test_fine(emulator_device):
    assert launch(emulator_device, 2).tolist() == [0, 0]

def test_fault(emulator_device):
    launch(emulator_device, 1)

def test_cause(emulator_device):
    try:
        launch(emulator_device, 1)
    except Exception as fault:
        raise ValueError("a launch failed") from fault

def test_other(emulator_device):
    assert 1 == 2

@pytest.mark.parametrize("emulator_device", [{"seed": 1}, {"stats": True}], indirect=True)
def test_options(emulator_device):
    assert "global_race=True" in repr(emulator_device)
    assert ("seed=1," in repr(emulator_device)) != ("stats=True" in repr(emulator_device))
'''


@pytest.fixture
def results(pytester):
    kernels = pytester.makepyfile(kernels="@cuda.jit\ndef store(x):\n    x[1] = cuda.threadIdx.x\n    return\n")
    pytester.makeconftest('pytest_plugins = ["pagedkv.testing.plugin"]')
    pytester.makepyfile(TESTS.replace("FILE", str(kernels)))
    # Where the variable CI is set, the summary repeats whole messages.
    return lambda *options: pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rN", *options)


def test_a_fault_fails_the_test_at_the_kernel_s_line(results):
    result = results()
    result.assert_outcomes(passed=3, failed=3)
    text = "\n".join(line.removeprefix("E").removeprefix(" " * 11) for line in result.outlines)
    assert "MemoryFault: out of bounds global store; address " in text
    assert "kernel store, thread block (0, 0, 0), thread (0, 0, 0)\n" in text
    assert "kernels.py:3\n     1  @cuda.jit\n     2  def store(x):\n>    3      x[1] = cuda.th" in text
    assert text.count("kernel store, thread block (0, 0, 0)") == 2, "of the fault that is a cause, too"
    assert ">       launch(emulator_device, 1)" in result.outlines
    assert "access.py" not in text
    assert "assert 1 == 2" in text


def test_full_trace_shows_all_frames(results):
    assert "access.py" in results("--full-trace", "--tb=short", "-k", "test_fault").stdout.str()


def test_the_order_depends_on_the_name_of_the_test(results):
    seeds = []
    for _ in range(2):
        result = results("-k", "test_other", "--tb=long")
        seeds.append([line for line in result.outlines if "EmulatorDevice(seed=" in line])
    assert seeds[0] == seeds[1] != []
    assert "seed=None" not in seeds[0][0], "lock-step"


def test_a_fault_without_lines_or_threads():
    fault = KernelFault("deadlock", kernel="spin", line=4, text="bar.sync 0")
    assert plugin.place(fault) == "kernel spin"
    assert plugin._without_ours(None) is None
