"""Faults name the Python line: from numba's line information, through device functions, and in PTX made by hand."""

from pathlib import Path

import numpy as np
import pytest
from numba import cuda, types

from pagedkv.emulator import Device, MemoryFault, Module, RaceFault, SourceLine
from pagedkv.emulator.ptx.lines import LineTable

from ..ptx_harness import build, compile_ptx

f32, i64 = types.float32, types.int64
P = types.CPointer


@cuda.jit(device=True, lineinfo=True)
def load(p, i):
    return p[i]  # innermost


@cuda.jit(device=True, lineinfo=True)
def load_twice(p, i):
    return load(p, i) + f32(1)  # middle


def kernel(x, o, n):
    t = cuda.threadIdx.x
    o[t] = load_twice(x, t + n)  # outermost


def marked(word):
    """(line, text) of the line of this file with a comment of one word."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines) if line.endswith(f"# {word}")]
    return number + 1, lines[number].strip()


def fault_of(entry, *args, expected=MemoryFault):
    device = Device(1 << 20)
    buffers = [device.upload(arg, f"arg{i}") if isinstance(arg, np.ndarray) else arg for i, arg in enumerate(args)]
    with pytest.raises(expected) as caught:
        device.launch(entry, 1, 64, buffers)
    return caught.value


def test_a_fault_names_the_line_of_the_device_function_and_its_callers():
    array = np.zeros(64, "f4")
    fault = fault_of(build(kernel, P(f32), P(f32), i64, lineinfo=True), array, array, 1)
    chain = [fault.source, *fault.callers]
    assert [(line.line, line.text) for line in chain] == [marked(w) for w in ("innermost", "middle", "outermost")]
    assert {line.file for line in chain} == {__file__}
    assert fault.kernel == "kernel"
    for line in chain:
        assert f"{__file__}:{line.line}: {line.text}" in str(fault)


def test_a_race_names_both_lines():
    def races(o):
        s = cuda.shared.array(64, f32)
        t = cuda.threadIdx.x
        s[t] = t  # stored
        o[t] = s[63 - t]  # loaded

    fault = fault_of(build(races, P(f32), lineinfo=True), np.zeros(64, "f4"), expected=RaceFault)
    assert (fault.source.line, fault.source.text) == marked("loaded")
    number, text = marked("stored")
    assert f"{__file__}:{number}: {text}" in fault.what


def test_without_line_information_the_ptx_line_stands_alone():
    ptx = compile_ptx(kernel, P(f32), P(f32), i64)
    array = np.zeros(64, "f4")
    fault = fault_of(Module(ptx).entry(), array, array, 1)
    assert fault.source is None
    assert fault.callers == ()
    assert ptx.splitlines()[fault.line - 1].split() == [*fault.text.split()[:-1], f"{fault.text.split()[-1]};"]


PTX = """
.version 8.5
.visible .entry first()
{
ret;
.loc 1 10 1
ret;
.loc 1 20 1, function_name $L__info_string0, inlined_at 1 10 1
ret;
.loc 2 30 1, function_name $L__info_string1, inlined_at 1 20 1
ret;
}
.visible .entry second()
{
ret;
.loc 2 40 1, function_name $L__info_string1, inlined_at 1 20 1
ret;
}
.file 1 "/no/such/a.py"
.file 2 "b.py"
"""


@pytest.mark.parametrize(
    ("ptx_line", "lines"),
    [
        (5, []),  # no .loc yet
        (7, ["/no/such/a.py:10"]),
        (9, ["/no/such/a.py:20", "/no/such/a.py:10"]),
        (11, ["b.py:30", "/no/such/a.py:20", "/no/such/a.py:10"]),
        (15, []),  # a .loc of another function does not reach this one
        (17, ["b.py:40", "/no/such/a.py:20"]),
    ],
)
def test_line_table(ptx_line, lines):
    assert [str(line) for line in LineTable(PTX).source(ptx_line)] == lines


def test_source_line_as_text():
    assert str(SourceLine("a.py", 3)) == "a.py:3"
    assert str(SourceLine("a.py", 3, "x = 1")) == "a.py:3: x = 1"
