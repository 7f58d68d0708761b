"""A device without a GPU, for tables that are mirrored to one."""

from types import ModuleType

import numpy as np


class DeviceModule(ModuleType):
    """A module like CuPy whose device is the host; it counts what is copied to it."""

    def __init__(self):
        super().__init__("cupy")
        self.copied = 0
        self.current = []

    class Array(np.ndarray):
        """Takes nothing that was not copied to the device before."""

        device = None

        def __setitem__(self, index, value):
            for part in (index, value):
                assert not isinstance(part, np.ndarray) or isinstance(part, DeviceModule.Array), "not on the device"
            super().__setitem__(index, value)

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
