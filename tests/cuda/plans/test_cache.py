"""Calls that are repeated from a plan: the same launches, and everything that may not be taken for a repetition."""

import sys

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv import backends
from pagedkv.arrays import identify, interface
from pagedkv.cuda.plans import cache
from pagedkv.operations import attention as operations

from ...support.device_fakes import InterfaceArray, address_of, fake_cupy
from .device_calls import HKV, HQ, B, D, M, N, P, X, decode, host_arguments, launches

pytestmark = pytest.mark.usefixtures("nothing_planned", "devices")


@pytest.fixture
def validations(monkeypatch):
    """The calls that were validated."""
    calls = []
    attention_call = operations.attention_call

    def counting(arguments):
        calls.append(arguments)
        return attention_call(arguments)

    monkeypatch.setattr(operations, "attention_call", counting)
    return calls


@pytest.mark.parametrize("kernel", ["v1", "v2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.5, "window": 5, "softcap": 3.0},
        {"alibi_slopes": np.ones(HQ, np.float32), "sinks": np.ones(HQ, np.float32)},
        {"check": True},
    ],
)
def test_a_repeated_call_launches_the_same(kind, devices, validations, kernel, options):
    first = host_arguments() | options
    decode(kind, **first, kernel=kernel)
    decode(kind, **first, kernel=kernel)
    assert len(validations) == 1
    (device,) = devices.values()
    half = len(device.launches) // 2
    assert half == {"v1": 1, "v2": 2}[kernel] + ("check" in options)
    assert list(map(repr, device.launches[:half])) == list(map(repr, device.launches[half:]))


@pytest.mark.parametrize("options", [{}, {"window": 5, "sinks": np.ones(HQ, np.float32)}, {"check": True}])
def test_a_repeated_call_of_kernel_split_launches_the_same(kind, devices, validations, options):
    caches = {name: np.zeros((N, P, HKV, D), np.float16) for name in ("k_cache", "v_cache")}
    first = host_arguments() | caches | {"layout": "NHD"} | options
    decode(kind, **first, kernel="auto")
    decode(kind, **first, kernel="auto")
    assert len(validations) == 1
    (device,) = devices.values()
    half = len(device.launches) // 2
    assert list(map(repr, device.launches[:half])) == list(map(repr, device.launches[half:]))
    once = device.launches[-1]
    assert once[0].entry == "pagedkv_split"
    decode(kind, **first, kernel="split")
    halves = np.zeros((N, P, 2, HKV, D), np.float16)
    decode(kind, **first | {"k_cache": halves[:, :, 0], "v_cache": halves[:, :, 1]}, kernel="auto")
    assert len(validations) == 3
    assert device.launches[-1][2] != once[2]


def test_a_repeated_prefill_launches_the_same_unless_it_differs(kind, devices, validations):
    """The rows of q are not those of the tables; query_starts, causal and exact are in the key."""
    given = host_arguments() | {"q": np.zeros((5, HQ, D), np.float16), "out": np.zeros((5, HQ, D), np.float16)}
    given |= {"query_starts": np.zeros(B + 1, np.int32), "layout": "vllm"}

    def prefill(**changes):
        arguments = {name: kind(x) if isinstance(x, np.ndarray) else x for name, x in (given | changes).items()}
        return pagedkv.prefill_attention(**arguments)

    for _ in range(2):
        prefill()
    assert len(validations) == 1
    (device,) = devices.values()
    once, again = device.launches
    assert repr(once) == repr(again)
    starts = {"query_starts": np.zeros(B + 1, np.int32)}
    for i, changes in enumerate([{"causal": False}, {"window": 3}, {"exact": True}, starts]):
        prefill(**changes)
        assert len(validations) == min(2 + i, 4)  # other starts are other addresses alone
    assert device.launches[-1][2] != once[2]
    overlapping = np.zeros((6, HQ, D), np.float16)
    with pytest.raises(ValueError, match="out must not overlap q"):
        prefill(q=overlapping[:5], out=overlapping[1:])


def test_a_repetition_has_its_own_addresses(kind, devices, validations):
    for _ in range(3):
        arguments = host_arguments() | {"sinks": np.ones(HQ, np.float32)}
        decode(kind, **arguments)
        args = launches(devices)[-1][2]
        for x in arguments.values():
            assert address_of(x) + (1 << 60) in args
    assert len(validations) == 1


def test_results_are_new_arrays_of_the_framework(kind, devices, validations):
    if kind is InterfaceArray:
        with pytest.raises(ValueError, match=r"^out can only be made for arrays of CuPy and torch.* as out=$"):
            decode(out=None)
        with pytest.raises(ValueError, match=r"^lse can only be made for .*; convert q to one of them"):
            decode(return_lse=True)
        assert not devices
        return
    results = [decode(kind, out=None, return_lse=True) for _ in range(3)]
    assert len(validations) == 1
    for (out, lse), (_, _, args, _) in zip(results, launches(devices), strict=True):
        assert type(out) is type(lse) is kind
        assert (tuple(out.shape), tuple(lse.shape)) == ((B, HQ, D), (B, HQ))
        assert str(lse.dtype).endswith("float32")
        for x in (out, lse):
            assert address_of(identify("x", x).metadata(0).shadow) in args
    assert len({address_of(identify("out", out).metadata(0).shadow) for out, _ in results}) == 3


