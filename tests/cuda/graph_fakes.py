"""Streams and graphs of torch and CuPy, as their sources have them, on the driver that records its calls."""

import contextlib
import itertools

from ..support.device_fakes import fake_cupy, fake_torch
from .driver_fakes import GLOBAL, RELAXED

_handles = itertools.count(100)


class Graph:
    """What has been captured."""

    def __init__(self, recorder):
        self.recorder, self.nodes = recorder, []

    def replay(self):
        """Launches the nodes; their memory is still there."""
        for node in self.nodes:
            assert node[0] == "launch", "a replay allocates, fills and copies nothing"
            assert not any(self.recorder.memory[x][1] == "freed" for x in self.workspaces)
            self.recorder.calls.append(node)

    @property
    def workspaces(self):
        return {x for node in self.nodes for x in self.recorder.workspaces_of(node[-1])}


def torch_with_graphs(recorder):
    """The fake of torch, with torch.cuda.Stream, stream, CUDAGraph, graph and make_graphed_callables."""
    torch = fake_torch()
    torch.streams[0] = 0
    default_capture_stream = next(_handles)

    @contextlib.contextmanager
    def stream(handle):
        before, torch.streams[0] = torch.streams[0], handle
        yield
        torch.streams[0] = before

    @contextlib.contextmanager
    def graph(made, stream=None, capture_error_mode=GLOBAL):
        handle = stream or default_capture_stream
        recorder.cuCtxSynchronize()
        with torch.cuda.stream(handle):
            recorder.begin_capture(handle, capture_error_mode)
            yield
            made.nodes = recorder.end_capture(handle)

    def make_graphed_callables(function, arguments, num_warmup_iters=3):
        handle, made = next(_handles), Graph(recorder)
        with torch.cuda.stream(handle):
            for _ in range(num_warmup_iters):
                function(*arguments)
        with torch.cuda.graph(made, stream=handle):
            function(*arguments)
        return made

    vars(torch.cuda).update(
        Stream=lambda: next(_handles),
        stream=stream,
        CUDAGraph=lambda: Graph(recorder),
        graph=graph,
        make_graphed_callables=make_graphed_callables,
    )
    return torch


def cupy_with_graphs(recorder):
    """The fake of CuPy, with cupy.cuda.Stream, begin_capture (relaxed unless told otherwise) and end_capture."""
    cupy = fake_cupy()

    class Stream:
        def __init__(self, *, non_blocking=False):
            self.ptr, self.blocking = next(_handles), not non_blocking

        def __enter__(self):
            self.before, cupy.streams[0] = cupy.streams.get(0, 0), self.ptr
            return self

        def __exit__(self, *error):
            cupy.streams[0] = self.before

        def begin_capture(self, mode=RELAXED):
            recorder.begin_capture(self.ptr, mode, blocking=self.blocking)

        def end_capture(self):
            made = Graph(recorder)
            made.nodes = recorder.end_capture(self.ptr)
            return made

    cupy.cuda.Stream = Stream
    return cupy
