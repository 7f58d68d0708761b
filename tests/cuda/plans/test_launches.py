"""The kernels of a prefill each fill rows of their own: all of them are launched or none."""

import sys

import pytest

from ...support.device_fakes import InterfaceArray
from ..test_graphs import prefill_of

NUM_KERNELS = 4  # a check, the kernel of many rows, the one of few, and the one that merges their states


def launched(cuda):
    return [call for call in cuda.calls if call[0] == "launch"]


@pytest.mark.parametrize("failing_load", [2, 3])
def test_a_kernel_that_cannot_be_loaded_leaves_nothing_launched(cuda, monkeypatch, failing_load):
    prefill, load, loads = prefill_of(InterfaceArray, 64), cuda.ObjectCode.from_cubin, []

    def from_cubin(*args, **kwargs):
        loads.append(args)
        if len(loads) == failing_load:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
        return load(*args, **kwargs)

    monkeypatch.setattr(type(cuda), "ObjectCode", type("ObjectCode", (), {"from_cubin": staticmethod(from_cubin)}))
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        prefill.call()
    assert launched(cuda) == []
    prefill.call()
    assert len(launched(cuda)) == NUM_KERNELS


@pytest.mark.parametrize("calls_before", [0, 1])
def test_no_step_of_python_where_an_interrupt_could_come_is_between_the_launches(cuda, calls_before):
    prefill, steps = prefill_of(InterfaceArray, 64), []
    for _ in range(calls_before):  # the next one is a known call
        prefill.call()
    before = len(launched(cuda))

    def trace(frame, event, _):
        if frame.f_globals.get("__name__", "").startswith("pagedkv."):
            frame.f_trace_opcodes = True
            steps.append(len(launched(cuda)) - before)
            return trace
        return None

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        prefill.call()
    finally:
        sys.settrace(outer)
    assert len(launched(cuda)) - before == NUM_KERNELS
    assert set(steps) == {0, NUM_KERNELS}
