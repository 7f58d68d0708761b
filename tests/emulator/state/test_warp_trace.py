"""A trace as text, and parts of it."""

import numpy as np
import pytest

from pagedkv.emulator import SourceLine, Step, Warp, WarpAccess, WarpTrace

LANES = np.arange(32)
INNER, OUTER = SourceLine("/a/device.py", 7, "row = x[slot]"), SourceLine("/a/kernel.py", 20, "load(x, rows)")
STORE = SourceLine("/a/kernel.py", 21, "out[rows] = row")


def made():
    some = LANES % 4 == 0
    return WarpTrace(
        "copy",
        Warp((1, 2, 0), 3),
        {"x": range(1 << 46, (1 << 46) + 4096), "out": range(1 << 47, (1 << 47) + 128)},
        [
            Step(11, "add.s64 %rd1, %rd0, 4", (INNER, OUTER), LANES >= 0, {"%rd1": (1 << 46) + 4 * LANES}),
            Step(
                12,
                "ld.global.f32 %f1, [%rd1]",
                (INNER, OUTER),
                some,
                {"%f1": LANES.astype(np.float32) / 4},
                [WarpAccess("load", "global", "x", 4, np.where(some, 4 * LANES, -1))],
            ),
            Step(
                14,
                "st.shared.f32 [%r1], %f1",
                (STORE,),
                LANES < 3,
                {"%f1": LANES.astype(np.float32)},
                [WarpAccess("store", "shared", "rows", 4, np.where(LANES < 3, 128 * LANES, -1))],
            ),
            Step(15, "@%p1 bra $L", (STORE,), LANES < 0),
            Step(16, "ld.param.u64 %rd9, [_ZN8__main__4copyB2v1_3dE_param_4]", (), LANES >= 0, {"%rd9": LANES * 0 + 5}),
        ],
        others=("rows",),
    )


def test_a_printed_trace_has_each_step_under_its_line():
    assert str(made()).splitlines() == [
        "copy: thread block (1, 2, 0), warp 3, 5 steps",
        "device.py:7: row = x[slot], called from kernel.py:20",
        "    11  add.s64 %rd1, %rd0, 4             %rd1 = x+0, x+4, x+8 ... x+124",
        "    12  ld.global.f32 %f1, [%rd1]         (lanes 0,4,8,12,16,20,24,28); %f1 = 0.0, 1.0, 2.0 ... 7.0",
        "        loads x, bytes 0 to 115 in 4 sectors",
        "kernel.py:21: out[rows] = row",
        "    14  st.shared.f32 [%r1], %f1          (lanes 0-2); %f1 = 0.0, 1.0, 2.0",
        "        stores rows, bytes 0 to 259 in 3 wavefronts",
        "    15  @%p1 bra $L                       (no lane)",
        "no Python line",
        "    16  ld.param.u64 %rd9, [param_4]      %rd9 = 5",
    ]


def test_text_of_some_lanes_and_some_lines():
    lines = made().to_text(lanes=[4, 5], max_lines=3).splitlines()
    assert lines[2].endswith("%rd1 = x+16, x+20")
    assert lines[3].endswith("; %f1 = 1.0")
    assert lines[6].endswith("(lanes 0-2)")
    assert lines[8] == "... 2 more steps: to_text() shows all, select() fewer"


def test_steps_are_selected_by_line_name_or_array():
    trace = made()
    for chosen, lines in (
        ({"line": 7}, [11, 12]),
        ({"line": 20}, [11, 12]),
        ({"line": range(20, 22)}, [11, 12, 14, 15]),
        ({"name": "row"}, [11, 12, 14, 15]),
        ({"name": "rows"}, [14, 15]),
        ({"name": "slo"}, []),
        ({"array": "x"}, [12]),
        ({"array": "rows", "line": 7}, []),
        ({}, [11, 12, 14, 15, 16]),
    ):
        assert [step.line for step in trace.select(**chosen)] == lines, chosen
    assert len(trace) == 5
    assert trace.select(array="x").kernel == "copy"
    assert [access.kind for access in trace.accesses("rows")] == ["store"]
    assert repr(trace).endswith("max_steps=10000): 5 steps>")


def test_a_step_is_found_among_others():
    trace = made()
    assert trace[1] in trace.select(array="x")
    assert made()[1] not in trace


@pytest.mark.parametrize("wrong", [{"line": "7"}, {"line": slice(7, 9)}, {"name": 7}, {"array": LANES}])
def test_what_cannot_be_selected(wrong):
    [what] = wrong
    with pytest.raises(TypeError, match=rf"^{what} must be an? .*, such as .*, got "):
        made().select(**wrong)


def test_misspelt_arrays_and_lanes_are_told():
    trace = made()
    assert not trace.select(line=7).select(array="rows")
    assert not trace.accesses("out")
    for find in (lambda name: trace.select(array=name), trace.accesses):
        with pytest.raises(ValueError, match=r"^array must be one of x, out, rows, got 'xs'$"):
            find("xs")
    with pytest.raises(ValueError, match=r"^lanes must be from 0 to 31, got 32$"):
        trace.to_text(lanes=[31, 32])
