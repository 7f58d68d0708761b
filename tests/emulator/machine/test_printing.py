"""print in a kernel: CUDA's printf, after the thread block and thread that called it."""

import ctypes
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, float32, int32, int64, types

from pagedkv.emulator import Device, MemoryFault, Module
from pagedkv.emulator.machine.printing import argument_views, formatted

from ..ptx_harness import build, kernel_text, run

P = types.CPointer


def lines_of(text):
    """(thread block's x, thread's x, text) of each line."""
    out = []
    for line in text.splitlines():
        where, _, said = line.partition("): ")
        block, thread = where.removeprefix("thread block (").split("), thread (")
        out.append((int(block.split(",")[0]), int(thread.split(",")[0]), said))
    return out


def prints(i, x, o):
    t = cuda.grid(1)
    if t % 3 == 1:
        print(i[t], "thirds", x[t], t > 5)
    elif t % 3 == 2:
        print(int32(-t), types.uint8(t))
        if t > 30:
            print("far")
    o[t] = t
    if t == 0:
        print(cuda.threadIdx, (t, x[t]))


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"batch_threads": 32}], ids=str)
def test_values_lanes_and_branches(capsys, options):
    i = np.arange(64, dtype=np.int64) * -(1 << 40)
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    out = run(prints, [P(int64), P(float32), P(float32)], [i, x, np.zeros(64, "f4")], grid=2, block=32, **options)[2]
    np.testing.assert_array_equal(out, np.arange(64))
    wanted = [(0, 0, f"(0, 0, 0) (0, {-1:f})")]
    for t in range(64):
        if t % 3 == 1:
            wanted.append((t // 32, t % 32, f"{i[t]} thirds {x[t]:f} {t > 5}"))
        if t % 3 == 2:
            wanted.append((t // 32, t % 32, f"{-t} {t}"))
            wanted += [(t // 32, t % 32, "far")] * (t > 30)
    got = lines_of(capsys.readouterr().out)
    assert sorted(got) == sorted(wanted)
    for each in {line[:2] for line in got}:  # a thread's lines in its order, whatever others do
        mine = [line[2] for line in got if line[:2] == each]
        assert mine == [line[2] for line in wanted if line[:2] == each]
    if not options:  # a warp prints in the order of its lanes
        first = [line for line in got if "thirds" in line[2]]
        assert first == sorted(first)


def speaker(loud):
    @cuda.jit(device=True)
    def speak(t):
        if loud:
            print("device function", t)

    return speak


def test_in_a_device_function_and_a_loop(capsys):
    speak = speaker(True)

    def kernel(o):
        t = cuda.threadIdx.x
        for k in range(3):
            if t == k:
                speak(t * 10)
        o[t] = 1

    run(kernel, [P(float32)], [np.zeros(32, "f4")], block=32)
    assert lines_of(capsys.readouterr().out) == [(0, k, f"device function {10 * k}") for k in range(3)]


VPRINTF = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);"
CALL = """{ .param .b64 pa; st.param.b64 [pa], %rd1; .param .b64 pb; st.param.b64 [pb], %rd2; .param .b32 ret;
call.uni (ret), vprintf, (pa, pb); ld.param.b32 %o0, [ret]; }"""


def printf(form, body="", extra=""):
    """A kernel of 2 threads that prints with a format of the raw PTX, and stores what vprintf returned."""
    codes = ", ".join(map(str, form))
    extra = f"{VPRINTF} .global .align 1 .b8 form[{len(form)}] = {{{codes}}}; {extra}"
    text = kernel_text(f"mov.u64 %rd1, form; cvta.local.u64 %rd2, args; {body} {CALL}", [], [4], extra)
    text = text.replace("%p<40>;", "%p<40>; .local .align 8 .b8 args[32];")
    device = Device(1 << 20)
    out = device.alloc(2, "u4", "out")
    device.launch(Module(text).entry(), 1, 2, [out])
    return out.get().tolist()


def test_arguments_stand_at_their_alignment(capsys):
    body = """mov.u64 %rd3, args; st.local.u32 [%rd3], %lid; mov.f64 %fd1, 0d3FF8000000000000;
    st.local.f64 [%rd3+8], %fd1; st.local.u32 [%rd3+16], 255; st.local.u64 [%rd3+24], -1;"""
    assert printf(b"%d %5.1f|%-6x|%llu %%\n\0", body) == [4, 4]
    tail = "  1.5|ff    |18446744073709551615 %"
    assert [said for *_, said in lines_of(capsys.readouterr().out)] == [f"0 {tail}", f"1 {tail}"]


def test_no_arguments_and_no_newline(capsys):
    assert printf(b"hi\0") == [0, 0]
    where = "thread block (0, 0, 0), thread ({}, 0, 0): hi"
    assert capsys.readouterr().out == where.format(0) + where.format(1)


def test_what_a_kernel_may_not_print():
    with pytest.raises(MemoryFault, match="uninitialised local load"):
        printf(b"%d\n\0")
    with pytest.raises(MemoryFault, match=r"vprintf of a string that no zero ends; address .*in symbol form"):
        printf(b"endless")
    with pytest.raises(MemoryFault, match="out of bounds local load"):
        printf(
            b"%d%lld%lld%lld%lld\n\0",
            "mov.u64 %rd3, args;" + "".join(f"st.local.u32 [%rd3+{i}], 0;" for i in range(0, 32, 4)),
        )
    with pytest.raises(MemoryFault, match="vprintf of a string that no zero ends; address 0x10"):
        printf(b"%s\n\0", "mov.u64 %rd3, args; st.local.u64 [%rd3], 16;")


C_TYPES = {"s32": ctypes.c_int, "u32": ctypes.c_uint, "s64": ctypes.c_longlong, "u64": ctypes.c_ulonglong}
INTEGER = st.builds(
    "%{}{}{}{}{}".format,
    st.sampled_from(["", "-", "+", " ", "0", "#", "-+", "+0", "#0"]),
    st.sampled_from(["", "1", "12"]),
    st.sampled_from(["", ".", ".0", ".5"]),
    st.sampled_from(["", "hh", "h", "l", "ll"]),
    st.sampled_from("diuxXo"),
)
FLOAT = st.builds(
    "%{}{}{}{}".format,
    st.sampled_from(["", "-", "+", " ", "0", "+0"]),
    st.sampled_from(["", "1", "15"]),
    st.sampled_from(["", ".0", ".3"]),
    st.sampled_from("eEfFgG"),
)


@given(st.lists(INTEGER | FLOAT | st.sampled_from(["%%", "%c", "%5c", "text"]), max_size=4), st.data())
def test_the_text_is_that_of_c(parts, data):
    """libc's snprintf is the oracle."""
    form = "|".join(parts)
    values, arguments = [], []
    for view in argument_views(form):
        if view == "f64":
            value = data.draw(st.floats(-1e9, 1e9) | st.sampled_from([0.0, np.inf, -np.inf, 1e300]))
        elif view == "s32" and "c" in form:
            value = data.draw(st.integers(33, 126))
        else:
            bits = int(view[1:])
            low = -(1 << (bits - 1)) if view[0] == "s" else 0
            value = data.draw(st.integers(low, low + (1 << bits) - 1) | st.integers(max(low, -9), 9))
        values.append(value)
        arguments.append(ctypes.c_double(value) if view == "f64" else C_TYPES[view](value))
    buffer = ctypes.create_string_buffer(4096)
    ctypes.CDLL(None).snprintf(buffer, 4096, form.encode(), *arguments)
    assert formatted(form, iter(values)) == buffer.value.decode()


@pytest.mark.parametrize(
    ("form", "values", "wanted"),
    [
        ("%*d|%.*f", [6, 42, 1, 0.25], "    42|0.2"),
        ("%s and %5s|%-5s|%.2s", ["a", "b", "c", "defg"], "a and     b|c    |de"),
        ("%p", [0x7F0000000000], "0x7f0000000000"),
        ("%a %A", [1.5, 0.0], "0x1.8p+0 0X0P+0"),
        ("%.*d", [-1, 5], "5"),
        ("100%% %q %", [], "100% %q %"),
        ("%c%c%3c|", [-191, 321, -191 - 256], "AA  A|"),
        ("%c%c", [-1, 200], "\ufffd\ufffd"),
    ],
)
def test_rarer_conversions(form, values, wanted):
    assert formatted(form, iter(values)) == wanted


def test_a_kernel_that_prints_nothing_has_no_format():
    assert list(chain(argument_views("no conversions"), argument_views(""))) == []
    assert build(speaker(False), types.int64).params[0].type == "u64"
