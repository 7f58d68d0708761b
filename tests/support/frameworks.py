"""Arrays of CuPy and torch on a GPU, and torch's on the host, on which the emulator runs what a GPU would."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from .problems import FLOATS, as_torch


class Framework(NamedTuple):
    """How arrays get to a device and back, a stream other than the default one, and options of every call."""

    name: str
    send: Callable[..., Any]
    fetch: Callable[..., np.ndarray]
    stream: Callable[[], Any]
    options: dict[str, Any]


def _from_torch(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.cpu().view(torch.int16).numpy().view(FLOATS["bfloat16"])
    return x.cpu().numpy()


def host_frame():
    return Framework("host", as_torch, _from_torch, nullcontext, {"backend": "emulator"})


def torch_frame():
    return Framework(
        *("torch", lambda x: as_torch(x).cuda(), _from_torch),
        *(lambda: torch.cuda.stream(torch.cuda.Stream()), {}),
    )


def cupy_frame():
    cupy = pytest.importorskip("cupy")
    return Framework("cupy", cupy.asarray, cupy.asnumpy, lambda: cupy.cuda.Stream(non_blocking=True), {})


FRAMES = {"host": host_frame, "cupy": cupy_frame, "torch": torch_frame}


def sent(framework: Framework, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a problem, their arrays on the device."""
    return {name: framework.send(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def capture(framework: Framework, call: Callable[[], Any], num_warmups: int) -> Callable[[], Any]:
    """A function that replays the call, which runs that often before, on another stream than that of the capture."""
    if framework.name == "host":  # no graphs, but the call is the same
        return call
    if framework.name == "cupy":
        return _capture_by_cupy(call, num_warmups)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(num_warmups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()
    return lambda: (graph.replay(), torch.cuda.synchronize())


def _capture_by_cupy(call: Callable[[], Any], num_warmups: int) -> Callable[[], Any]:
    cupy = pytest.importorskip("cupy")
    own = cupy.cuda.get_current_stream()
    for _ in range(num_warmups):
        call()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()

    def replay():
        stream.wait_event(own.record())  # what the call reads was written there
        graph.launch(stream)
        stream.synchronize()

    return replay
