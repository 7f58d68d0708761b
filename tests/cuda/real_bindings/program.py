"""Calls on device arrays, with cuda.bindings and cuda.core as they are over libcuda.c; launches go to the emulator."""

import ctypes
import re
import struct
import threading
import traceback

import numpy as np
import pytest

import pagedkv
from pagedkv.cuda import driver, gpu
from pagedkv.emulator import EmulatorDevice

LIBCUDA = ctypes.CDLL("libcuda.so.1")
LIBCUDA.fake_capture.argtypes = [ctypes.c_size_t]
LEGACY, PER_THREAD, OWN, CAPTURED = 1, 2, 0x100, 0x200


class Config(ctypes.Structure):
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint)),
    )


KERNELS = {}  # by the address that the driver gave
MEMORY = []  # arrays that play memory of the GPU
STREAMS = []  # of the launches


class KnownGpu(gpu.Gpu):
    """Says which kernel an address is."""

    def kernel(self, compiled, shared_bytes):
        kernel = super().kernel(compiled, shared_bytes)
        KERNELS[int(kernel.handle)] = compiled
        return kernel


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Config), ctypes.POINTER(ctypes.c_void_p))
def launch(address, config, arguments):
    """Run a kernel on the arguments that the driver got; a code that is not 0 is cuda.core's exception."""
    try:
        kernel, config = KERNELS[address], config.contents
        assert tuple(config.block) == (kernel.num_threads, 1, 1)
        STREAMS.append(config.stream)
        parameters = kernel.ptx.partition(f".entry {kernel.entry}(")[2].partition(")")[0]
        formats = ["d" if kind == "f64" else "q" for kind in re.findall(r"\.param \.(\w+)", parameters)]
        given = [struct.unpack(kind, ctypes.string_at(arguments[i], 8))[0] for i, kind in enumerate(formats)]
        with EmulatorDevice(init_check=False) as device:
            args = [known(device, x) if isinstance(x, int) else x for x in given]
            device.launch(kernel, tuple(config.grid), args, config.shared_bytes)
    except BaseException:
        traceback.print_exc()
        return 999
    return 0


def known(device, x):
    """An argument, or where the emulator has what it is the address of."""
    workspaces = [pair for own in driver.cuda_devices() for pair in own._workspaces.values()]
    for first, nbytes in [(each.ctypes.data, each.nbytes) for each in MEMORY] + workspaces:
        if first <= x < first + nbytes:
            whole = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(first))
            return device.address("memory", whole) + x - first
    return x


class OnGpu:
    """A copy of a NumPy array, in the memory of the GPU."""

    def __init__(self, x, stream=OWN):
        self.x, self.stream = x.copy(), stream
        MEMORY.append(self.x)

    @property
    def __cuda_array_interface__(self):
        interface = {key: self.x.__array_interface__[key] for key in ("shape", "typestr", "data")}
        return interface | {"version": 3, "stream": self.stream}


rng = np.random.default_rng(0)
TABLES, LENS = rng.permutation(20)[:16].reshape(2, 8).astype(np.int32), np.array([100, 33], np.int32)


def normal(*shape, dtype=np.float32):
    return rng.standard_normal(shape, np.float32).astype(dtype)


def attend(operation, q, caches, *more, stream=OWN, tables=TABLES, **options):
    """Call an operation, compare it with the oracle, and say which stream its launch was on."""
    arguments = q, *caches, tables, LENS, *more
    given, out = [OnGpu(x, stream) for x in arguments], OnGpu(np.zeros_like(q), stream)
    for _ in range(2):  # the second is a known call
        out.x[...] = 0
        getattr(pagedkv, operation)(*given, out=out, **options)
        if tables is TABLES:
            expected = getattr(pagedkv.reference, operation)(*arguments, **options)
            np.testing.assert_allclose(out.x, expected, rtol=2e-3, atol=2e-3)
    return STREAMS[-1]


def attention():
    q, caches = normal(2, 8, 64), normal(2, 20, 16, 2, 64)
    for stream in (LEGACY, PER_THREAD, OWN):
        assert attend("decode_attention", q, caches, stream=stream) == stream
    q, caches = normal(20, 8, 64, dtype=np.float16), normal(2, 20, 16, 2, 64, dtype=np.float16)
    attend("prefill_attention", q, caches, np.array([0, 5, 20], np.int32))
    assert any(kernel.entry == "pagedkv_prefill" for kernel in KERNELS.values())


def copies():
    given, host = normal(2, 20, 16, 2, 64), np.zeros((2, 20, 16, 2, 64), np.float32)
    caches = [OnGpu(x) for x in given]
    pagedkv.swap_blocks(caches, list(host), np.array([[0, 1], [5, 2]]))
    pagedkv.swap_blocks(list(host), caches, np.array([[1, 7]]))
    for cache, x, y in zip(caches, given, host, strict=True):
        assert (y[1] == x[0]).all()
        assert (y[2] == x[5]).all()
        assert (cache.x[7] == x[0]).all()


def bad_entries():
    wrong = TABLES.copy()
    wrong[1, 2] = 10**6
    attend("decode_attention", normal(2, 8, 64), normal(2, 20, 16, 2, 64), tables=wrong, check=True)
    raised = []

    def ask():
        try:
            pagedkv.raise_if_failed()
        except IndexError as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask)  # that has no current context
    thread.start()
    thread.join()
    assert raised == ["block_tables must hold block ids in 0..num_blocks-1, got 1000000 for sequence 1, column 2"]
    pagedkv.raise_if_failed()


def graphs():
    held = pagedkv.workspace_bytes()
    assert 0 < pagedkv.release_workspaces() <= held
    LIBCUDA.fake_capture(CAPTURED)
    caches = normal(2, 20, 16, 2, 64)
    assert attend("decode_attention", normal(2, 8, 64), caches, stream=CAPTURED) == CAPTURED
    with pytest.raises(RuntimeError, match="is being captured"):
        pagedkv.swap_blocks([OnGpu(x, CAPTURED) for x in caches], list(np.zeros_like(caches)), np.array([[0, 1]]))
    LIBCUDA.fake_capture(0)


def within_the_context():
    """As in a thread of torch: the primary context is current, and known to be."""
    own = driver._gpu(0)
    with own.current():
        assert own.driver.cuCtxGetCurrent()[1] == own.context
        attend("decode_attention", normal(2, 8, 64), normal(2, 20, 16, 2, 64))


if __name__ == "__main__":
    LIBCUDA.fake_on_launch(launch)
    driver.Gpu = KnownGpu
    for part in (attention, copies, bad_entries, graphs, within_the_context):
        part()
        print(part.__name__, "done")
