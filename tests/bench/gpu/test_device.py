"""GPUs through fake modules of torch and CuPy, and the error without a GPU."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from pagedkv.bench.gpu import device
from pagedkv.bench.gpu.device import CupyGpu, TorchGpu, driver_version, open_gpu
from pagedkv.cuda import driver
from pagedkv.errors import BackendUnavailableError
from pagedkv.kernels.read import TURN_BYTES

from ...support.device_fakes import recording

L2_BYTES, NUM_BYTES = 1000, 8 * TURN_BYTES


@pytest.fixture(autouse=True)
def small_flush(monkeypatch):
    monkeypatch.setattr(device, "FLUSH_BYTES", 400)


@pytest.fixture
def of_torch():
    properties = SimpleNamespace(name="a GPU", L2_cache_size=L2_BYTES, multi_processor_count=132)
    cuda = MagicMock()
    cuda.get_device_properties.return_value = properties
    zeros = MagicMock(side_effect=lambda n, dtype, device: torch.zeros(n, dtype=dtype))
    module = SimpleNamespace(
        cuda=cuda, zeros=zeros, int32=torch.int32, __version__="2.9", version=SimpleNamespace(cuda="13.0")
    )
    return TorchGpu(module, NUM_BYTES), module


@pytest.fixture
def of_cupy():
    module = MagicMock(__version__="14.2")
    properties = {"name": b"a GPU", "l2CacheSize": L2_BYTES, "multiProcessorCount": 132}
    module.cuda.runtime.getDeviceProperties.return_value = properties
    module.cuda.runtime.runtimeGetVersion.return_value = 13010
    module.ascontiguousarray, module.asnumpy = np.ascontiguousarray, np.asarray
    return CupyGpu(module, NUM_BYTES), module


def test_facts_of_a_gpu_from_torch_and_cupy(of_torch, of_cupy):
    for (gpu, module), versions in (
        (of_torch, {"torch": "2.9", "CUDA": "13.0"}),
        (of_cupy, {"CuPy": "14.2", "CUDA": "13.1"}),
    ):
        facts = {key: value for key, value in gpu.facts.items() if key != "driver"}
        assert facts == {"device": "a GPU", **versions, "L2 MiB": L2_BYTES / 2**20}
        assert gpu.num_multiprocessors == 132
        # Two buffers to copy between, sums of what is read, and one of 8 times the cache to flush it.
        sizes = [NUM_BYTES // 4, NUM_BYTES // 4, 8, 8 * L2_BYTES // 4]
        assert [call.args[0] for call in module.zeros.call_args_list] == sizes


def test_arrays_of_torch(of_torch):
    gpu, _ = of_torch
    x = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    turned = gpu.arranged(x, (2, 0, 1))
    assert turned.is_contiguous()
    np.testing.assert_array_equal(
        gpu.numpy(turned), np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    )


def test_arrays_of_cupy(of_cupy):
    gpu, module = of_cupy
    x = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    turned = gpu.arranged(x, (2, 0, 1))
    assert turned.flags.c_contiguous
    assert gpu.numpy(turned).dtype == np.float32
    np.testing.assert_array_equal(gpu.numpy(turned), x.transpose(2, 0, 1))
    assert gpu.array(x) is module.asarray.return_value


def test_torch_copies_and_captures(of_torch):
    gpu, module = of_torch
    gpu._source.fill_(7)
    gpu.copy()
    assert (gpu._target == 7).all()
    trace = []
    module.cuda.graph.return_value.__enter__.side_effect = lambda *args: trace.append("capture")
    module.cuda.stream.return_value.__enter__.side_effect = lambda *args: trace.append("stream")
    module.cuda.synchronize.side_effect = lambda: trace.append("wait")
    replay = gpu.capture(lambda: trace.append("call"), 3)
    # Once on the stream of the capture, for workspaces and kernels, and all else has come to an end.
    assert trace == ["wait", "stream", "call", "wait", "capture", *["call"] * 3]
    stream = module.cuda.Stream.return_value
    module.cuda.stream.assert_called_once_with(stream)
    module.cuda.graph.assert_called_once_with(module.cuda.CUDAGraph.return_value, stream=stream)
    assert replay is module.cuda.CUDAGraph.return_value.replay


def test_cupy_copies_and_captures(of_cupy):
    gpu, module = of_cupy
    gpu.copy()
    gpu._target.data.copy_from_device_async.assert_called_once_with(gpu._source.data, NUM_BYTES)
    trace = []
    stream = module.cuda.Stream.return_value.__enter__.return_value
    stream.begin_capture.side_effect = lambda: trace.append("capture")
    stream.synchronize.side_effect = lambda: trace.append("wait")
    replay = gpu.capture(lambda: trace.append("call"), 3)
    assert trace == ["call", "wait", "capture", *["call"] * 3]
    module.cuda.Stream.assert_called_once_with(non_blocking=True)
    replay()
    stream.end_capture.return_value.launch.assert_called_once_with(module.cuda.get_current_stream.return_value)


@pytest.mark.parametrize(
    ("num_bytes", "turns", "launched"),
    [(NUM_BYTES, 4, (2, 4)), (NUM_BYTES, 1, (8, 1)), (TURN_BYTES + 1, 1, (2, 1)), (0, 1, (1, 0))],
)
def test_both_read_on_the_current_stream(of_torch, of_cupy, num_bytes, turns, launched):
    (gpu, module), sources = of_torch, []
    module.cuda.current_stream.return_value.cuda_stream = 5
    sources.append((gpu, 5, gpu._source.data_ptr(), gpu._sums.data_ptr()))
    gpu, module = of_cupy
    module.cuda.get_current_stream.return_value.ptr = 7
    sources.append((gpu, 7, gpu._source.data.ptr, gpu._sums.data.ptr))
    for gpu, stream, source, sums in sources:
        with recording() as devices:
            gpu.read(num_bytes, turns)
        ((kernel, grid, args, shared_bytes),) = devices[0, stream].launches
        assert (kernel.entry, grid, args[:2], shared_bytes) == ("pagedkv_read", (launched[0], 1, 1), (source, sums), 0)
        assert args[2] == launched[1]


def test_events_of_torch_and_cupy_measure_milliseconds(of_torch, of_cupy):
    gpu, module = of_torch
    event = gpu.record()
    module.cuda.Event.assert_called_once_with(enable_timing=True)
    event.record.assert_called_once_with()
    event.query.return_value, event.elapsed_time.return_value = True, 2.5
    assert gpu.passed(event) is True
    assert gpu.milliseconds(event, "stop") == 2.5
    event.elapsed_time.assert_called_once_with("stop")
    gpu, module = of_cupy
    event = gpu.record()
    event.record.assert_called_once_with()
    event.done, module.cuda.get_elapsed_time.return_value = False, 3.5
    assert gpu.passed(event) is False
    assert gpu.milliseconds(event, "stop") == 3.5
    module.cuda.get_elapsed_time.assert_called_once_with(event, "stop")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build", "580.82.07"),
        ("", "unknown"),
    ],
)
def test_the_driver_says_its_version(text, version):
    assert driver_version(text) == version


def test_the_error_without_a_gpu_names_what_works_without_one(monkeypatch):
    def capabilities():
        raise BackendUnavailableError("no CUDA driver was found: install it")

    monkeypatch.setattr(driver, "capabilities", capabilities)
    with pytest.raises(BackendUnavailableError, match=r"was found: install it; .*bench cpu"):
        open_gpu()


def test_a_framework_that_makes_arrays_is_needed(monkeypatch):
    monkeypatch.setattr(driver, "capabilities", lambda: [(9, 0)])
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailableError, match=r"CuPy.*torch with CUDA.*bench cpu"):
        open_gpu()


def test_without_cuda_in_torch_cupy_is_used(monkeypatch):
    monkeypatch.setattr(driver, "capabilities", lambda: [(9, 0)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", "the module")
    monkeypatch.setattr(device, "CupyGpu", lambda cupy, copy_bytes: (cupy, copy_bytes))
    assert open_gpu(5) == ("the module", 5)
