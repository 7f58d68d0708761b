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


# Of Python 3.11, whose instructions are the shortest: a call takes 1241 to 1318 with an interface, 989 to 1066 and 1054
# to 1125; a run of a plan 590 to 602, 488 to 500 and 486 to 504.
MOST_WORK = {"interface": (1345, 53), "cupy": (1090, 32), "torch": (1150, 32)}
MOST_PLANNED = {"interface": (615, 32), "cupy": (510, 23), "torch": (515, 22)}


def given_of(kind, kernel):
    first = host_arguments() | {"layout": "NHD" if kernel == "split" else "vllm", "kernel": kernel}
    if kernel == "split":
        first |= {name: np.zeros((N, P, HKV, D), np.float16) for name in ("k_cache", "v_cache")}
    return {name: kind(x) if isinstance(x, np.ndarray) else x for name, x in first.items()}


def assert_little(call, most):
    """What it takes is the same each time, and at most so many instructions and calls."""
    call()
    work = work_of(call)
    assert work == work_of(call)
    assert all(limit / 3 < count <= limit for count, limit in zip(work, most, strict=True)), work


@pytest.mark.parametrize("kernel", ["v1", "v2", "split"])
def test_a_repeated_call_is_little_work_for_the_host(request, kind, kernel):
    given = given_of(kind, kernel)
    assert_little(lambda: pagedkv.decode_attention(**given), MOST_WORK[request.node.callspec.params["kind"]])


@pytest.mark.parametrize("kernel", ["v1", "v2", "split"])
def test_a_run_of_a_plan_is_less(request, kind, kernel):
    given = given_of(kind, kernel)
    out = given.pop("out")
    plan, brought = pagedkv.plan_decode(**given), [given[name] for name in ("q", "k_cache", "v_cache")]
    assert_little(lambda: plan.run(*brought, out=out), MOST_PLANNED[request.node.callspec.params["kind"]])
