"""Module parsing, argument checks, buffers."""

import numpy as np
import pytest
from numba import cuda, types

from pagedkv.emulator import Device, EmulatorError, Module

from ..ptx_harness import build, kernel_text, run_arrays, run_ptx

P = types.CPointer
U = np.arange(32, dtype="u4")


def saxpy(a, x, y, n, shift):
    i = cuda.grid(1)
    if i < n:
        y[i] = a * x[i] + y[i] + shift


def entry():
    return build(saxpy, types.float32, P(types.float32), P(types.float32), types.int64, types.int32)


def test_pointer_and_scalar_arguments():
    e = entry()
    assert [p.type for p in e.params] == ["f32", "u64", "u64", "u64", "u32"]
    dev = Device(1 << 20)
    x, y = dev.upload(np.arange(100, dtype="f4"), "x"), dev.upload(np.ones(100, "f4"), "y")
    dev.launch(e, 4, 32, [np.float32(2), x, y.address, 100, -3])
    np.testing.assert_array_equal(y.get(), 2 * np.arange(100) + 1 - 3)
    dev.launch(e, (1,), (32, 1), [2.0, x.address + 16, y, np.int64(4), 0])
    assert y.get()[0] == 2 * 4 - 2


def test_wrong_arguments_of_a_launch_are_refused():
    e, dev = entry(), Device(1 << 20)
    x = dev.upload(np.ones(4, "f4"))
    for args, text in (
        ([1.0, x, x, 4], "takes 5 parameters"),
        ([1, x, x, 4, 0], "is .f32, got int"),
        ([1.0, x, x, 4.0, 0], "got float"),
        ([1.0, x, x, 4, 1 << 40], "does not fit"),
    ):
        with pytest.raises(EmulatorError, match=text):
            dev.launch(e, 1, 32, args)
    ok = [1.0, x, x, 4, 0]
    for grid, block in ((0, 32), (1, 2048), ((1, 70000), 32), (1, (1, 1, 128))):
        with pytest.raises(EmulatorError):
            dev.launch(e, grid, block, ok)
    with pytest.raises(EmulatorError, match="shared memory"):
        dev.launch(e, 1, 32, ok, shared_bytes=300_000)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"grid": -1}, "grid must be one to three positive sizes, got -1"),
        ({"grid": (1, -1)}, r"grid must be one to three positive sizes, got \(1, -1\)"),
        ({"grid": 1.5}, r"grid must be one to three positive sizes, got 1\.5"),
        ({"num_threads": (32, 0.5)}, r"num_threads must be one to three positive sizes, got \(32, 0\.5\)"),
        ({"num_threads": -32}, "num_threads must be one to three positive sizes, got -32"),
        ({"shared_bytes": -1}, "shared_bytes must be an integer >= 0, got -1"),
        ({"shared_bytes": 1.0}, r"shared_bytes must be an integer >= 0, got 1\.0"),
        ({"batch_threads": -1}, "batch_threads must be an integer >= 1, got -1"),
        ({"step_limit": -1}, "step_limit must be an integer >= 1, got -1"),
    ],
)
def test_sizes_that_no_launch_has(wrong, message):
    device = Device(1 << 20)
    out = device.alloc(32, "u4")
    kernel = Module(kernel_text("mov.u32 %o0, 7;", [], [4])).entry()
    with pytest.raises(EmulatorError, match=message):
        device.launch(kernel, **({"grid": 1, "num_threads": 32, "args": [out]} | wrong))
    assert not out.initialised().any()


def test_module_with_several_entries():
    text = kernel_text("mov.u32 %o0, 1;", [], [4])
    second = text[text.index(".visible") :].replace("test(", "other(")
    m = Module(text + second)
    assert m.entry_names == ["test", "other"]
    assert m.target == "sm_80"
    assert m.version == "8.5"
    assert m.entry("other").name == "other"
    assert m.entry("tes").name == "test"
    with pytest.raises(EmulatorError, match="2 entries match"):
        m.entry()
    with pytest.raises(EmulatorError, match="PTX text"):
        Module("int main() {}")


def test_comments_debug_lines_and_directives():
    text = kernel_text(
        '/* block\ncomment; } */ .loc 1 10 5\n mov.u32 %o0, 7; // tail ; }\n .pragma "nounroll";', [], [4]
    )
    text = text.replace(")\n{", ")\n.maxntid 64, 1, 1\n{", 1)
    e = Module(text).entry()
    assert e.directives == {"maxntid": (64, 1, 1)}
    dev = Device(1 << 20)
    out = dev.alloc(64, "u4")
    dev.launch(e, 1, 64, [out])
    assert (out.get() == 7).all()
    with pytest.raises(EmulatorError, match="maxntid"):
        dev.launch(e, 1, 96, [out])


