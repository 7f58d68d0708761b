"""`emulator.run`: a numba.cuda function of the user's on NumPy arrays, and emulators as backends."""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, float32, njit

import pagedkv
from pagedkv import emulator
from pagedkv.emulator import EmulatorDevice, EmulatorError, MemoryFault, RaceFault, Warp

from ..support.problems import Spec, assert_close, build, run


@cuda.jit
def scaled(x, out, times, factor):
    i, j = cuda.grid(2)
    if i < out.shape[0] and j < out.shape[1]:
        out[i, j] = factor * x[i, j] * times


def reverse(x, out):
    block = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    block[t] = x[cuda.blockIdx.x * 64 + t]
    out[cuda.blockIdx.x * 64 + t] = block[63 - t]


def test_arrays_of_any_strides_and_numbers():
    x, out = np.arange(24.0).reshape(6, 4)[::2], np.zeros((4, 3)).T
    stats = emulator.run(scaled, 1, (8, 8), x, out, 3, np.float32(2))
    np.testing.assert_array_equal(out, 6 * x)
    assert stats.kernel == "scaled"
    assert stats.thread_instructions > 0


def test_a_fault_names_the_line_and_the_array_and_changes_nothing():
    x, out = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    with pytest.raises(RaceFault, match="shared-memory race") as caught:
        emulator.run(reverse, 4, 64, x, out)
    assert caught.value.source.text == "out[cuda.blockIdx.x * 64 + t] = block[63 - t]"
    assert not out.any()
    with pytest.raises(MemoryFault, match=r"out of bounds global load.* x"):
        emulator.run(reverse, 5, 64, x, np.zeros(320, np.float32))


def test_what_is_checked_is_the_device_s():
    x, out = np.arange(257, dtype=np.float32)[1:], np.zeros(258, np.float32)[2:]
    device = EmulatorDevice(race=False, stats=True, footprint=True)
    stats = emulator.run(reverse, 4, 64, x, out, device=device)
    assert device.launches == [stats]
    assert stats.bytes_read == stats.bytes_written == 1024
    assert stats.global_sectors == stats.global_sectors_min  # wherever NumPy has put x and out
    stats.footprint.expect("x", read=True, written=False)
    assert out.any()
    x[:] = 7  # each call sees what is in the arrays now
    emulator.run(reverse, 4, 64, x, out, device=device)
    assert len(device.launches) == 2
    assert (out[:32] == 7).all()


def all_add(total):
    total[0] += 1


def test_each_array_is_copied_for_itself():
    both = np.arange(512, dtype=np.float32)
    x, out = both[:256], both[64:320]
    emulator.run(reverse, 4, 64, x, out, device=EmulatorDevice(race=False))
    in_turn = np.arange(256, dtype=np.float32)
    emulator.run(reverse, 4, 64, in_turn, in_turn, device=EmulatorDevice(race=False))  # the same array is one buffer
    # Thread block 1 read what 0 wrote there, had the arrays been one.
    expected = np.empty(256, np.float32)
    emulator.run(reverse, 4, 64, np.arange(256, dtype=np.float32), expected, device=EmulatorDevice(race=False))
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(in_turn, expected)


@pytest.mark.parametrize("wrong", ["emulator", EmulatorDevice, 3])
def test_a_device_that_is_none(wrong):
    with pytest.raises(
        TypeError, match=r"^device must be an EmulatorDevice, such as EmulatorDevice\(seed=1\), or None"
    ):
        emulator.run(all_add, 1, 1, np.zeros(1, np.int64), device=wrong)


