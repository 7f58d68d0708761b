"""How much Python a repeated call runs before its launches: a measure of host time that no other program disturbs."""

import sys

import numpy as np
import pytest

import pagedkv

from .device_calls import HKV, D, N, P, host_arguments

pytestmark = pytest.mark.usefixtures("nothing_planned", "devices")


def work_of(call):
    """Bytecode instructions of the package that a call runs, and the calls in them, of C too; the device's not."""
    instructions, calls = 0, 0

    def is_own(frame):
        return frame.f_globals.get("__name__", "").startswith("pagedkv.")

    def trace(frame, event, _):
        nonlocal instructions
        if not is_own(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        instructions += event == "opcode"
        return trace

    def profile(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call") and is_own(frame)

    outer, outer_profile = sys.gettrace(), sys.getprofile()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 has opcodes traced from the next settrace on
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(outer_profile)
        sys.settrace(outer)
    return instructions, calls


# Of Python 3.11, whose instructions are the shortest: 1241 to 1318 with an interface, 989 to 1066 and 1054 to 1125.
MOST_WORK = {"interface": (1345, 53), "cupy": (1090, 32), "torch": (1150, 32)}


@pytest.mark.parametrize("kernel", ["v1", "v2", "split"])
def test_a_repeated_call_is_little_work_for_the_host(request, kind, kernel):
    first = host_arguments() | {"layout": "NHD" if kernel == "split" else "vllm", "kernel": kernel}
    if kernel == "split":
        first |= {name: np.zeros((N, P, HKV, D), np.float16) for name in ("k_cache", "v_cache")}
    given = {name: kind(x) if isinstance(x, np.ndarray) else x for name, x in first.items()}
    pagedkv.decode_attention(**given)
    work = work_of(lambda: pagedkv.decode_attention(**given))
    assert work == work_of(lambda: pagedkv.decode_attention(**given))
    most_instructions, most_calls = MOST_WORK[request.node.callspec.params["kind"]]
    assert 400 < work[0] <= most_instructions
    assert 10 < work[1] <= most_calls
