"""The CUDA driver as a Device, on a driver that records its calls: which, in what order, with what."""

import ctypes
import inspect
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.compiler.compile import CompiledKernel
from pagedkv.compiler.link import Linked
from pagedkv.cuda import driver as drivers
from pagedkv.cuda.device import Device
from pagedkv.cuda.driver import CudaDevice, cuda_device, cuda_devices
from pagedkv.errors import BackendUnavailableError

from .driver_fakes import OWN_STREAM, RELAXED, Code, Recorder


def kernel(name="k"):
    made = CompiledKernel(f"{name}[]", f"pagedkv_{name}", "PTX", 128, (9, 0))
    made._linked = Linked((9, 0), b"cubin", "")
    return made


def names(cuda):
    return [call[0] for call in cuda.calls]


def test_a_device_has_all_that_the_protocol_asks_for(cuda):
    device: Device = cuda_device(0, 0)
    assert device.capability == (9, 0)
    assert device.max_shared_bytes == 232448
    for name, function in vars(Device).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            mine = inspect.signature(getattr(CudaDevice, name))
            assert list(mine.parameters) == list(inspect.signature(function).parameters), name


def test_thread_blocks_that_run_at_once_are_asked_for_in_any_context_and_in_a_capture(cuda):
    device = cuda_device(0, 7)
    cuda.thread.context = 0
    assert device.blocks_at_once(kernel("split"), 100_000) == 2 * 132
    cuda.begin_capture(7)
    assert device.blocks_at_once(kernel("other"), 0) == 2 * 132


def test_a_device_is_one_for_each_gpu_and_stream(cuda):
    device = cuda_device(0, 7)
    assert cuda_device(0, 7) is device
    assert cuda_device(0, 8) is not device
    assert cuda_device(1, 7) is not device
    assert cuda_device(0, 0) is cuda_device(0, 1)  # two names of the legacy default stream
    assert len(cuda_devices()) == 4
    assert cuda_devices()[0] is device
    assert cuda.calls == []


def test_the_per_thread_stream_has_workspaces_of_its_own_in_each_thread(cuda):
    found = [cuda_device(0, 2)]
    thread = threading.Thread(target=lambda: found.append(cuda_device(0, 2)))
    thread.start()
    thread.join()
    assert found[0] is cuda_device(0, 2)
    assert found[0] is not found[1]


def test_a_thread_gets_nothing_of_one_that_has_ended(cuda):
    """Python numbers it alike, but the stream of the one before may still work in its workspaces."""
    found, idents = [], set()

    def in_a_thread():
        found.append(cuda_device(0, 2))
        idents.add(threading.get_ident())
        assert cuda_device(0, 2) is found[-1]

    for _ in range(8):
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
    assert len(set(map(id, found))) == 8
    assert len(idents) < 8, "no number came twice: this test shows nothing"


