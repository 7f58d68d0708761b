"""EmulatorDevice: NumPy arrays of any strides as buffers with exact bounds, workspaces, copies, and what comes back."""

import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, types

from pagedkv.emulator import EmulatorDevice, EmulatorError, MemoryFault, Module, RaceFault
from pagedkv.emulator.state.memory import sparse_zeros

from .ptx_harness import compile_ptx

i64, u8, u16, u32 = types.int64, types.uint8, types.uint16, types.uint32
P = types.CPointer


def compiled(function, *signature, num_threads=32, name=None):
    ptx = compile_ptx(function, *signature, lineinfo=True)
    name = name or function.__name__
    return SimpleNamespace(name=name, entry=Module(ptx).entry_names[0], ptx=ptx, num_threads=num_threads)


def _copy_rows(source, target, rows, columns, source_row, source_column, target_row, target_column):
    row = cuda.blockIdx.x
    column = cuda.threadIdx.x
    if row < rows and column < columns:
        target[row * target_row + column * target_column] = source[row * source_row + column * source_column]


@pytest.fixture(scope="module")
def copy_rows():
    """Kernels by item size: copy a matrix; strides in elements."""
    return {t.bitwidth // 8: compiled(_copy_rows, P(t), P(t), *[i64] * 6, name="copy") for t in (u8, u16, u32)}


def copy(device, kernel, source, target, rows=None, columns=None):
    """Launch a copy of source to target."""
    shape = (rows or source.shape[0], columns or source.shape[1])
    strides = [stride // x.itemsize for x in (source, target) for stride in x.strides]
    args = [device.address("source", source), device.address("target", target), *shape, *strides]
    device.launch(kernel, (shape[0], 1, 1), args)


LARGE = np.arange(24 * 24, dtype=np.float32).reshape(24, 24)
VIEWS = {
    "contiguous": LARGE[:3, :].copy(),
    "rows apart": LARGE[:3, 1:9],
    "columns apart": LARGE[:3, ::3],
    "transposed": LARGE[:8, :3].T,
    "backwards": LARGE[5:2:-1, 7::-1],
    "a row repeated": np.broadcast_to(LARGE[0], (3, 24)),
    "one element repeated": np.broadcast_to(LARGE[2, 3], (3, 8)),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, "uint8"])
@pytest.mark.parametrize("name", VIEWS)
def test_arrays_may_have_any_strides(copy_rows, name, dtype):
    view = VIEWS[name]
    large = LARGE.astype(dtype)
    offset = (view.__array_interface__["data"][0] - LARGE.__array_interface__["data"][0]) // 4
    if name != "contiguous" and "repeated" not in name:
        strides = tuple(stride // 4 * large.itemsize for stride in view.strides)
        view = np.ndarray(view.shape, large.dtype, large, offset * large.itemsize, strides)
    else:
        view = view.astype(dtype)
    target = np.zeros((view.shape[0], 2 * view.shape[1]), dtype)
    with EmulatorDevice(footprint=True) as device:
        copy(device, copy_rows[view.itemsize], view, target[:, ::2])
    device.launches[0].footprint.expect("source", read=True, written=False)
    device.launches[0].footprint.expect("target", read=False, written=True)
    np.testing.assert_array_equal(target[:, ::2], view)
    assert not target[:, 1::2].any()


@given(st.data())
def test_every_element_has_its_own_bytes_and_nothing_else_has(data):
    """Random views: the initialised bytes of the buffer are those that NumPy's own strides name."""
    array = np.arange(8 * 12, dtype=data.draw(st.sampled_from(["u1", "u2", "u4", "f8"]))).reshape(8, 12)
    view = array[data.draw(st.slices(8)), data.draw(st.slices(12))]
    device = EmulatorDevice()
    address = device.address("view", view)
    (buffer,) = device.memory.buffers
    assert buffer.initialised().all()
    np.testing.assert_array_equal(buffer.get(), view)
    base = view.__array_interface__["data"][0]
    if view.size:
        assert address % 256 == base % 256
        shadow = device.memory.space.shadow[buffer.offset : buffer.offset + buffer.nbytes]
        assert np.count_nonzero(shadow == 2) == view.nbytes
        assert np.count_nonzero(shadow == 1) == buffer.nbytes - view.nbytes


@pytest.mark.parametrize(
    ("view", "rows", "columns", "where"),
    [
        (LARGE[:3, 1:9], 3, 9, r"byte 32 of 224 in source, in the gap after source\[0, 7\]"),
        (LARGE[:3, 1:9], 4, 1, "64 bytes past the end of source"),
        (LARGE[:3, 20:], 1, 5, r"byte 16 of 208 in source, in the gap after source\[0, 3\]"),
        (LARGE[2:0:-1, :8], 3, 1, "96 bytes before source"),
    ],
)
def test_bounds_are_those_of_the_elements(copy_rows, view, rows, columns, where):
    target = np.zeros((4, 16), np.float32)
    with pytest.raises(MemoryFault, match=where) as caught, EmulatorDevice() as device:
        copy(device, copy_rows[4], view, target, rows, columns)
    assert caught.value.kernel == "copy"
    assert "target[row * target_row" in caught.value.source.text


def test_two_views_of_one_array_are_two_buffers(copy_rows):
    combined = np.zeros((4, 2, 8), np.float32)
    k, v = combined[:, 0], combined[:, 1]
    k[...], v[...] = 1, 2
    with EmulatorDevice() as device:
        copy(device, copy_rows[4], k, v)
    assert (combined == 1).all()
    with pytest.raises(MemoryFault, match="in the gap after source"), EmulatorDevice() as device:
        copy(device, copy_rows[4], k, np.zeros((4, 16), np.float32), columns=9)  # runs from k into v


def test_the_same_array_is_one_buffer(copy_rows):
    x = np.arange(32, dtype=np.float32).reshape(2, 16)
    target = np.zeros((2, 16), np.float32)
    with EmulatorDevice() as device:
        copy(device, copy_rows[4], x, target)
        copy(device, copy_rows[4], np.full((2, 16), 7, np.float32), x[:])
        copy(device, copy_rows[4], x, target)
        assert device.address("x", x) == device.address("again", x.view())
    assert (target == 7).all()
    assert (x == 7).all()


def test_nothing_comes_back_after_an_exception(copy_rows):
    x, target = np.ones((2, 8), np.float32), np.zeros((2, 8), np.float32)
    device = EmulatorDevice()

    def second_fails():
        with device:
            copy(device, copy_rows[4], x, target)
            copy(device, copy_rows[4], x, target, rows=3)

    with pytest.raises(MemoryFault):
        second_fails()
    assert device.memory.buffers[1].get().all()
    assert not target.any()


def test_only_what_a_kernel_wrote_comes_back(copy_rows):
    """What changes behind the emulator's back stays where no kernel wrote."""
    x, target = np.ones((2, 8), np.float32), np.zeros((2, 8), np.float32)
    other = np.zeros((2, 8), np.float32)
    with EmulatorDevice() as device:
        copy(device, copy_rows[4], x, target)
        device.address("other", other)
        x[...] = other[...] = 5
    assert (x == 5).all()
    assert (other == 5).all()
    assert (target == 1).all()


def test_values_that_are_equal_but_not_the_same_bytes_come_back(copy_rows):
    source = np.array([[np.nan, 0.0, -0.0, 1.0]], np.float32)
    target = np.array([[np.nan, -0.0, -0.0, 2.0]], np.float32)
    with EmulatorDevice() as device:
        copy(device, copy_rows[4], source, target)
    assert target.tobytes() == source.tobytes()


@pytest.mark.parametrize("read_only", ["source", "target"])
def test_a_store_to_a_read_only_array_is_a_fault(copy_rows, read_only):
    arrays = {"source": np.ones((2, 8), np.float32), "target": np.zeros((2, 8), np.float32)}
    arrays[read_only].flags.writeable = False
    if read_only == "source":
        with EmulatorDevice() as device:
            copy(device, copy_rows[4], **arrays)
        assert (arrays["target"] == 1).all()
    else:
        with (
            pytest.raises(MemoryFault, match=r"read-only global store; .*\(byte 0 of 64 in target"),
            EmulatorDevice() as device,
        ):
            copy(device, copy_rows[4], **arrays)
        with EmulatorDevice() as device, pytest.raises(EmulatorError, match="copy into the read-only array target"):
            device.copy_from_host([(device.address("target", arrays["target"]), arrays["source"])])


def test_a_writable_view_of_a_read_only_one(copy_rows):
    x = np.zeros((2, 8), np.float32)
    view = x[:]
    view.flags.writeable = False
    with EmulatorDevice() as device:
        assert device.address("view", view) == device.address("x", x)
        copy(device, copy_rows[4], np.ones((2, 8), np.float32), x)
    assert (x == 1).all()


def test_an_empty_array_has_an_address_and_no_bytes(copy_rows):
    empty, x = np.zeros((2, 0), np.float32), np.zeros((2, 8), np.float32)
    with EmulatorDevice() as device:
        assert device.address("empty", empty)
    with pytest.raises(MemoryFault, match="0 bytes past the end of source"), EmulatorDevice() as device:
        copy(device, copy_rows[4], empty, x, columns=1)


def _load_16(x, o):
    t = cuda.threadIdx.x
    o[t] = x[t]


def test_an_array_without_axes(copy_rows):
    target = np.zeros((), np.float32)
    with EmulatorDevice() as device:
        args = [device.address("source", np.full((), 7, np.float32)), device.address("target", target)]
        device.launch(copy_rows[4], (1, 1, 1), [*args, 1, 1, 1, 1, 1, 1])
    assert target == 7


def test_the_alignment_is_the_arrays_own():
    raw = np.zeros(4096, np.uint8)
    start = -raw.__array_interface__["data"][0] % 256
    kernel = compiled(_load_16, P(types.float64), P(types.float64))
    out = np.zeros(32)
    for shift in (0, 8, 4):
        x = raw[start + shift :][:256].view(np.float64)
        device = EmulatorDevice()
        args = [device.address("x", x), device.address("out", out)]
        assert args[0] % 256 == shift
        if shift % 8:
            with pytest.raises(MemoryFault, match=r"misaligned \(8-byte\) global load"):
                device.launch(kernel, (1, 1, 1), args)
        else:
            device.launch(kernel, (1, 1, 1), args)


def _count(counter, o, read):
    t = cuda.threadIdx.x
    if read == 0:
        cuda.atomic.add(counter, 0, 1)
    else:
        o[t] = counter[1]


def test_workspaces():
    kernel = compiled(_count, types.Array(types.int32, 1, "C"), P(types.int32), i64)
    out = np.zeros(32, np.int32)

    def launch(device, counter, read):
        device.launch(kernel, (2, 1, 1), [0, 0, 4, 4, counter, 4, 4, device.address("out", out), read])

    with EmulatorDevice() as device:
        counter = device.scratch("counter", 16)
        assert counter % 256 == 0
        assert device.scratch("counter", 8) == counter != device.scratch("other", 8)
        launch(device, counter, 0)  # zero, so an atomic may be the first
        value = np.empty(4, np.int32)
        device.copy_to_host([(value, counter)])
        assert value.tolist() == [64, 0, 0, 0]
        with pytest.raises(MemoryFault, match=r"uninitialised global load; .* in counter"):
            launch(device, counter, 1)
        assert device.scratch("counter", 32) != counter
        with pytest.raises(MemoryFault, match="in freed counter"):
            launch(device, counter, 0)
        unknown = device.memory.alloc(16, name="unknown")  # only workspaces are zero from the start
        with pytest.raises(MemoryFault, match=r"uninitialised global atomic; .* in unknown"):
            launch(device, unknown.address, 0)


def test_copies_from_and_to_the_host_stay_within_arrays():
    x = np.arange(16, dtype=np.int64)
    with EmulatorDevice() as device:
        address = device.address("x", x)
        device.copy_from_host([(address + 8, np.array([7, 8], np.int64)), (address + 24, np.array([9], np.int64))])
        got, last = np.empty((2, 2), np.int64), np.empty(1, np.int64)
        device.copy_to_host([(got, address), (last, address + 15 * 8)])
        assert (got.tolist(), last) == ([[0, 7], [8, 9]], 15)
        for offset in (-8, 15 * 8, 1 << 30):
            with pytest.raises(EmulatorError, match=r"copy of 16 bytes at address .* out of bounds"):
                device.copy_to_host([(np.empty(2, np.int64), address + offset)])
        strided = device.address("strided", np.zeros((4, 4), np.int64)[:, :2])
        with pytest.raises(EmulatorError, match="out of bounds"):
            device.copy_from_host([(strided, np.zeros(4, np.int64))])
    assert x[:4].tolist() == [0, 7, 8, 9]


def test_a_workspace_has_a_size():
    with EmulatorDevice() as device, pytest.raises(EmulatorError, match="nbytes must be >= 0, got -1"):
        device.scratch("w", -1)


def test_a_workspace_is_taken_once():
    with EmulatorDevice() as device:
        assert device.take("report") is None
        address = device.scratch("report", 4)
        assert device.take("report").tolist() == [0, 0, 0, 0]
        device.copy_from_host([(address, np.array([1, 0, 0, 2], np.uint8))])
        assert device.take("report").tolist() == [1, 0, 0, 2]
        assert device.take("report").tolist() == [0, 0, 0, 0]


def _race(o):
    s = cuda.shared.array(64, types.float32)
    t = cuda.threadIdx.x
    s[t] = t
    o[t] = s[63 - t]


def test_options_reach_the_launch():
    kernel = compiled(_race, P(types.float32), num_threads=64)
    out = np.zeros(64, np.float32)

    def launch(**options):
        with EmulatorDevice(**options) as device:
            device.launch(kernel, (2, 1, 1), [device.address("out", out)])
        return device.launches

    with pytest.raises(RaceFault, match="shared-memory race"):
        launch()
    with pytest.raises(RaceFault, match="global-memory race"):
        launch(race=False, global_race=True)
    (stats,) = launch(race=False, stats=True)
    assert (stats.kernel, stats.bytes_written, stats.footprint) == ("_race", 512, None)
    seen = set()
    for seed in range(4):
        launch(race=False, init_check=False, seed=seed)
        seen.add(out.tobytes())
    assert len(seen) > 1


def test_shared_memory_limit_and_grid_limits(copy_rows):
    x = np.zeros((2, 8), np.float32)
    device = EmulatorDevice()
    args = [device.address("x", x), device.address("x", x), 2, 8, 8, 1, 8, 1]
    device.launch(copy_rows[4], (1, 1, 1), args, device.max_shared_bytes)
    for grid, shared, message in (
        ((1, 1, 1), device.max_shared_bytes + 1, "bytes of shared memory exceed 232448"),
        ((1 << 31, 1, 1), 0, r"grid must be at most \(2147483647, 65535, 65535\), got"),
        ((1, 65536, 1), 0, "grid must be"),
        ((1, 1, 65536), 0, "grid must be"),
        ((1, 1, 0), 0, "grid must be one to three positive sizes"),
    ):
        with pytest.raises(EmulatorError, match=message):
            device.launch(copy_rows[4], grid, args, shared)


def resident_mib():
    """What this process holds in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("init_check", [True, False])
def test_a_large_array_takes_memory_only_for_what_a_kernel_touches(copy_rows, init_check):
    """Twice 1.5 GiB that the system has not given any memory for, as views with gaps; rows far apart are used."""
    rows, columns, apart = 2, 8, 1 << 27
    source, target = (
        sparse_zeros(3 * apart, np.float32).reshape(3, 1 << 12, 1 << 15)[:, :, : 1 << 14] for _ in range(2)
    )
    strides = [apart, 1] * 2
    source[:2, 0, :columns] = values = np.arange(rows * columns).reshape(rows, columns)
    before = resident_mib()
    with EmulatorDevice(init_check=init_check, global_race=True, stats=True) as device:
        arguments = [device.address("source", source), device.address("target", target), rows, columns, *strides]
        device.launch(copy_rows[4], (rows, 1, 1), arguments)
        assert resident_mib() - before < 100
    assert resident_mib() - before < 100
    np.testing.assert_array_equal(target[:2, 0, :columns], values)
    assert not target[2, 0].any()
    arguments[:2] = [
        address + 4 * (1 << 14) - 4 for address in arguments[:2]
    ]  # the last element of a row, then the gap
    with pytest.raises(MemoryFault, match=r"out of bounds.*in the gap after source\[0, 0, 16383\]"):
        device.launch(copy_rows[4], (rows, 1, 1), arguments)


def test_what_a_store_did_not_touch_keeps_its_value(copy_rows):
    """The first access to a part of an array may be a store."""
    for target in (np.arange(48.0, dtype=np.float32).reshape(2, 24), np.ones((2, 48), np.float32)[:, ::2]):
        wanted = target.copy()
        wanted[:, :8] = 7
        with EmulatorDevice() as device:
            copy(device, copy_rows[4], np.full((2, 8), 7, np.float32), target[:, :8])
        np.testing.assert_array_equal(target, wanted)
        wanted[:, 3:11] = 5
        with EmulatorDevice() as device:
            args = [device.address("source", np.full((2, 8), 5, np.float32)), device.address("target", target)]
            args[1] += 3 * target.strides[1]
            steps = [8, 1, target.strides[0] // 4, target.strides[1] // 4]
            device.launch(copy_rows[4], (2, 1, 1), [*args, 2, 8, *steps])
        np.testing.assert_array_equal(target, wanted)


def test_many_thread_blocks(copy_rows):
    rows = 70_000
    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    target = np.zeros_like(x)
    with EmulatorDevice() as device:
        copy(device, copy_rows[4], x, target)
    np.testing.assert_array_equal(target, x)


def test_a_good_launch_after_a_bad_one(copy_rows):
    x, target = np.ones((2, 8), np.float32), np.zeros((2, 8), np.float32)
    with EmulatorDevice() as device:
        with pytest.raises(MemoryFault):
            copy(device, copy_rows[4], x, target, rows=3)
        copy(device, copy_rows[4], x, target)
    assert (target == 1).all()
