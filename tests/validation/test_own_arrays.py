"""Small arrays on the host are copied before they are validated, since another thread may write to them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv import backends

from ..support.wrong_arguments import HKV, HQ, OPERATIONS, B, fp8

VECTORS = {name: np.ones(HQ, np.float32) for name in ("alibi_slopes", "sinks")}
SCALED = {name: np.ones(HKV, np.float32) for name in ("k_scale", "v_scale")} | fp8() | {"kv_dtype": "fp8_e4m3"}
ROTATING = {name: np.ones((3, 4), np.float32) for name in ("cos", "sin")} | {"positions": np.array([2, 0, 1])}
OPTIONS = {
    "decode_attention": SCALED | VECTORS,
    "prefill_attention": SCALED | VECTORS,
    "write_kv": SCALED | ROTATING,
    "gather_kv": SCALED,
    "copy_blocks": {},
    "swap_blocks": {},
    "apply_rotary": {},
}
# What no element of a small array may be. Any slope and any sink is valid.
INVALID = {"slots": 2**60, "k_scale": np.nan, "v_scale": np.nan, "alibi_slopes": None, "sinks": None}
INVALID |= dict.fromkeys(("block_tables", "block_table", "pairs"), 2**30)
INVALID |= dict.fromkeys(("seq_lens", "query_starts", "positions"), -1)


@pytest.fixture
def received(monkeypatch):
    """A function that makes a call, and returns what its backend gets by the names of the arguments."""

    def receive(operation, arguments):
        calls = []
        note = SimpleNamespace(plan=lambda call, *results: calls.append(call), run=lambda *arrays, is_given: None)
        vars(note).update(dict.fromkeys(OPTIONS, note.plan))
        monkeypatch.setattr(backends, "_backends", {"cpu": note, "emulator": note})
        getattr(pagedkv, operation)(**arguments)
        holders = calls[0], getattr(calls[0], "options", None), getattr(calls[0], "rotation", None)
        return {name: getattr(x, name) for name in arguments for x in holders if hasattr(x, name)}

    return receive


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("backend", ["cpu", "emulator"])
@pytest.mark.parametrize("operation", OPTIONS)
def test_backends_get_copies_of_small_arrays_and_the_large_ones_themselves(received, operation, backend, framework):
    arguments = OPERATIONS[operation]() | OPTIONS[operation]
    view = torch.from_numpy if framework == "torch" else np.asarray
    given = {name: view(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    for name, own in received(operation, given | {"backend": backend}).items():
        x = arguments.get(name)
        if name in INVALID:
            assert not np.shares_memory(own, x), name
            assert own.flags.c_contiguous
            np.testing.assert_array_equal(own, x[tuple(slice(n) for n in own.shape)])
        elif isinstance(own, np.ndarray):
            assert np.shares_memory(own, x), name


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (operation, name)
        for operation, options in OPTIONS.items()
        for name in OPERATIONS[operation]() | options
        if INVALID.get(name) is not None
    ],
)
def test_values_are_validated_in_the_private_copy(received, operation, name):
    """A value stored just before the copy is noticed."""
    arguments = OPERATIONS[operation]() | OPTIONS[operation]
    given = arguments[name] = arguments[name].copy()

    def spoil(frame, event, function):
        if event == "c_call" and function.__name__ == "copy" and "pagedkv" in frame.f_globals["__name__"]:
            x = function.__self__
            given[...] = INVALID[name] if isinstance(x, np.ndarray) and np.shares_memory(x, given) else given

    try:
        sys.setprofile(spoil)
        with pytest.raises((IndexError, ValueError), match=f"^{name} must"):
            received(operation, arguments)
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(("backend", "columns"), [("cpu", 3), ("emulator", 50)])
def test_the_cpu_gets_only_the_columns_of_a_wide_table_that_are_used(received, backend, columns):
    """Kernels in the emulator are chosen by the table's width, as on a device."""
    arguments = OPERATIONS["decode_attention"]() | {"backend": backend}
    wide = np.full((B, 50), -1, np.int32)
    wide[:, :3] = arguments["block_tables"]
    arguments["block_tables"] = wide
    np.testing.assert_array_equal(received("decode_attention", arguments)["block_tables"], wide[:, :columns])
    arguments["seq_lens"] = np.zeros(B, np.int32)
    assert received("decode_attention", arguments)["block_tables"].shape == (B, 0 if backend == "cpu" else 50)
