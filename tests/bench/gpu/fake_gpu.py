"""A fake GPU for the benches: arrays on the host, and a clock that moves only on demand."""

import numpy as np
import torch

from ...support.problems import as_torch

COLD_MS, COPY_MS, READ_MS, EMPTY_MS = 100.0, 2.0, 0.8, 0.002


class FakeGpu:
    """`device.Gpu` with NumPy arrays, or with torch's CPU tensors if the framework is "torch".

    `trace` names what was asked for, in order; `host_is_slow` is whether events have passed when they are asked.
    """

    num_multiprocessors = 4

    def __init__(self, framework="numpy", copy_bytes=10**9, host_is_slow=False):
        self.framework, self.copy_bytes, self.host_is_slow = framework, copy_bytes, host_is_slow
        self.facts = {"device": "fake"}
        self.clock, self.trace, self.released = 0.0, [], 0

    def subject(self, name, milliseconds, result=None):
        """A call that takes some time."""

        def call():
            self.trace.append(name)
            self.clock += milliseconds
            return result

        return call

    def array(self, x):
        return as_torch(x) if self.framework == "torch" else x.copy()

    def arranged(self, x, axes):
        if self.framework == "torch":
            return x.permute(axes).contiguous()
        return np.ascontiguousarray(x.transpose(axes))

    def numpy(self, x):
        return x.float().numpy() if isinstance(x, torch.Tensor) else x.astype(np.float32)

    def record(self):
        self.trace.append("event")
        return self.clock

    def passed(self, event):
        return self.host_is_slow

    def milliseconds(self, start, stop):
        return stop - start

    def flush(self):
        self.trace.append("flush")
        self.clock += COLD_MS

    def copy(self):
        self.trace.append("copy")
        self.clock += COPY_MS

    def read(self, num_bytes, turns=1):
        self.trace.append("read" if num_bytes else "empty launch")
        self.clock += EMPTY_MS + READ_MS * num_bytes / self.copy_bytes

    def capture(self, call, times):
        return lambda: [call() for _ in range(times)]

    def synchronize(self):
        self.trace.append("wait")

    def release(self):
        self.released += 1


def taking(milliseconds, name="peer"):
    """A subject whose compared rows are right, and which takes some time."""

    def subject(problem):
        result = problem.host.q.astype(np.float32)
        result[problem.host.checked] = problem.host.expected
        return problem.gpu.subject(name, milliseconds, result)

    return subject
