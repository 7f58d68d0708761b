"""The trace of one warp: its steps, the lanes that run them, the registers they write, and the bytes they meet."""

import numpy as np
import pytest

from pagedkv.emulator import Device, EmulatorDevice, EmulatorError, Module, RaceFault, Warp

from ..ptx_harness import SHARED, kernel_text, launch_ptx

U32, F32 = np.uint32, np.float32
X = np.arange(128, dtype=U32)


def trace_of(body, warp, x=X, dtype=U32, **options):
    out, stats = launch_ptx(body, [x], [dtype], trace=warp, **options)
    return out[0], stats.trace


def step_of(trace, begin):
    [step] = [step for step in trace if step.text.startswith(begin)]
    return step


def test_registers_lanes_and_bytes():
    out, trace = trace_of("add.u32 %o0, %i0, 7;", Warp((1, 0, 0), 1), block=64, grid=2)
    np.testing.assert_array_equal(out, X + 7)
    assert trace.kernel == "test"
    opcodes = [step.text.split()[0] for step in trace]
    assert opcodes[-5:] == ["add.u32", "ld.param.u64", "mad.lo.u64", "st.global.b32", "ret"]
    added = step_of(trace, "add.u32 %o0")
    assert added.active.all()
    np.testing.assert_array_equal(added.registers["%o0"], np.arange(96, 128) + 7)
    [load], [store] = trace.accesses("in0"), trace.accesses("out0")
    assert (load.kind, load.space, load.size, store.kind) == ("load", "global", 4, "store")
    np.testing.assert_array_equal(load.offsets, 4 * np.arange(96, 128))
    np.testing.assert_array_equal(store.offsets, load.offsets)
    np.testing.assert_array_equal(step_of(trace, "st.global").registers["%o0"], added.registers["%o0"])
    assert load.sectors == 4


DIVERGES = """
setp.lt.u32 %p0, %i0, 20;
@!%p0 bra $far;
mov.u32 %o0, 1;
bra $end;
$far: mov.u32 %o0, 2;
@%p0 mov.u32 %o0, 3;
$end: add.u32 %o0, %o0, 10;
"""


@pytest.mark.parametrize("seed", [None, 3])
def test_a_step_says_which_lanes_ran_it(seed):
    out, trace = trace_of(DIVERGES, Warp(), X[:64], block=64, seed=seed)
    np.testing.assert_array_equal(out, np.where(X[:64] < 20, 11, 12))
    below = np.arange(32) < 20
    for begin, active in (
        ("@!%p0 bra", ~below),
        ("mov.u32 %o0, 1", below),
        ("bra $end", below),
        ("mov.u32 %o0, 2", ~below),
        ("@%p0 mov", np.zeros(32, bool)),
    ):
        np.testing.assert_array_equal(step_of(trace, begin).active, active, begin)
    assert (step_of(trace, "mov.u32 %o0, 1").registers["%o0"][below] == 1).all()
    last = [step for step in trace if step.text.startswith("add.u32 %o0")]
    np.testing.assert_array_equal(sum(step.active.astype(int) for step in last), np.ones(32))
    away = trace_of(DIVERGES, Warp(0, 1), X[:64], block=64)[1]  # none of its lanes is below 20
    assert not [step for step in away if step.text == "mov.u32 %o0, 1"]


@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"seed": 6}])
def test_whatever_batch_has_the_thread_block(options):
    for block in (0, 2, 3):
        _, trace = trace_of("mov.u32 %o0, %ctaid.x;", Warp(block), block=32, grid=4, batch_threads=64, **options)
        [step] = [step for step in trace if step.text.startswith("mov.u32 %o0")]
        assert (step.registers["%o0"] == block).all()
        np.testing.assert_array_equal(trace.accesses("in0")[0].offsets, 128 * block + 4 * np.arange(32))


def test_a_warp_of_few_lanes_and_a_thread_block_of_three_dims():
    _, trace = trace_of("mov.u32 %o0, %tid.y;", Warp((0, 0, 0), 1), X[:40], block=(20, 2))
    values = step_of(trace, "mov.u32 %o0").registers["%o0"]
    assert values.tolist() == [1] * 8


def test_only_so_many_steps():
    whole = trace_of("add.u32 %o0, %i0, 7;", Warp())[1]
    out, cut = trace_of("add.u32 %o0, %i0, 7;", Warp(max_steps=5))
    np.testing.assert_array_equal(out, X + 7)
    assert [step.line for step in cut] == [step.line for step in whole[:5]]
    assert cut.dropped == len(whole) - 5
    assert str(cut).endswith(f"... {cut.dropped} steps after max_steps=5 not recorded")


def test_a_fault_has_the_steps_up_to_it():
    body = "mov.u32 %r0, buf; mad.lo.u32 %r0, %i0, 4, %r0; st.shared.u32 [%r0], %i0; ld.shared.u32 %o0, [buf+128];"
    with pytest.raises(RaceFault) as caught:
        trace_of(body, Warp(), X[:64], block=64, **SHARED)
    steps = caught.value.trace
    assert steps[-1].line == caught.value.line
    assert not steps[-1].registers
    [store] = steps.accesses("buf")
    assert (store.space, store.kind, store.offsets[31]) == ("shared", "store", 124)
    with pytest.raises(RaceFault) as caught:
        launch_ptx(body, [X[:64]], [U32], block=64, **SHARED)
    assert caught.value.trace is None


