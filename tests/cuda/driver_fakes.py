"""The CUDA driver for machines without one: it records its calls, and refuses what a capture forbids."""

import ctypes
import threading
from types import SimpleNamespace

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
LEGACY, PER_THREAD, OWN_STREAM = 1, 2, 77
UNSUPPORTED, IMPLICIT = 900, 906


NAMES = {
    0: "CUDA_SUCCESS",
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    UNSUPPORTED: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    IMPLICIT: "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
}


class Code(int):
    """A CUresult."""

    name = property(lambda self: NAMES[self])


class Capture:
    """What a stream captures: `nodes`, or nothing any more once something unsafe was called."""

    def __init__(self, mode, *, blocking):
        self.mode, self.blocking, self.thread = mode, blocking, threading.get_ident()
        self.nodes, self.invalidated = [], False


class Thread(threading.local):
    """What the driver knows of a thread. Only the first one of a test has a context: that of GPU 0, 1000."""

    context = 0
    mode = GLOBAL

    def __init__(self):
        self.contexts = []


class Recorder:
    """The functions of cuda.bindings.driver and cuda.core that cuda/ uses; `calls` has those with an effect.

    Memory of the GPU is an address in `memory`; it must be zero, and not freed, when a launch gets its address.
    """

    CUresult = SimpleNamespace(
        CUDA_ERROR_OUT_OF_MEMORY=2,
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED=UNSUPPORTED,
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT=IMPLICIT,
    )
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE="memory type")
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="multiprocessors",
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic")
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=RELAXED)
    CU_MEMHOSTALLOC_PORTABLE = 1

    def __init__(self, capability=(9, 0), num_gpus=2):
        self.attributes = {"major": capability[0], "minor": capability[1], "shared": 232448, "multiprocessors": 132}
        self.num_gpus = num_gpus
        self.calls = []
        self.thread = Thread()
        self.thread.context = 1000  # the primary context of GPU 0; that of GPU 1 is 1001
        self.captures = {}
        self.content = b""
        self.fail = {}
        self.next_address = 1 << 20
        self.memory = {}  # address: bytes, and "new", ("zeroed on", stream), "zero" or "freed"
        self.pinned = []
        self.kernels = []  # the entries of loaded ones, by their handles
        self.CUlaunchConfig, self.CUstream, self.CUfunction = SimpleNamespace, int, int

    @property
    def context(self):
        return self.thread.context

    @property
    def contexts(self):
        return self.thread.contexts

    def begin_capture(self, stream, mode=GLOBAL, *, blocking=False):
        assert stream not in (0, LEGACY), "the legacy default stream cannot be captured"
        assert self._named(stream) not in self.captures
        self.captures[self._named(stream)] = Capture(mode, blocking=blocking)

    def end_capture(self, stream):
        """The nodes of the graph."""
        capture = self.captures.pop(self._named(stream))
        assert not capture.invalidated, "something unsafe was called"
        return capture.nodes

    def _named(self, stream):
        """What a handle means: the per-thread stream is that of the current context."""
        return (stream, self.context) if stream == PER_THREAD else stream

    def _effect(self, name, *args, stream=None, unsafe=False, waits=False):
        """Takes note of a call; `stream` is what it goes to, `waits` says that it cannot be captured anyhow."""
        if name in self.fail:
            return Code(self.fail[name])
        if not self.context:
            return Code(201)
        if unsafe and self._prohibited():
            for capture in self.captures.values():
                capture.invalidated = True
            return Code(UNSUPPORTED)
        if stream in (0, LEGACY) and any(capture.blocking for capture in self.captures.values()):
            return Code(IMPLICIT)
        if (capture := self.captures.get(self._named(stream))) is not None:
            if waits:
                capture.invalidated = True
                return Code(UNSUPPORTED)
            capture.nodes.append((name, self.context, *args))
            return Code(0)
        self.calls.append((name, self.context, *args))
        return Code(0)

    def _prohibited(self):
        """Whether this thread may not make calls that a graph would not repeat: cuThreadExchangeStreamCaptureMode."""
        mode, me = self.thread.mode, threading.get_ident()
        own = any(x.thread == me and x.mode != RELAXED for x in self.captures.values())
        other = any(x.thread != me and x.mode == GLOBAL for x in self.captures.values())
        return mode != RELAXED and (own or (mode == GLOBAL and other))

    def cuDeviceGetCount(self):
        return Code(0), self.num_gpus

    def cuDeviceGet(self, ordinal):
        return Code(0), f"gpu {ordinal}"

    def cuDeviceGetAttribute(self, attribute, handle):
        return Code(0), self.attributes[attribute]

    def cuDevicePrimaryCtxRetain(self, handle):
        return Code(0), 1000 + int(handle[-1])

    def cuCtxGetCurrent(self):
        return Code(0), self.context

    def cuCtxPushCurrent(self, context):
        self.contexts.append(self.context)
        self.thread.context = context
        return (Code(0),)

    def cuCtxPopCurrent(self):
        popped, self.thread.context = self.context, self.contexts.pop()
        return Code(0), popped

    def cuThreadExchangeStreamCaptureMode(self, mode):
        before, self.thread.mode = self.thread.mode, mode
        return Code(0), before

    def cuStreamIsCapturing(self, stream):
        if not self.context:
            return Code(201), None
        if stream == LEGACY and any(capture.blocking for capture in self.captures.values()):
            return Code(IMPLICIT), None
        capture = self.captures.get(self._named(stream))
        return Code(0), 0 if capture is None else 1 + capture.invalidated

    def cuStreamCreate(self, flags):
        assert flags == 1
        return Code(self.fail.get("stream", 0 if self.context else 201)), OWN_STREAM

    def cuStreamSynchronize(self, stream):
        code = self._effect("wait for stream", stream, stream=stream, waits=True)
        for address, (nbytes, state) in self.memory.items():
            if not code and state == ("zeroed on", stream):
                self.memory[address] = nbytes, "zero"
        return (code,)

    def cuMemAlloc(self, nbytes):
        code = self._effect("alloc", nbytes, unsafe=True)
        address, self.next_address = self.next_address, self.next_address + nbytes
        if not code:
            self.memory[address] = nbytes, "new"
        return code, address

    def cuMemFree(self, address):
        nbytes, state = self.memory[address]
        assert state != "freed"
        code = self._effect("free", address, unsafe=True)
        if not code:
            self.memory[address] = nbytes, "freed"
        return (code,)

    def cuMemsetD8Async(self, address, value, nbytes, stream):
        self.memory[address] = self.memory[address][0], ("zeroed on", stream)
        return (self._effect("zero", address, value, nbytes, stream, stream=stream),)

    def cuMemHostAlloc(self, nbytes, flags):
        self.pinned.append(ctypes.create_string_buffer(nbytes))
        return self._effect("pin", nbytes, flags, unsafe=True), ctypes.addressof(self.pinned[-1])

    def cuMemcpyHtoDAsync(self, destination, source, nbytes, stream):
        return (self._effect("to device", destination, source, nbytes, stream, stream=stream),)

    def cuMemcpyDtoHAsync(self, destination, source, nbytes, stream):
        return (self._effect("to host", destination, source, nbytes, stream, stream=stream),)

    def cuPointerGetAttribute(self, attribute, address):
        assert attribute == "memory type"
        return Code(0 if address in map(ctypes.addressof, self.pinned) else 1), 1

    def cuEventCreate(self, flags):
        return self._effect("event", flags), "event"

    def cuEventRecord(self, event, stream):
        return (self._effect("record", event, stream, stream=stream),)

    def cuEventSynchronize(self, event):
        return (self._effect("wait for", event),)

    def cuCtxSynchronize(self):
        if self.captures:
            return (Code(UNSUPPORTED),)
        return (self._effect("wait"),)

    def cuMemcpyDtoH(self, destination, source, nbytes):
        ctypes.memmove(destination, self.content.ljust(nbytes, b"\0"), nbytes)
        return (self._effect("read", source, nbytes, stream=LEGACY, unsafe=True),)

    def cuMemsetD8(self, address, value, nbytes):
        self.content = b""
        return (self._effect("set", address, value, nbytes, stream=LEGACY, unsafe=True),)

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        return (self._effect("allow", attribute, value, kernel, device),)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, num_threads, shared_bytes):
        return Code(0 if self.context else 201), 2

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        grid, block = ([getattr(config, f"{of}Dim{axis}") for axis in "XYZ"] for of in ("grid", "block"))
        prepared = tuple(grid), block[0], config.sharedMemBytes
        args = tuple(ctypes.c_int64.from_address(x).value for x in parameters)
        entry = self.kernels[function]
        code = self._effect("launch", f"stream {config.hStream}", prepared, entry, args, stream=config.hStream)
        for address in () if code else self.workspaces_of(args):
            assert self.memory[address][1] == "zero"
        return (code,)

    # cuda.core
    @property
    def Stream(self):
        return SimpleNamespace(from_handle=lambda handle: f"stream {handle}")

    @property
    def ObjectCode(self):
        def from_cubin(cubin, *, name):
            assert not self._effect("load", cubin, name, unsafe=True)
            return SimpleNamespace(get_kernel=self._kernel)

        return SimpleNamespace(from_cubin=from_cubin)

    def _kernel(self, entry):
        self.kernels.append(entry)
        return SimpleNamespace(handle=len(self.kernels) - 1, entry=entry)

    def LaunchConfig(self, *, grid, block, shmem_size):
        return (grid, block, shmem_size)

    def launch(self, stream, config, kernel, *args):
        code = self._effect("launch", stream, config, kernel.entry, args, stream=int(stream.split()[1]))
        assert not code, code.name
        for address in self.workspaces_of(args):
            assert self.memory[address][1] == "zero"

    def workspaces_of(self, args):
        """Which of the arguments of a launch are memory that was allocated here."""
        return {x for x in args if x in self.memory}
