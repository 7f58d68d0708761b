"""The path to a GPU that tests of kernels take, on a driver whose GPU is the emulator."""

import ctypes
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from numba import cuda, types, uint32

import pagedkv.compiler.compile as compiling
from pagedkv.compiler.link import Linked
from pagedkv.cuda.driver import cuda_device
from pagedkv.emulator import EmulatorDevice
from pagedkv.kernels.device.intrinsics import thread as device
from pagedkv.kernels.device.source import KernelSource

from ..cuda.conftest import recorded
from ..cuda.driver_fakes import Recorder
from ..emulator.ptx_harness import SHARED, filled, launch_on, run_on
from ..support.devices import CopyingDevice
from .device.function_cases import BYTES, launch, run


def bytes_at(address, nbytes):
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class EmulatedGpu(Recorder):
    """Memory, copies and launches are the emulator's; what it loads as machine code is PTX."""

    def __init__(self, capability=(9, 0)):
        super().__init__(capability)
        self.emulator = EmulatorDevice()

    def cuMemAlloc(self, nbytes):
        self.next_address = self.emulator.scratch(f"memory {len(self.memory)}", nbytes)
        return super().cuMemAlloc(nbytes)

    def cuMemcpyHtoDAsync(self, destination, source, nbytes, stream):
        self.emulator.copy_from_host([(destination, bytes_at(source, nbytes))])
        return super().cuMemcpyHtoDAsync(destination, source, nbytes, stream)

    def cuMemcpyDtoHAsync(self, destination, source, nbytes, stream):
        self.emulator.copy_to_host([(bytes_at(destination, nbytes), source)])
        return super().cuMemcpyDtoHAsync(destination, source, nbytes, stream)

    @property
    def ObjectCode(self):
        def from_cubin(cubin, *, name):
            def get_kernel(entry):
                return SimpleNamespace(handle=entry, name=name, entry=entry, ptx=cubin.decode())

            return SimpleNamespace(get_kernel=get_kernel)

        return SimpleNamespace(from_cubin=from_cubin)

    def launch(self, stream, config, kernel, *args):
        super().launch(stream, config, kernel, *args)
        grid, kernel.num_threads, shared_bytes = config
        self.emulator.launch(kernel, grid, args, shared_bytes)


@pytest.fixture
def gpu():
    """A driver of GPUs that are emulated, on which kernels are compiled but not linked."""
    make_ptx = compiling._make_ptx
    with recorded(EmulatedGpu()) as driver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_make_ptx", make_ptx)
        patch.setattr(compiling, "load_or_link", lambda ptx, capability, *_: Linked(capability, ptx.encode(), ""))
        yield driver


def on_gpu(**checks):
    return CopyingDevice(cuda_device(0, 0))


def test_ptx_is_launched_with_its_arrays_in_order(gpu):
    a, b = np.arange(64, dtype="u4"), np.arange(64, dtype="u8") << 40
    body = """mov.u32 %r20, buf; shl.b32 %r21, %lid, 2; add.u32 %r22, %r20, %r21; st.shared.u32 [%r22], %i0; bar.sync 0;
    xor.b32 %r23, %r22, 4; ld.shared.u32 %o0, [%r23]; sub.u64 %o1, %i1, %gid64;"""
    neighbours, less = run_on(on_gpu, body, [a, b], ["u4", "u8"], block=32, grid=2, **SHARED)
    np.testing.assert_array_equal(neighbours, a ^ 1)
    np.testing.assert_array_equal(less, b - a)
    (made,) = [call for call in gpu.calls if call[0] == "launch"]
    assert made[2:5] == ("stream 1", ((2, 1, 1), 32, 0), "test")
    assert all(type(arg) is int and arg % 256 == 0 for arg in made[5])
    np.testing.assert_array_equal(a, np.arange(64))


def test_a_test_is_skipped_where_the_gpu_lacks_an_instruction(gpu):
    text = ".version 8.0\n.target {}\n.address_size 64\n.visible .entry test() {{ ret; }}"
    gpu.attributes.update(major=8, minor=9)
    for target in ("sm_90", "sm_90a", "sm_100"):
        with pytest.raises(pytest.skip.Exception, match=r"needs compute capability (9|10)\.0"):
            launch_on(on_gpu, text.format(target), [], block=32)
    for target in ("sm_80", "sm_89"):
        launch_on(on_gpu, text.format(target), [], block=32)
    with pytest.raises(pytest.skip.Exception, match=r"needs compute capability 9\.0"):
        run(on_gpu, lambda source, result, i: None, np.zeros(1, "u4"), np.zeros(1, "u4"), least=(9, 0))


def test_code_for_one_capability_alone_is_not_for_a_newer_one(gpu):
    gpu.attributes.update(major=10)
    text = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry test() { ret; }"
    with pytest.raises(pytest.skip.Exception, match=r"needs compute capability 9\.0"):
        launch_on(on_gpu, text, [], block=32)


def test_device_functions_are_compiled_for_the_gpu(gpu):
    gpu.attributes.update(major=12)

    def twice(source, result, i):
        device.store_4(result + i * 4, uint32(2 * device.load_4(source + i * 4)))

    source = np.arange(300, dtype=np.uint32)
    np.testing.assert_array_equal(run(on_gpu, twice, source, filled(300, "u4"), capability=(8, 0)), 2 * source)
    with mock.patch.object(gpu.emulator, "launch") as launched:
        run(on_gpu, twice, source, source.copy())
    (kernel, *rest), _ = launched.call_args
    assert ".target sm_120" in kernel.ptx
    assert rest[0] == (3, 1, 1)
    assert rest[1][2] == 300


def test_dynamic_shared_memory_is_asked_for(gpu):
    def kernel(result):
        shared = cuda.shared.array(0, uint32)
        shared[cuda.threadIdx.x] = cuda.threadIdx.x
        device.store_4(device.address(result) + cuda.threadIdx.x * 4, shared[cuda.threadIdx.x])

    result = filled(32, "u4")
    launch(on_gpu, KernelSource(kernel, types.void(BYTES), 32), (1, 1, 1), [result], 60_000)
    np.testing.assert_array_equal(result, np.arange(32))
    assert [call[2:4] for call in gpu.calls if call[0] == "allow"] == [("dynamic", 60_000)]