def wide(x):
    """The same shape with room between the rows."""
    return np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., : x.shape[-1]]


def read_only(x):
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "changes",
    [
        {"q": wide(np.zeros((B, HQ, D), np.float16))},
        {"q": np.zeros((B, HQ, D), np.float32), "out": np.zeros((B, HQ, D), np.float32)},
        {"block_tables": np.zeros((B, M + 1), np.int32)},
        {"block_tables": np.zeros((B, M + 2), np.int32)[:, :M]},
        {"sinks": np.zeros(HQ, np.float32)},
        {"scale": 0.25},
        {"scale": 1},
        {"window": 7},
        {"max_seq_len": 5},
        {"softcap": 2.0},
        {"kernel": "v2"},
        {"kernel": "auto"},
        {"backend": "cuda"},
        {"check": True},
        {"score_mod": lambda score, q_pos, k_pos, head, seq: score},
        {"k_cache": read_only(np.zeros((N, HKV, D // X, P, X), np.float16))},
        {"out": wide(np.zeros((B, HQ, D), np.float16))},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_anything_else_is_validated(changes, validations):
    decode()
    decode(**changes)
    assert len(validations) == 2
    decode()
    decode(**changes)
    assert len(validations) == 2


def test_the_environment_is_asked_for_checks(monkeypatch, devices, validations):
    for value, checked in ((None, False), ("1", True), ("0", False), ("1", True)):
        monkeypatch.delenv("PAGEDKV_CHECK", raising=False)
        if value is not None:
            monkeypatch.setenv("PAGEDKV_CHECK", value)
        decode()
        assert launches(devices)[-2:][0][0].name.startswith("check_batch") == checked
    assert len(validations) == 3


Q = np.zeros((B, HQ, D), np.float16)
# What is equal to the right argument as a key of a dictionary, or is wrong by its address or its flags alone.
WRONG = [
    ({"scale": True}, TypeError, "scale must be a number, got bool"),
    ({"window": 1.0}, TypeError, "window must be an int, got float"),
    ({"window": True}, TypeError, "window must be an int, got bool"),
    ({"max_seq_len": 20.0}, TypeError, "max_seq_len must be an int, got float"),
    ({"max_seq_len": torch.tensor(20)}, TypeError, "max_seq_len must be an int, got Tensor"),
    ({"max_seq_len": np.int64(-20)}, ValueError, "max_seq_len must be at least 0, got -20"),
    ({"check": 0}, TypeError, "check must be None, True or False, got 0"),
    ({"return_lse": 0}, TypeError, "return_lse must be True or False, got 0"),
    ({"layout": ["vllm"]}, ValueError, "layout must be"),
    ({"sinks": [1.0]}, TypeError, "sinks must be an array"),
    ({"out": read_only(np.zeros_like(Q))}, ValueError, "out must be writable"),
    (
        {"q": np.zeros((B, HQ, D + 4), np.float16)[..., :D]},
        ValueError,
        r'q must have rows at multiples of 16 bytes for backend "cuda", got strides \(544, 136, 2\) in bytes',
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_a_wrong_call_between_good_ones(changes, error, message, devices, validations):
    good = {"scale": 1, "window": 1, "max_seq_len": 20}
    decode(**good)
    for _ in range(2):
        with pytest.raises(error, match=f"^{message}"):
            decode(**good | changes)
        decode(**good)
    assert len(launches(devices)) == 3
    assert len(validations) == 3


def test_a_bound_of_0_is_planned_as_1_is(validations):
    for bound in (1, 0, np.int32(0)):
        decode(max_seq_len=bound)
    assert len(validations) == 1


@pytest.mark.parametrize("kernel", ["v1", "v2", "split"])
@pytest.mark.parametrize("number", [int, np.int64])
def test_a_decode_loop_of_1000_steps_makes_few_plans(devices, validations, kernel, number):
    layout = {"layout": "vllm"}
    if kernel == "split":
        layout = {"layout": "NHD"} | {name: np.zeros((N, P, HKV, D), np.float16) for name in ("k_cache", "v_cache")}
    tables = np.zeros((B, 4096 // P), np.int32)
    for length in range(100, 1100):
        decode(**layout, kernel=kernel, block_tables=tables, max_seq_len=number(length))
    assert [arguments.max_seq_len for arguments in validations] == [100, 257, 513, 1025]
    per_call = 2 if kernel == "v2" else 1
    grids = [grid for _, grid, _, _ in launches(devices)[::per_call]]
    tokens = 256 if kernel == "split" else 512
    for length, (x, y, z) in zip(range(100, 1100), grids, strict=True):
        grid = x // (B * HKV) if kernel == "split" else y * z
        assert grid >= (1 if kernel == "v1" else -(-length // tokens))


def test_addresses_in_the_middle_of_a_vector(kind):
    buffer = np.zeros(Q.size + 8, np.float16)
    for first, misaligned in ((0, False), (4, True), (8, False)):
        q = buffer[first:][: Q.size].reshape(Q.shape)
        if misaligned:
            with pytest.raises(ValueError, match=r"^q must begin at a multiple of 16 bytes"):
                decode(kind, q=q)
        else:
            decode(kind, q=q)


def test_an_array_that_has_lost_its_memory_is_no_repetition(kind):
    given = {name: kind(x) for name, x in host_arguments().items()}
    pagedkv.decode_attention(**given, layout="vllm")
    for name, lost in given.items():
        if kind is InterfaceArray:
            lost = InterfaceArray(host_arguments()[name], data=(0, False))
        elif hasattr(lost, "address"):
            lost.address = 0
        else:
            lost.data.ptr = 0
        with pytest.raises(ValueError, match=f"^{name} must have memory, got the address 0"):
            pagedkv.decode_attention(**given | {name: lost}, layout="vllm")
        given[name] = kind(host_arguments()[name])


def test_out_is_compared_with_the_inputs_each_time(validations, devices):
    both = np.zeros((2 * B, HQ, D), np.float16)
    decode(q=both[:B], out=both[B:])
    for q, out in ((both[:B], both[: 2 * B][B - 1 : -1]), (both[B:], both[1 : B + 1])):
        with pytest.raises(ValueError, match=r"^out must not overlap q$"):
            decode(q=q, out=out)
    fused = np.zeros((B, 2, HQ, D), np.float16)
    for _ in range(2):
        decode(q=fused[:, 0], out=fused[:, 1])
    assert len(launches(devices)) == 3
    shared = np.zeros(Q.nbytes + 16, np.uint8)
    out, tables = shared[: Q.nbytes].view(np.float16).reshape(Q.shape), np.zeros((B, M), np.int32)
    decode(out=out, block_tables=tables)
    with pytest.raises(ValueError, match=r"^out must not overlap block_tables$"):
        decode(out=out, block_tables=shared[Q.nbytes - 8 :][: tables.nbytes].view(np.int32).reshape(B, M))


def test_arrays_with_negative_strides_are_checked_for_overlap(devices, validations):
    both = np.zeros((2 * B, HQ, D), np.float16)
    decode(q=both[:B][::-1], out=both[B:][::-1])
    decode(q=both[B:][::-1], out=both[:B][::-1])
    assert len(validations) == 1
    with pytest.raises(ValueError, match=r"^out must not overlap q$"):
        decode(q=both[:B][::-1], out=both[B - 1 : 2 * B - 1][::-1])
    decode(q=both[B:][::-1], out=both[:B])
    with pytest.raises(ValueError, match=r"^out must not overlap q$"):
        decode(q=both[1 : B + 1][::-1], out=both[:B])


def test_streams_and_devices(monkeypatch, devices):
    cupy = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for stream, ordinal in ((0, 0), (5, 0), (0, 0), (7, 1), (0, 1)):
        cupy.streams = {ordinal: stream}
        decode(lambda x, ordinal=ordinal: cupy.ndarray(x, device=ordinal))
    assert {key: len(device.launches) for key, device in devices.items()} == {
        (0, 0): 2,
        (0, 5): 1,
        (1, 7): 1,
        (1, 0): 1,
    }
    arrays = {name: cupy.ndarray(x) for name, x in host_arguments().items()}
    arrays["seq_lens"] = cupy.ndarray(np.zeros(B, np.int32), device=1)
    with pytest.raises(ValueError, match="must be on one device, got q on device 0 and seq_lens on device 1"):
        decode(lambda x: x, **arrays)


def test_interface_arrays_on_several_devices(monkeypatch, devices):
    ordinals = {}
    monkeypatch.setattr(interface, "has_several_devices", lambda: True)
    monkeypatch.setattr(interface, "ordinal_of", lambda address: ordinals.get("now", 0))
    decode()
    ordinals["now"] = 1
    decode()
    assert [len(device.launches) for device in devices.values()] == [1, 1]
    assert [ordinal for ordinal, _ in devices] == [0, 1]


def test_plans_are_forgotten_when_there_are_too_many(monkeypatch, validations):
    monkeypatch.setattr(cache, "MOST_PLANS", 2)
    for scale in (1.0, 2.0, 1.0, 3.0, 1.0):
        decode(scale=scale)
        assert len(backends.gpu_backend().plans) <= 2
    assert len(validations) == 4


def test_a_score_mod_lives_as_long_as_its_plan(validations):
    def shift(by):
        return lambda score, q_pos, k_pos, head, seq: score + by

    decode(score_mod=shift(1.0))
    decode(score_mod=shift(2.0))
    assert len(validations) == 2


def test_no_sequences_launch_nothing(devices):
    empty = {name: np.zeros((0, *host_arguments()[name].shape[1:]), x.dtype) for name, x in host_arguments().items()}
    arguments = host_arguments() | {name: empty[name] for name in ("q", "block_tables", "seq_lens", "out")}
    out = InterfaceArray(arguments.pop("out"))
    for _ in range(2):
        assert decode(**arguments, out=out) is out
    assert not devices