def test_style_of_other_compilers():
    """Debug sections, scoped inline assembly, spaces in operands, .reqntid, .ptr parameters."""
    text = """.version 8.4
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry add(
 .param .u64 .ptr .global .align 1 src,
 .param .u64 .ptr .global .align 1 dst,
 .param .u32 n
)
.reqntid 64, 1, 1
{
 .reg .pred %p<2>; .reg .b32 %r<9>; .reg .f32 %f<3>; .reg .b64 %rd<4>;
 .loc 1 10 0
$L__func_begin0:
 ld.param.u64 %rd1, [src]; ld.param.u64 %rd2, [dst]; ld.param.u32 %r1, [n];
 .loc 1 12 24, function_name $L__info_string0, inlined_at 1 3 3
 mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 2; setp.lt.s32 %p1, %r3, %r1;
 mul.wide.s32 %rd3, %r3, 4; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
 @%p1 ld.global.v4.b32 { %r4, %r5, %r6, %r7 }, [ %rd1 + 0 ];
 mov.b32 %f1, %r4; add.f32 %f2, %f1, 0f3F800000;
 { .reg .b32 %r4; mov.b32 %r4, %f2; mov.b32 %r8, %r4; }
 @%p1 st.global.v4.b32 [ %rd2 + 0 ], { %r8, %r5, %r6, %r7 };
 ret;
$L__func_end0:
}
 .file 1 "add.py"
 .section .debug_abbrev
 {
.b8 1
.b32 $L__func_begin0
 }
"""
    dev, x = Device(1 << 20), np.arange(200, dtype="f4")
    a, o = dev.upload(x), dev.alloc(200, "f4")
    dev.launch(Module(text).entry(), 1, 64, [a, o, 200])
    x[::4] += 1
    np.testing.assert_array_equal(o.get(), x)


def test_a_buffer_knows_which_bytes_are_initialised():
    dev = Device(1 << 20)
    b = dev.alloc((3, 4), "f4", "b")
    assert not b.initialised().any()
    assert (b.get().view("u1") == 0xA5).all()
    b.mark(True, np.s_[1])
    assert b.initialised().tolist() == [[False] * 4, [True] * 4, [False] * 4]
    b.set(5)
    assert b.initialised().all()
    assert (b.get() == 5).all()
    assert "byte 4 of 48 in b" in dev.describe(b.address + 4)
    assert b.address % 256 == 0
    with pytest.raises(MemoryError):
        dev.alloc(1 << 21)
    for size in (-4, (2, -3)):
        with pytest.raises(EmulatorError, match="shape must be sizes >= 0, got"):
            dev.alloc(size)
    with pytest.raises(EmulatorError, match="align must be >= 1, got 0"):
        dev.alloc(4, align=0)
    with pytest.raises(EmulatorError, match="memory_bytes must be >= 0, got -1"):
        Device(-1)
    dev.free(b)
    with pytest.raises(EmulatorError, match="freed"):
        b.get()
    assert dev.upload(np.zeros((0, 4), "f4")).get().shape == (0, 4)


def test_global_variables_and_structures():
    extra = ".global .align 4 .u32 table[4] = {10, 20, 30, 40};\n.const .align 4 .f32 half = 0f3F000000;"
    body = """and.b32 %r1, %lid, 3; mov.u64 %rd1, table; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;
    ld.global.u32 %r2, [%rd1];
    ld.const.f32 %f1, [half]; cvt.rn.f32.u32 %f2, %r2; mul.f32 %f2, %f2, %f1; cvt.rzi.u32.f32 %o0, %f2;"""
    got = run_ptx(body, [U], ["u4"], extra=extra)[0]
    np.testing.assert_array_equal(got, np.array([5, 10, 15, 20] * 8))
    text = kernel_text(
        "ld.param.u32 %r1, [cfg]; ld.param.f64 %fd1, [cfg+8]; cvt.rzi.u32.f64 %r2, %fd1; add.u32 %o0, %r1, %r2;",
        [],
        [4],
    )
    text = text.replace(".param .u64 p0", ".param .u64 p0,\n.param .align 8 .b8 cfg[16]")
    dev = Device(1 << 20)
    out = dev.alloc(32, "u4")
    dev.launch(Module(text).entry(), 1, 32, [out, np.array([(7, 0, 35.0)], "i4, i4, f8").tobytes()])
    assert (out.get() == 42).all()


def test_run_arrays_and_options():
    x, y = np.arange(1000, dtype="f4"), np.ones(1000, "f4")

    @cuda.jit
    def axpy(a, x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] += a * x[i]

    s = run_arrays(axpy, 8, 128, np.float32(2), x, y, stats=True)
    np.testing.assert_array_equal(y, 1 + 2 * x)
    assert s.bytes_read == 8000
    assert s.bytes_written == 4000
    run_arrays(axpy, 8, 128, np.float32(2), x, y, seed=5, batch_threads=256, global_race=True)
    np.testing.assert_array_equal(y, 1 + 4 * x)


def test_init_check_can_be_switched_off():
    dev = Device(1 << 20)
    e = Module(kernel_text("mov.b32 %o0, %i0;", [4], [4])).entry()
    a, o = dev.alloc(32, "u4"), dev.alloc(32, "u4")
    dev.launch(e, 1, 32, [a, o], init_check=False)
    assert (o.get() == 0xA5A5A5A5).all()
