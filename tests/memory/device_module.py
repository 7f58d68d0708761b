"""Fake devices for mirrored tables."""

import contextlib
from types import ModuleType, SimpleNamespace

import numpy as np


class DeviceModule(ModuleType):
    """A module like CuPy whose device is the host; it counts what is copied to it."""

    def __init__(self):
        super().__init__("cupy")
        self.copied = 0
        self.current = []
        self.is_capturing = False
        stream = SimpleNamespace(is_capturing=lambda: self.is_capturing)
        self.cuda = SimpleNamespace(get_current_stream=lambda: stream)

    class Array(np.ndarray):
        """Takes nothing that was not copied to the device before."""

        device = None

        def __setitem__(self, index, value):
            for part in (index, value):
                assert not isinstance(part, np.ndarray) or isinstance(part, DeviceModule.Array), "not on the device"
            super().__setitem__(index, value)

        def view(self, dtype):
            assert self.flags.c_contiguous, "CuPy views no other array with elements of another size"
            return super().view(dtype)

    def _new(self, x):
        array = x.view(DeviceModule.Array)
        array.device = _Device(self)
        return array

    def empty(self, shape):
        return self._new(np.empty(shape))

    def zeros(self, shape, dtype=float):
        assert self.current, "on whatever device is current"
        return self._new(np.zeros(shape, dtype))

    def asarray(self, x):
        assert self.current, "on whatever device is current"
        self.copied += x.nbytes
        return self._new(x.copy())


class _Device:
    def __init__(self, module):
        self.module = module

    def __enter__(self):
        self.module.current.append(self)

    def __exit__(self, *error):
        self.module.current.pop()


class TorchModule(ModuleType):
    """A module like torch with CUDA: what it is asked to do is done when somebody calls `synchronize`.

    Attributes
    ----------
    num_waits : int
        How often a call has waited for the device, as copies of pageable memory do.
    is_capturing : bool
        Whether the stream of `device`, which is not the current one, is being captured.
    """

    float32 = "float32"
    inference_mode = staticmethod(contextlib.nullcontext)
    int32 = "int32"

    def __init__(self):
        super().__init__("torch")
        self.num_waits, self.is_capturing, self._queue = 0, False, []
        self.device, self.current_device = SimpleNamespace(type="cuda"), None
        self.cuda = SimpleNamespace(device=self._use, is_current_stream_capturing=self._is_captured)

    @contextlib.contextmanager
    def _use(self, device):
        before, self.current_device = self.current_device, device
        yield
        self.current_device = before

    def _is_captured(self):
        return self.is_capturing and self.current_device is self.device

    def run(self, work):
        self._queue.append(work)

    def synchronize(self):
        for work in self._queue:
            work()
        self._queue.clear()

    def wait(self):
        self.num_waits += 1
        self.synchronize()

    def empty(self, size, *, device=None):
        return Tensor(self, np.empty(size), self.device)

    def zeros(self, shape, *, dtype, device):
        return Tensor(self, np.zeros(shape, dtype), device)

    def asarray(self, x, *, device):
        return HostTensor(self, x).to(device)

    def from_numpy(self, x):
        return HostTensor(self, x)


class HostTensor:
    """A tensor on the host, in memory that is pinned or not."""

    def __init__(self, torch, x, *, is_pinned=False):
        self.torch, self.x, self.is_pinned = torch, x, is_pinned

    def pin_memory(self):
        return HostTensor(self.torch, self.x.copy(), is_pinned=True)

    def to(self, device, *, non_blocking=False):
        """As torch does it: a copy that may not block does not, but the driver waits for pageable memory anyhow."""
        sent = Tensor(self.torch, np.empty_like(self.x), device)
        self.torch.run(lambda: np.copyto(sent.x, self.x))
        if not (non_blocking and self.is_pinned):
            self.torch.wait()
        return sent


def takes(index):
    """Whether an index has ids, and so takes rows rather than a view."""
    return any(isinstance(i, Tensor) for i in (index if type(index) is tuple else (index,)))


def contents(index, of=lambda ids: ids):
    """An index with the arrays of its tensors, or what a function makes of those."""
    if type(index) is tuple:
        return tuple(contents(i, of) for i in index)
    return of(index.x) if isinstance(index, Tensor) else index


class Tensor:
    """A tensor on the device; x is what it is once everything has been done."""

    def __init__(self, torch, x, device):
        self.torch, self.x, self.device = torch, x, device

    def __getitem__(self, index):
        if takes(index):  # ids may not have arrived yet, but their number is known
            taken = Tensor(self.torch, np.empty_like(self.x[contents(index, np.zeros_like)]), self.device)
            self.torch.run(lambda: np.copyto(taken.x, self.x[contents(index)]))
            return taken
        return Tensor(self.torch, self.x[index], self.device)

    def __setitem__(self, index, value):
        def store():
            self.x[contents(index)] = value.x

        self.torch.run(store)

    def __iter__(self):
        return (self[i] for i in range(len(self.x)))

    def clone(self):
        copy = Tensor(self.torch, np.empty_like(self.x), self.device)
        self.torch.run(lambda: np.copyto(copy.x, self.x))
        return copy
