"""Valid arguments of every operation, ways to spoil them, and the check that a spoilt call fails cleanly."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import pagedkv

from .device_fakes import NO_DRIVER, InterfaceArray, no_driver

B, HQ, HKV, D, P, N, M = 3, 4, 2, 16, 4, 8, 3  # M is max_blocks
BF16 = ml_dtypes.bfloat16
NHD = "(num_blocks, block_size, num_kv_heads, head_dim)"


def attention_arguments() -> dict[str, Any]:
    return {
        "q": np.zeros((B, HQ, D), np.float32),
        "k_cache": np.zeros((N, P, HKV, D), np.float32),
        "v_cache": np.ones((N, P, HKV, D), np.float32),  # so that rows of out that are written can be told
        "block_tables": np.array([[0, 1, 2], [3, 4, -1], [-1, -1, 2**31 - 1]], np.int32),
        "seq_lens": np.array([12, 5, 0], np.int32),
    }


def ragged_arguments() -> dict[str, Any]:
    arguments = attention_arguments()
    return arguments | {"q": np.zeros((9, HQ, D), np.float32), "query_starts": np.array([0, 5, 7, 7], np.int32)}


def write_arguments() -> dict[str, Any]:
    return {
        "k": np.ones((3, HKV, D), np.float32),
        "v": np.ones((3, HKV, D), np.float32),
        "k_cache": np.zeros((N, P, HKV, D), np.float32),
        "v_cache": np.zeros((N, P, HKV, D), np.float32),
        "slots": np.array([31, -1, 0]),
    }


def gather_arguments() -> dict[str, Any]:
    arguments = attention_arguments()
    table = np.array([3, 4, -1], np.int32)
    return {"k_cache": arguments["k_cache"], "v_cache": arguments["v_cache"], "block_table": table, "seq_len": 5}


def copy_arguments() -> dict[str, Any]:
    blocks = np.arange(N, dtype=np.float32)[:, None, None, None]
    caches = {name: np.tile(blocks, (1, P, HKV, D)) for name in ("k_cache", "v_cache")}
    return caches | {"pairs": np.array([[0, 1], [0, 2], [3, 4]])}


def swap_arguments() -> dict[str, Any]:
    return {
        "source": np.ones((N, P, HKV, D), np.float32),
        "destination": np.zeros((2 * N, P, HKV, D), np.float32),
        "pairs": np.array([[0, 1], [1, 0], [0, 15]]),
    }


def merge_arguments() -> dict[str, Any]:
    return {"outs": np.zeros((2, B, HQ, D), np.float32), "lses": np.zeros((2, B, HQ), np.float32)}


def rotary_arguments() -> dict[str, Any]:
    return {
        "q": np.ones((B, HQ, D), np.float32),
        "k": np.ones((B, HKV, D), np.float32),
        "cos": np.ones((32, D // 2), np.float32),
        "sin": np.zeros((32, D // 2), np.float32),
        "positions": np.array([31, 0, 5]),
    }


OPERATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "decode_attention": attention_arguments,
    "prefill_attention": ragged_arguments,
    "write_kv": write_arguments,
    "gather_kv": gather_arguments,
    "copy_blocks": copy_arguments,
    "swap_blocks": swap_arguments,
    "merge_states": merge_arguments,
    "apply_rotary": rotary_arguments,
}


class OnDevice(InterfaceArray):
    """Some array of a framework that nobody knows."""

    def __init__(self):
        super().__init__(np.zeros(4, np.float32))


class OnCuda(torch.Tensor):
    device = torch.device("cuda", 0)


class OnMps(torch.Tensor):
    device = torch.device("mps", 0)


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def misaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)
    return raw[1:].view(x.dtype).reshape(x.shape)


def spread(x):
    """The same shape with gaps along the last axis."""
    return np.zeros((*x.shape, 2), x.dtype)[..., 0]


def with_value(x, at, value):
    x = x.copy()
    x[at] = value
    return x


SIDES = ("host", "emulator", "device")


def call(operation: str, changes: dict[str, Any], side: str = "host") -> Any:
    """Call with valid arguments but for the changes; a change that is a function gets all arguments.

    On the side "device" NumPy arrays become arrays that only say where they are, on a machine without a GPU.
    """
    arguments = OPERATIONS[operation]()
    arguments |= {name: x(arguments) if isinstance(x, Change) else x for name, x in changes.items()}
    if operation.endswith("_attention") and side != "device" and isinstance(arguments["q"], np.ndarray):
        arguments.setdefault("out", np.full_like(arguments["q"], 7))
    if side == "emulator":
        arguments |= {"backend": "emulator"}
    given = arguments
    if side == "device":
        given = {name: x if name == "window" else InterfaceArray.of(x) for name, x in arguments.items()}
    before = frozen(arguments)
    try:
        with no_driver():
            return getattr(pagedkv, operation)(**given)
    except BaseException:
        assert frozen(arguments) == before, "something was written before the exception"
        raise


class Change:
    """An argument made from the valid ones."""

    def __init__(self, name: str, make: Callable[[Any], Any]):
        self.name, self.make = name, make

    def __call__(self, arguments):
        return self.make(arguments[self.name])


def frozen(arguments: dict[str, Any]) -> list[bytes]:
    """The contents of all arrays, those in lists too; of a view all that it is a view of."""

    def arrays(x: Any) -> Iterator[np.ndarray]:
        if isinstance(x, np.ndarray):
            yield x if x.base is None or not isinstance(x.base, np.ndarray) else x.base
        elif isinstance(x, (list, tuple)):
            yield from (array for item in x for array in arrays(item))

    return [array.tobytes() for array in arrays([*arguments.values()])]


def change(name, make, **others):
    return {name: Change(name, make)} | others


def at(name, place, value, **others):
    """An array with another value at one place."""
    return change(name, lambda x: with_value(x, place, value), **others)


def fp8(shape=(N, P, HKV, D)):
    return {name: np.zeros(shape, np.uint8) for name in ("k_cache", "v_cache")}


def int8(**changes):
    """Caches of int8 with their scales, but for the changes."""
    caches = {name: np.zeros((N, P, HKV, D), np.int8) for name in ("k_cache", "v_cache")}
    scales = {name: np.zeros((N, P, HKV), np.float32) for name in ("k_scales", "v_scales")}
    return caches | scales | {"kv_dtype": "int8"} | changes


def vllm(d=D, p=8, x=4, v_shape=None):
    k = np.zeros((N, HKV, d // x, p, x), np.float32)
    return {"k_cache": k, "v_cache": np.zeros(v_shape or (N, HKV, d, p), np.float32), "layout": "vllm"}


def check_error(operation, changes, error, message, side="host"):
    """The call raises just this error with just this message, and writes nothing."""
    with pytest.raises(error) as caught:
        call(operation, changes, side)
    assert type(caught.value) is error
    assert message is None or str(caught.value) == message


def is_of_a_side(changes: dict[str, Any]) -> bool:
    """True if what is wrong is where arrays are, or which backend is asked for."""
    return "backend" in changes or any(isinstance(x, (InterfaceArray, torch.Tensor)) for x in changes.values())


_VALUES = (
    r"seq_lens must be in|block_tables? must hold|query_starts must (begin|never|end|give)|slots must (be|name)|"
    r"leftpad must be in|mask must have shape \(\d|"
    r"positions must be in|pairs must (hold|name|not)|[kv]_scale must be positive and finite, got"
)


def is_about_values(message: str) -> bool:
    """True if what is wrong are values of an array, which nobody looks at on a device."""
    return re.match(_VALUES, message) is not None


NO_MEMORY = (
    "k can only be made for arrays of CuPy and torch, got a tests.support.device_fakes.InterfaceArray; "
    "convert the caches to one of them"
)


def on_every_side(cases):
    """Parameters (..., side) of a test: the cases (..., changes, error, message) on every side that they can be on."""
    return [
        pytest.param(*case, side, id="-".join((*case[:-3], case[-1][:60], side)))
        for case in cases
        for side in SIDES
        if side == "host" or not is_of_a_side(case[-3])
    ]


def check_on_every_side(operation, changes, error, message, side):
    """`check_error`; on a device, values are not looked at and the call gets as far as there being no driver."""
    if side == "device" and is_about_values(message):
        error, message = pagedkv.BackendUnavailableError, NO_DRIVER
        if operation in ("decode_attention", "prefill_attention"):
            changes = {"out": Change("q", np.empty_like)} | changes
        elif operation == "apply_rotary":
            changes = {"out": Change("q", lambda q: (np.empty_like(q), np.empty_like(q[:, :HKV])))} | changes
        elif operation == "gather_kv":
            error, message = ValueError, NO_MEMORY
    check_error(operation, changes, error, message, side)