def test_threads_get_one_device(cuda):
    found = []
    threads = [threading.Thread(target=lambda: found.append(cuda_device(0, 9))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_an_address_is_that_of_element_0(cuda):
    array = np.zeros((4, 6), np.float32)
    assert cuda_device(0, 0).address("q", array) == array.ctypes.data
    assert cuda_device(0, 0).address("q", array[2:, ::-1]) == array.ctypes.data + 4 * (12 + 5)


def test_the_first_launch_loads_and_the_next_one_only_launches(cuda):
    device, k = cuda_device(0, 5), kernel()
    device.launch(k, (3, 2, 1), (10, 2.5), 4096)
    device.launch(k, (3, 2, 1), [11, 3.5], 4096)
    config = ((3, 2, 1), 128, 4096)
    assert cuda.calls == [
        ("load", 1000, b"cubin", "k[]"),
        ("allow", 1000, "dynamic", 4096, 0, "gpu 0"),
        ("launch", 1000, "stream 5", config, "pagedkv_k", (10, 2.5)),
        ("launch", 1000, "stream 5", config, "pagedkv_k", (11, 3.5)),
    ]


def test_shared_memory_is_allowed_once_and_more_only_when_more_is_needed(cuda):
    device, k = cuda_device(0, 5), kernel()
    for nbytes in (0, 50_000, 40_000, 60_000, 50_000):
        device.launch(k, (1, 1, 1), (), nbytes)
    cuda_device(0, 6).launch(k, (1, 1, 1), (), 60_000)
    assert [call[3] for call in cuda.calls if call[0] == "allow"] == [50_000, 60_000]
    assert names(cuda).count("load") == 1
    cuda_device(1, 6).launch(k, (1, 1, 1), (), 60_000)
    assert [call[1] for call in cuda.calls if call[0] == "allow"] == [1000, 1000, 1001]


def test_work_of_another_gpu_leaves_the_current_one_as_it_was(cuda):
    device = cuda_device(1, 5)
    device.launch(kernel(), (1, 1, 1), (), 64)
    device.scratch("tmp", 10)
    device.copy_from_host([(4096, np.zeros(3))])
    device.copy_to_host([(np.zeros(3), 4096)])
    device.take("tmp")
    assert {call[1] for call in cuda.calls} == {1001}
    assert cuda.context == 1000
    assert cuda.contexts == []


def test_a_failure_leaves_the_current_gpu_as_it_was(cuda):
    cuda.fail = {"alloc": 2, "wait": 1, "pin": 2, "to host": 1}
    device = cuda_device(1, 5)
    with pytest.raises(MemoryError, match="cuMemAlloc failed on GPU 1: CUDA_ERROR_OUT_OF_MEMORY"):
        device.scratch("tmp", 10)
    with pytest.raises(MemoryError, match="cuMemHostAlloc"):
        device.copy_from_host([(4096, np.zeros(3))])
    del cuda.fail["pin"], cuda.fail["alloc"]
    with pytest.raises(RuntimeError, match="cuMemcpyDtoHAsync failed on GPU 1: CUDA_ERROR_INVALID_VALUE"):
        device.copy_to_host([(np.zeros(3), 4096)])
    device.scratch("tmp", 10)
    with pytest.raises(RuntimeError, match="cuCtxSynchronize failed on GPU 1: CUDA_ERROR_INVALID_VALUE"):
        device.take("tmp")
    assert (cuda.context, cuda.contexts) == (1000, [])
    cuda.fail = {}
    device.copy_to_host([(np.zeros(3), 4096)])
    assert device.take("tmp") is not None


def test_many_grids_do_not_fill_the_host(cuda, monkeypatch):
    monkeypatch.setattr(drivers, "MOST_PREPARED", 4)
    device, k = cuda_device(0, 5), kernel()
    for x in range(1, 20):
        device.launch(k, (x, 1, 1), ())
    assert len(device._prepared) <= 4
    assert names(cuda) == ["load"] + ["launch"] * 19


def test_a_workspace_is_zero_and_grows_and_the_one_before_is_freed(cuda):
    device = cuda_device(0, 5)
    first = device.scratch("tmp", 1000)
    assert device.scratch("tmp", 1000) == device.scratch("tmp", 1) == first
    assert first % 256 == 0
    second = device.scratch("tmp", 1025)
    other = device.scratch("report", 40)

    def made(address, nbytes):
        return [
            ("alloc", 1000, nbytes),
            ("zero", 1000, address, 0, nbytes, OWN_STREAM),
            ("wait for stream", 1000, OWN_STREAM),
        ]

    waited, gone = ("wait for stream", 1000, 5), ("free", 1000, first)
    assert cuda.calls == [*made(first, 1024), waited, *made(second, 1536), gone, *made(other, 256)]
    assert device.num_bytes == 1536 + 256
    assert cuda_device(0, 6).scratch("tmp", 10) not in (first, second, other)


def test_a_workspace_that_finds_no_room_changes_nothing(cuda):
    device = cuda_device(0, 5)
    before = device.scratch("tmp", 1000)
    cuda.fail = {"alloc": 2}
    with pytest.raises(MemoryError, match=r"^workspace tmp needs 2048 bytes \(cuMemAlloc failed .*\): make room, as "):
        device.scratch("tmp", 2000)
    cuda.fail = {"wait for stream": 1}
    with pytest.raises(RuntimeError, match="cuStreamSynchronize"):
        device.scratch("tmp", 2000)
    assert device.scratch("tmp", 1000) == before
    assert (device.num_bytes, "free" in names(cuda)) == (1024, False)


def test_a_workspace_grows_by_what_there_is_room_for(cuda, monkeypatch):
    device = cuda_device(0, 5)
    device.scratch("tmp", 1000)
    allocate = cuda.cuMemAlloc
    monkeypatch.setattr(cuda, "cuMemAlloc", lambda nbytes: allocate(nbytes) if nbytes < 1500 else (Code(2), 0))
    monkeypatch.setattr(cuda.cuMemAlloc, "__name__", "cuMemAlloc")
    device.scratch("tmp", 1025)
    assert device.num_bytes == 1280
    message = r"workspace tmp needs 1792 bytes .*pagedkv\.release_workspaces\(\).* a lower max_seq_len, .* fewer seq"
    with pytest.raises(MemoryError, match=message):
        device.scratch("tmp", 1700)
    assert device.num_bytes == 1280


@pytest.mark.parametrize("fails", ["stream", "zero", "wait for stream"])
def test_memory_that_cannot_be_zeroed_is_freed(cuda, fails):
    cuda.fail = {fails: 1}
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        cuda_device(0, 5).scratch("tmp", 1000)
    assert {state for _, state in cuda.memory.values()} <= {"freed"}
    assert cuda_device(0, 5).num_bytes == 0


def test_a_workspace_that_cannot_be_freed_stays(cuda):
    device = cuda_device(0, 5)
    address = device.scratch("tmp", 1000)
    cuda.fail = {"free": 1}
    with pytest.raises(RuntimeError, match="cuMemFree"):
        device.release()
    cuda.fail = {}
    assert device.scratch("tmp", 1000) == address
    assert device.num_bytes == device.release() == 1024
    assert device.num_bytes == 0


@pytest.mark.parametrize("grows", [False, True])
def test_an_interrupt_while_memory_is_freed_leaves_none_that_is_gone(cuda, monkeypatch, grows):
    """Ctrl-C during cuMemFree is raised when that has returned."""
    device, free = cuda_device(0, 5), cuda.cuMemFree
    device.scratch("tmp", 1000)

    def interrupted(address):
        free(address)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "cuMemFree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            device.scratch("tmp", 2000) if grows else device.release()
    held = sum(nbytes for nbytes, state in cuda.memory.values() if state != "freed")
    assert device.num_bytes == held == 2048 * grows
    device.launch(kernel(), (1, 1, 1), (device.scratch("tmp", 1000),))
    assert device.release() > 0
    assert device.num_bytes == 0


def test_what_was_made_before_only_launches(cuda):
    cuda.begin_capture(5)
    device, k = cuda_device(0, 5), kernel()
    tmp = device.scratch("tmp", 1000)
    device.launch(k, (1, 1, 1), (tmp,), 100)
    before = len(cuda.calls)
    assert device.scratch("tmp", 900) == tmp
    device.launch(k, (1, 1, 1), (tmp,), 100)
    device.launch(k, (2, 1, 1), (tmp,), 100)
    assert len(cuda.calls) == before
    assert len(cuda.end_capture(5)) == 3


def test_a_graph_has_a_device_of_its_own(cuda):
    device, k = cuda_device(0, 5), kernel()
    tmp = device.scratch("tmp", 1000)
    cuda.begin_capture(5)
    captured = cuda_device(0, 5)
    assert captured is not device
    assert cuda_device(0, 5) is captured
    small, large = captured.scratch("tmp", 100), captured.scratch("tmp", 1000)
    captured.launch(k, (1, 1, 1), (small, large))
    assert [node[0] for node in cuda.end_capture(5)] == ["launch"]
    assert cuda_device(0, 5) is device
    assert len({tmp, small, large}) == 3
    assert captured.num_bytes == 256 + 1024
    assert captured.release() == 0
    assert "free" not in names(cuda)


def test_workspaces_are_released_but_for_the_report(cuda):
    device = cuda_device(1, 5)
    assert device.release() == 0
    assert cuda.calls == []
    addresses = [device.scratch("sums", 1000), device.scratch("states", 200)]
    report = device.scratch("report", 40)
    before = len(cuda.calls)
    assert device.release() == 1024 + 256
    assert cuda.calls[before:] == [("wait", 1001), *(("free", 1001, address) for address in addresses)]
    assert device.num_bytes == 256
    assert device.scratch("report", 40) == report
    assert device.scratch("sums", 1000) not in addresses


def test_copies_are_on_the_stream(cuda):
    device, array = cuda_device(0, 5), np.zeros((2, 3), np.int64)
    pinned = np.frombuffer(ctypes.create_string_buffer(48), np.int64)
    cuda.pinned.append(pinned.base)
    device.copy_from_host([(4096, pinned)])
    device.copy_to_host([(pinned, 8192)])
    assert cuda.calls == [
        ("to device", 1000, 4096, pinned.ctypes.data, 48, 5),
        ("to host", 1000, pinned.ctypes.data, 8192, 48, 5),
    ]
    device.copy_from_host([(4096, array)])
    assert names(cuda)[2:] == ["pin", "event", "pin", "event", "to device"]
    device.copy_to_host([(array, 4096)])
    assert names(cuda)[7:] == ["to host", "record", "wait for", "record", "wait for"]


def test_copies_are_not_captured(cuda):
    cuda.begin_capture(5, RELAXED)
    device = cuda_device(0, 5)
    for copy in (
        lambda: device.copy_from_host([(4096, np.zeros(3))]),
        lambda: device.copy_to_host([(np.zeros(3), 4096)]),
    ):
        with pytest.raises(RuntimeError, match=r"captured by a CUDA graph, and copies .* make them before the capture"):
            copy()
    assert cuda.calls == cuda.end_capture(5) == []


def test_a_workspace_is_taken_when_all_of_the_gpu_is_done(cuda):
    device = cuda_device(1, 5)
    assert device.take("report") is None
    address = device.scratch("report", 40)
    before = len(cuda.calls)
    assert not device.take("report").any()
    assert cuda.calls[before:] == [("wait", 1001), ("read", 1001, address, 256)]
    cuda.content, before = b"\1\2", len(cuda.calls)
    assert device.take("report")[:3].tolist() == [1, 2, 0]
    assert [call[0] for call in cuda.calls[before:]] == ["wait", "read", "set", "wait"]
    assert not device.take("report").any()


def test_nothing_is_launched_between_the_copy_and_the_memset_of_a_report(cuda, monkeypatch):
    device, copy, found = cuda_device(0, 5), cuda.cuMemcpyDtoH, []
    device.scratch("report", 40)
    cuda.content = b"\1"

    def read(*args):
        thread = threading.Thread(target=lambda: found.append(device.lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        return copy(*args)

    monkeypatch.setattr(cuda, "cuMemcpyDtoH", read)
    assert device.take("report").any()
    assert found == [False]


@pytest.mark.parametrize("call", [lambda device: device.take("report"), CudaDevice.release])
def test_waiting_while_another_stream_is_captured_is_refused(cuda, call):
    device = cuda_device(1, 5)
    device.scratch("report", 40)
    device.scratch("tmp", 40)
    cuda.begin_capture(7)
    with pytest.raises(RuntimeError, match=r"^a stream of GPU 1 is being captured, .* call this after the capture \("):
        call(device)
    assert cuda.end_capture(7) == []
    call(device)


def test_the_per_thread_stream_is_one_of_each_gpu(cuda):
    cuda_device(0, 5)
    gpu = cuda_device(1, 5)._gpu
    with gpu.current():
        cuda.begin_capture(2)
    with pytest.raises(RuntimeError, match="and this waits"):
        drivers.refuse_capture([2], "this waits")


def test_a_capture_on_any_of_the_streams_is_refused(cuda):
    cuda.begin_capture(7)
    drivers.refuse_capture([7], "this waits")  # no GPU has been used
    cuda_device(0, 5)
    drivers.refuse_capture([0, 5], "this waits")
    with pytest.raises(RuntimeError, match=r"^the stream is being captured by a CUDA graph, and this waits$"):
        drivers.refuse_capture([5, 7], "this waits")


@pytest.mark.parametrize("stream", [0, 2, 5])
def test_a_thread_without_a_context_gets_none(cuda, stream):
    """As one that has called neither torch nor CuPy yet."""
    done = []

    def in_a_thread():
        device = cuda_device(1, stream)
        drivers.refuse_capture([stream], "this waits")
        device.launch(kernel(), (1, 1, 1), (device.scratch("report", 40),))
        assert not device.take("report").any()
        device.scratch("tmp", 40)
        assert device.release() == 256
        assert cuda.context == 0
        done.append(True)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert done
    assert {call[1] for call in cuda.calls} == {1001}


def test_the_default_stream_is_not_asked_whether_it_is_captured(cuda):
    """It cannot be, and to ask is an error while a stream that waits for it is."""
    cuda.begin_capture(5, blocking=True)
    assert cuda_device(0, 0) is cuda_device(0, 1)


def test_a_gpu_that_is_not_there(cuda):
    with pytest.raises(BackendUnavailableError, match="there is no GPU 2: the CUDA driver sees 2"):
        cuda_device(2, 0)
    assert cuda_device(1, 0)


def test_a_gpu_that_is_too_old(cuda):
    cuda.attributes.update(major=7, minor=5)
    with pytest.raises(BackendUnavailableError, match=r"GPU 0 has compute capability 7\.5.*need 8\.0"):
        cuda_device(0, 0)
    assert cuda_devices() == []


def test_capabilities_are_asked_for_without_a_context(cuda, monkeypatch):
    monkeypatch.setattr(Recorder, "cuDevicePrimaryCtxRetain", None)
    assert drivers.capabilities() == [(9, 0), (9, 0)]


def test_the_names_that_are_used_exist():
    """What the recorder has under these names, the real modules have too."""
    import cuda.core as core
    from cuda.bindings import driver

    own = {name for name in dir(Recorder) if name.startswith(("cu", "CU")) and not name.startswith("context")}
    assert len(own) >= 20
    assert all(hasattr(driver, name) for name in own)
    for name in own:
        mine, theirs = getattr(Recorder, name), getattr(driver, name)
        if isinstance(mine, SimpleNamespace):
            assert set(vars(mine)) <= set(dir(theirs)), name
        elif callable(mine):
            given = theirs.__doc__.split("\n")[0].partition("(")[2].rpartition(")")[0].split(", ")
            assert len(inspect.signature(mine).parameters) - 1 == len([x for x in given if x]), name
    assert core.Stream.from_handle(5) is not None
    assert core.ObjectCode.from_cubin
    config = core.LaunchConfig(grid=(3, 2, 1), block=128, shmem_size=4096)
    assert (config.grid, config.block, config.shmem_size) == ((3, 2, 1), (128, 1, 1), 4096)
    assert callable(core.launch)