def test_values_have_the_types_of_the_instructions():
    body = """
    neg.s32 %r0, %i0; cvt.rn.f32.u32 %f0, %i0; mov.b32 %r1, %f0; cvt.rn.f16.f32 %h0, %f0; cvt.s64.s32 %rd0, %r0;
    setp.gt.f32 %p0, %f0, 0f40000000; mov.u32 %o0, %r0; mul.wide.u32 %rd1, %i0, 2; mov.b64 {%r2, %r3}, %rd1;
    """
    trace = trace_of(body, Warp())[1]
    found = {name: values for step in trace for name, values in step.registers.items()}
    dtypes = {name: found[name].dtype.name for name in ("%r0", "%f0", "%r1", "%h0", "%rd0", "%p0", "%rd1", "%r3")}
    assert dtypes == {
        "%r0": "int32",
        "%f0": "float32",
        "%r1": "int32",
        "%h0": "float16",
        "%rd0": "int64",
        "%p0": "bool",
        "%rd1": "uint64",
        "%r3": "int32",
    }
    assert found["%rd0"][5] == -5
    assert found["%h0"][5] == 5
    assert found["%p0"].sum() == 29


@pytest.mark.parametrize(("size", "stride"), [(4, 4), (4, 8), (4, 128), (8, 8), (8, 40), (16, 16), (16, 144), (2, 2)])
def test_wavefronts_and_sectors_are_those_of_the_statistics(size, stride):
    load = {2: "b16 %h0", 4: "b32 %r9", 8: "b64 %rd9", 16: "v2.b64 {%rd8, %rd9}"}[size]
    vector, load = ("v2.", load[3:]) if size == 16 else ("", load)
    body = f"""
    mov.u32 %r0, buf; mad.lo.u32 %r0, %lid, {stride}, %r0; ld.shared.{vector}{load}, [%r0];
    ld.param.u64 %rd1, [p0]; cvt.u64.u32 %rd0, %lid; mad.lo.u64 %rd0, %rd0, {stride}, %rd1;
    ld.global.{vector}{load}, [%rd0]; mov.u32 %o0, 0;
    """
    x, shared = np.zeros(2048, U32), {"shared": ".shared .align 16 .b8 buf[8192];"}
    _, stats = launch_ptx(body, [x], [U32], n=32, trace=Warp(), stats=True, init_check=False, **shared)
    [access] = stats.trace.accesses("buf")
    assert access.wavefronts == stats.shared_wavefronts
    everything = stats.trace.accesses("in0") + stats.trace.accesses("out0")
    assert sum(access.sectors for access in everything) == stats.global_sectors


def names_in(translation):
    """The names that the code of all blocks looks up."""
    modules = [translation.code(i, None) for i in range(len(translation.program.blocks))]
    return {
        name for module in modules for code in module.co_consts if hasattr(code, "co_names") for name in code.co_names
    }


def test_untraced_code_tells_nothing():
    entry = Module(kernel_text("add.u32 %o0, %i0, 7;", [4], [4])).entry()
    told = {"begin_step", "end_step"}
    assert told <= names_in(entry.traced)
    assert "ld_global" in names_in(entry.translation)
    assert not told & names_in(entry.translation)


def test_a_launch_without_the_warp_has_no_trace():
    for warp in (Warp(4), Warp((0, 1)), Warp(0, 1)):
        _, stats = launch_ptx("mov.u32 %o0, 1;", [X], [U32], grid=4, block=32, trace=warp)
        assert stats.trace is None


def test_wrong_warps():
    for same in (2, np.array(2), [2], np.array([2, 0])):
        assert Warp(same) == Warp((2, 0, 0))
        assert Warp(same).thread_block == (2, 0, 0)
    for wrong in ((1, 2, 3, 4), "x", 1.5, None, np.zeros((1, 1), np.int64)):
        with pytest.raises(EmulatorError, match=r"^thread_block must be one to three coordinates, got "):
            Warp(wrong)
    for arguments in ({"thread_block": -1}, {"warp": -1}, {"max_steps": -1}, {"warp": 1.5}):
        with pytest.raises(EmulatorError, match=r"^thread_block, warp and max_steps must be integers >= 0, got Warp\("):
            Warp(**arguments)


def test_what_is_no_warp():
    with pytest.raises(TypeError, match=r"^trace must be a Warp, such as Warp\(\(0, 0, 0\), 1\), or None, got True$"):
        launch_ptx("mov.u32 %o0, 1;", [X], [U32], trace=True)
    with pytest.raises(TypeError, match=r"^trace must be a Warp, such as .* got 3$"):
        EmulatorDevice(trace=3)


def test_shared_arrays_of_every_kind_have_names():
    text = kernel_text(
        "st.shared.u32 [small+4], %i0; st.shared.u32 [more], %i0; mov.u32 %o0, 0;",
        [4],
        [4],
        extra=".extern .shared .align 16 .b8 more[];",
        shared=".shared .align 4 .b8 big[64]; .shared .align 4 .b8 small[8];",
    )
    device = Device(1 << 20)
    source, result = device.upload(X[:1], "x"), device.alloc(1, U32, "y")
    stats = device.launch(Module(text).entry(), 1, 1, [source, result], 16, trace=Warp())
    places = [(access.array, access.offsets.tolist()) for step in stats.trace for access in step.accesses]
    assert places == [("x", [0]), ("small", [4]), ("dynamic shared memory", [0]), ("y", [0])]
