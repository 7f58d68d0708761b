"""Device arrays for machines without a GPU: they say where they are, and there is nothing there."""

import contextlib
import ctypes
import itertools
import threading
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch

import pagedkv.compiler.compile as compiling
from pagedkv.arrays.torch_tensor import numpy_dtype
from pagedkv.compiler.link import Linked
from pagedkv.errors import BackendUnavailableError

# Added to addresses of the host, it makes ones that no process has: who follows them dies.
ELSEWHERE = 1 << 60
NO_DRIVER = "there is no driver in this test"


def address_of(x):
    return x.__array_interface__["data"][0]


class InterfaceArray:
    """An array of a framework that nobody knows, on a device: shape, strides, dtype and flags of a NumPy array."""

    def __init__(self, x, stream=None, **changes):
        interface = x.__array_interface__
        address = address_of(x) + ELSEWHERE if x.size else 0
        self.changes = {"data": (address, not x.flags.writeable), "stream": stream, **changes}
        self.interface = {"shape": x.shape, "typestr": x.dtype.str, "strides": interface["strides"], "version": 3}
        self.dtype, self.shape = x.dtype, x.shape

    @property
    def __cuda_array_interface__(self):
        return self.interface | self.changes

    @classmethod
    def of(cls, x):
        """Arrays, also those in lists, as device arrays; everything else as it is."""
        if isinstance(x, (list, tuple)):
            return type(x)(map(cls.of, x))
        return cls(x) if isinstance(x, np.ndarray) else x


@contextlib.contextmanager
def no_driver():
    """As on a machine without a GPU, whatever is here."""

    def cuda_device(ordinal, stream):
        raise BackendUnavailableError(NO_DRIVER)

    with mock.patch("pagedkv.cuda.driver.cuda_device", cuda_device):
        yield


@contextlib.contextmanager
def without_code():
    """Kernels have names and threads but no code, for devices that run none: none is compiled, found or kept."""

    def make_ptx(make, config, *_):
        source = make(config)
        return "", source.num_threads

    with (
        mock.patch.object(compiling, "_make_ptx", make_ptx),
        mock.patch.object(compiling, "load_or_link", lambda ptx, capability, *_: Linked(capability, b"", "")),
        mock.patch.object(compiling, "cache_dir", return_value=None),
        mock.patch.object(compiling._load_or_compile, "made", {}),
    ):
        yield


class RecordingDevice:
    """A device with an H100's limits that records launches, as (kernel, grid, args, shared_bytes), and starts none."""

    capability = (9, 0)
    max_shared_bytes = 227 * 1024
    lineinfo = False
    num_blocks_at_once = 2 * 132

    def __init__(self):
        self.launches = []
        self._workspaces = {}
        self.epoch = 0
        self.lock = threading.RLock()

    def address(self, name, array):
        """The address in a shadow."""
        return address_of(array)

    def scratch(self, name, nbytes):
        """An address for each name, without memory behind it."""
        return self._workspaces.setdefault(name, (len(self._workspaces) + 1) << 40)

    def blocks_at_once(self, kernel, shared_bytes):
        return self.num_blocks_at_once

    def launch(self, kernel, grid, args, shared_bytes=0):
        self.launches.append((kernel, grid, tuple(args), shared_bytes))

    def prepare_all(self, launches):
        return launches

    def start(self, prepared, is_ready):
        for kernel, grid, shared_bytes, parameters in prepared:
            self.launch(kernel, grid, [ctypes.c_int64.from_address(x).value for x in parameters], shared_bytes)


@contextlib.contextmanager
def recording(kind=RecordingDevice):
    """A driver that launches nothing, of kernels without code: yields its devices by (ordinal, stream)."""
    devices = {}

    def cuda_device(ordinal, stream):
        if (ordinal, stream) not in devices:
            devices[ordinal, stream] = kind()
        return devices[ordinal, stream]

    with mock.patch("pagedkv.cuda.driver.cuda_device", cuda_device), without_code():
        yield devices


_new_addresses = itertools.count(ELSEWHERE, 1 << 32)


def fake_cupy():
    """A module like CuPy, as far as pagedkv looks at it; `streams` says which stream is current on a device."""
    cupy = ModuleType("cupy")
    cupy.streams = {}
    cupy.device_stack = []

    class Device:
        def __init__(self, ordinal):
            self.id = ordinal

        def __enter__(self):
            cupy.device_stack.append(self.id)

        def __exit__(self, *error):
            cupy.device_stack.pop()

    class ndarray:
        def __init__(self, x, device=0, address=None):
            self.shape, self.strides, self.dtype = x.shape, x.strides, x.dtype
            self.data = SimpleNamespace(ptr=address or address_of(x) + ELSEWHERE, device_id=device)
            self.device = Device(device)

        @property
        def __cuda_array_interface__(self):
            raise AssertionError("a CuPy array says more by its attributes, and faster")

    def empty(shape, dtype):
        device = cupy.device_stack[-1] if cupy.device_stack else 0
        return ndarray(np.empty(shape, dtype), device, next(_new_addresses))

    def get_current_stream(device=0):
        return SimpleNamespace(ptr=cupy.streams.get(device, 0))

    cupy.ndarray, cupy.empty = ndarray, empty
    cupy.cuda = SimpleNamespace(get_current_stream=get_current_stream)
    return cupy


def fake_torch():
    """A module like torch with CUDA, as far as pagedkv looks at it; its dtypes and devices are torch's."""
    fake = ModuleType("torch")
    fake.streams = {}

    class Tensor:
        is_cuda, is_cpu = True, False
        layout = torch.strided
        requires_grad = False
        negated = False

        def __init__(self, x, device=0, address=None):
            self.address = address or address_of(x) + ELSEWHERE
            self.shape, self.strides = torch.Size(x.shape), tuple(n // x.itemsize for n in x.strides)
            self.dtype, self.device = getattr(torch, x.dtype.name), torch.device("cuda", device)

        def data_ptr(self):
            return self.address

        def stride(self):
            return self.strides

        def is_neg(self):
            return self.negated

        def is_conj(self):
            return False

    def empty(shape, *, dtype, device):
        return Tensor(np.empty(shape, numpy_dtype(dtype)), device.index, next(_new_addresses))

    def current_stream(device=None):
        return SimpleNamespace(cuda_stream=fake.streams.get(device.index if device else 0, 0))

    fake.Tensor, fake.empty = Tensor, empty
    for name in ("float32", "float16", "bfloat16"):
        setattr(fake, name, getattr(torch, name))
    fake._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: fake.streams.get(index, 0))
    fake.cuda = SimpleNamespace(current_stream=current_stream, is_initialized=lambda: bool(fake.streams))
    return fake
