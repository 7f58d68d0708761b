"""The CUDA driver for machines without one: it records its calls."""

import ctypes
from types import SimpleNamespace


class Code(int):
    """A CUresult."""

    name = property(
        lambda self: {0: "CUDA_SUCCESS", 1: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY"}[self]
    )


class Recorder:
    """The functions of cuda.bindings.driver and cuda.core that driver.py uses; `calls` has those with an effect."""

    CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2)
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE="memory type")
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared",
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic")
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)
    CU_MEMHOSTALLOC_PORTABLE = 1

    def __init__(self, capability=(9, 0), num_gpus=2):
        self.attributes = {"major": capability[0], "minor": capability[1], "shared": 232448}
        self.num_gpus = num_gpus
        self.calls = []
        self.context = 1000  # the primary context of GPU 0; that of GPU 1 is 1001
        self.contexts = []
        self.capturing = False
        self.content = b""
        self.fail = {}
        self.next_address = 1 << 20
        self.pinned = []

    def _effect(self, name, *args):
        if name in self.fail:
            return Code(self.fail[name])
        self.calls.append((name, self.context, *args))
        return Code(0)

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
        self.context = context
        return (Code(0),)

    def cuCtxPopCurrent(self):
        popped, self.context = self.context, self.contexts.pop()
        return Code(0), popped

    def cuStreamIsCapturing(self, stream):
        return Code(0), int(self.capturing is True or self.capturing == stream)

    def cuMemAlloc(self, nbytes):
        code = self._effect("alloc", nbytes)
        self.next_address += nbytes
        return code, self.next_address - nbytes

    def cuMemsetD8Async(self, address, value, nbytes, stream):
        return (self._effect("zero", address, value, nbytes, stream),)

    def cuMemHostAlloc(self, nbytes, flags):
        self.pinned.append(ctypes.create_string_buffer(nbytes))
        return self._effect("pin", nbytes, flags), ctypes.addressof(self.pinned[-1])

    def cuMemcpyHtoDAsync(self, destination, source, nbytes, stream):
        return (self._effect("to device", destination, source, nbytes, stream),)

    def cuMemcpyDtoHAsync(self, destination, source, nbytes, stream):
        return (self._effect("to host", destination, source, nbytes, stream),)

    def cuPointerGetAttribute(self, attribute, address):
        assert attribute == "memory type"
        return Code(0 if address in map(ctypes.addressof, self.pinned) else 1), 1

    def cuEventCreate(self, flags):
        return self._effect("event", flags), "event"

    def cuEventRecord(self, event, stream):
        return (self._effect("record", event, stream),)

    def cuEventSynchronize(self, event):
        return (self._effect("wait for", event),)

    def cuCtxSynchronize(self):
        return (self._effect("wait"),)

    def cuMemcpyDtoH(self, destination, source, nbytes):
        ctypes.memmove(destination, self.content.ljust(nbytes, b"\0"), nbytes)
        return (self._effect("read", source, nbytes),)

    def cuMemsetD8(self, address, value, nbytes):
        self.content = b""
        return (self._effect("set", address, value, nbytes),)

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        return (self._effect("allow", attribute, value, kernel, device),)

    # cuda.core
    @property
    def Stream(self):
        return SimpleNamespace(from_handle=lambda handle: f"stream {handle}")

    @property
    def ObjectCode(self):
        def from_cubin(cubin, *, name):
            self.calls.append(("load", self.context, cubin, name))
            return SimpleNamespace(get_kernel=lambda entry: SimpleNamespace(handle=f"handle of {entry}", entry=entry))

        return SimpleNamespace(from_cubin=from_cubin)

    def LaunchConfig(self, *, grid, block, shmem_size):
        return (grid, block, shmem_size)

    def launch(self, stream, config, kernel, *args):
        self.calls.append(("launch", self.context, stream, config, kernel.entry, args))
