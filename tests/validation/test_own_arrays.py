"""What validation has checked is what kernels read: small arrays of the host are copied before anyone looks at them."""

import inspect

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.calls import AttentionArguments
from pagedkv.validation.attention import attention_call
from pagedkv.validation.caches import copy_call, gather_call, swap_call, write_call
from pagedkv.validation.rotary import rotary_call

from ..support.wrong_arguments import HKV, HQ, OPERATIONS, fp8

VECTORS = {name: np.ones(HQ, np.float32) for name in ("alibi_slopes", "sinks")}
SCALES = {name: np.ones(HKV, np.float32) for name in ("k_scale", "v_scale")} | fp8() | {"kv_dtype": "fp8_e4m3"}
TABLES = {name: np.ones((3, 4), np.float32) for name in ("cos", "sin")} | {"positions": np.array([2, 0, 1])}
CASES = {
    "decode_attention": (attention_call, VECTORS | SCALES, ("block_tables", "seq_lens")),
    "prefill_attention": (attention_call, VECTORS | SCALES, ("block_tables", "seq_lens", "query_starts")),
    "write_kv": (write_call, SCALES | TABLES, ("slots", "positions")),
    "gather_kv": (gather_call, SCALES, ("block_table",)),
    "copy_blocks": (copy_call, {}, ("pairs",)),
    "swap_blocks": (swap_call, {}, ("pairs",)),
    "apply_rotary": (rotary_call, {}, ("positions",)),
}
NAMES = [name for name in OPERATIONS if name in CASES]


def arguments_of(operation, backend):
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(getattr(pagedkv, operation)).parameters.items()
        if parameter.default is not parameter.empty
    }
    return defaults | OPERATIONS[operation]() | CASES[operation][1] | {"backend": backend}


def validated(operation, arguments):
    """The call, and what it holds by the names of the arguments."""
    call = CASES[operation][0]
    if call is attention_call:
        result = call(AttentionArguments(**arguments, ragged="query_starts" in arguments))
    else:
        result = call(**arguments)
    holders = result, getattr(result, "options", None), getattr(result, "rotation", None)
    return {name: next((getattr(x, name) for x in holders if hasattr(x, name)), None) for name in arguments}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("backend", ["auto", "emulator"])
@pytest.mark.parametrize("operation", NAMES)
def test_small_arrays_are_the_calls_own(operation, backend, framework):
    arguments = arguments_of(operation, backend)
    _, options, names = CASES[operation]
    small = (*names, *(name for name, x in options.items() if isinstance(x, np.ndarray) and x.ndim == 1))
    given = dict(arguments)
    if framework == "torch":
        given |= {name: torch.from_numpy(x) for name, x in arguments.items() if isinstance(x, np.ndarray)}
    checked = validated(operation, given)
    for name in small:
        own, x = checked[name], arguments[name]
        assert not np.shares_memory(own, x), name
        assert own.flags.c_contiguous
        np.testing.assert_array_equal(own, x[tuple(slice(n) for n in own.shape)])
    for name in ("q", "k_cache", "v_cache", "k", "v", "source"):
        if isinstance(checked.get(name), np.ndarray):
            assert np.shares_memory(checked[name], arguments[name])


@pytest.mark.parametrize(("backend", "columns"), [("cpu", 3), ("emulator", 50)])
def test_of_a_wide_table_the_cpu_takes_the_used_columns(backend, columns):
    """Kernels in the emulator are chosen by the table's width, as on a device."""
    arguments = arguments_of("decode_attention", backend)
    wide = np.full((3, 50), -1, np.int32)
    wide[:, :3] = arguments["block_tables"]
    arguments["block_tables"] = wide
    checked = validated("decode_attention", arguments)
    np.testing.assert_array_equal(checked["block_tables"], wide[:, :columns])
    arguments["seq_lens"] = np.zeros(3, np.int32)
    assert validated("decode_attention", arguments)["block_tables"].shape == (3, 0 if backend == "cpu" else 50)