def test_a_trace_of_the_lines_of_python():
    x, out = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    device = EmulatorDevice(race=False, trace=Warp())
    trace = emulator.run(reverse, 4, 64, x, out, device=device, trace=Warp(1, 1)).trace
    assert (trace.kernel, trace.warp) == ("reverse", Warp(1, 1))
    [load] = trace.select(name="x", array="x")
    assert load.source[0].text == "block[t] = x[cuda.blockIdx.x * 64 + t]"
    assert [values.tolist() for values in load.registers.values()] == [x[96:128].tolist()]
    [stored] = trace.accesses("out")
    assert stored.offsets.tolist() == list(range(384, 512, 4))
    [shared] = {access.array for step in trace for access in step.accesses if access.space == "shared"}
    assert len(trace.select(line=range(0)).select(array=shared)) == 0
    with pytest.raises(ValueError, match=rf"^array must be one of x, out, {shared}, .*local memory, got 'y'$"):
        trace.accesses("y")
    assert emulator.run(reverse, 4, 64, x, out, device=device).trace.warp == Warp()
    assert "test_run.py" in str(trace)
    with pytest.raises(EmulatorError, match=r"^a grid of 4 thread blocks of 64 threads does not have Warp\(thread_bl"):
        emulator.run(reverse, 4, 64, x, out, trace=Warp(0, 2))
    with pytest.raises(TypeError, match=r"^trace must be a Warp"):
        emulator.run(reverse, 4, 64, x, out, trace=(0, 0, 0))


def test_thread_blocks_race_by_default():
    with pytest.raises(RaceFault, match="global-memory race"):
        emulator.run(all_add, 2, 1, np.zeros(1, np.int64))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([1], "argument 0 must be a NumPy array or a number, got list"),
        (
            np.zeros(1, ml_dtypes.float8_e4m3fn),
            "argument 0 has dtype float8_e4m3fn, which numba does not know: "
            r"pass a view of its bits as uint8, x\.view\(np\.uint8\)$",
        ),
        (
            np.zeros(1, ">f4"),
            r"argument 0 has dtype >f4, whose bytes are in the other order: "
            r'pass a copy, x\.astype\(x\.dtype\.newbyteorder\("="\)\)$',
        ),
        (
            np.zeros(1, np.dtype([("a", ">i2"), ("b", "f4")])),
            r"whose bytes are in the other order: pass a copy",
        ),
        (np.zeros(1, "V3"), r"argument 0 has dtype \|V3, which numba does not know: convert it$"),
    ],
)
def test_refusals(wrong, says):
    with pytest.raises(TypeError, match=says):
        emulator.run(all_add, 1, 1, wrong)


@pytest.mark.parametrize("args", [(), (1, 2, 3)])
def test_another_number_of_arguments(args):
    with pytest.raises(TypeError, match=rf"^kernel reverse takes 2 arguments \(x, out\), got {len(args)}$"):
        emulator.run(reverse, 1, 64, *args)


def test_a_read_only_array_is_not_written():
    x = np.zeros(1, np.int64)
    x.flags.writeable = False
    with pytest.raises(Exception, match=r"[Cc]annot modify readonly array"):
        emulator.run(all_add, 1, 1, x)


@pytest.mark.usefixtures("without_lines")
def test_an_emulator_is_a_backend():
    device = EmulatorDevice(stats=True, footprint=True, seed=3, global_race=True)
    problem = build(Spec(layout="vllm"))
    for _ in range(2):
        assert_close(problem, *run(problem, backend=device))
    assert [launch.kernel.partition("[")[0] for launch in device.launches] == ["v1", "v1"]
    read = device.launches[0].footprint.read("k_cache")
    used = sorted([*problem.block_tables[0, :3], problem.block_tables[1, 0]])
    assert np.flatnonzero(read.any(axis=(1, 2, 3, 4))).tolist() == used
    with pytest.raises(ValueError, match=r'^backend must be "auto", "cpu", "cuda" or "emulator", got <'):
        run(problem, backend=object())


def test_names_of_functions_that_are_compiled_for_the_cpu():
    with pytest.raises(RaceFault):
        emulator.run(njit(all_add), 2, 1, np.zeros(1, np.int64))
    assert pagedkv.emulator.run is emulator.run
