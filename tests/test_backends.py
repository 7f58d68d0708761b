"""The public operations with CUDA kernels: in the emulator as on the CPU, on a device without reading it."""

import itertools
import sys

import numpy as np
import pytest
import torch
from numba import njit

import pagedkv
from pagedkv.arrays import identify

from .support.device_fakes import ELSEWHERE, InterfaceArray, address_of, fake_cupy, fake_torch, recording
from .support.problems import Spec, assert_close, build, run
from .support.wrong_arguments import HKV, OPERATIONS, B, D, N, P, misaligned

pytestmark = pytest.mark.usefixtures("without_lines")

EMULATOR = {"backend": "emulator"}


def test_torch_tensors_in_the_emulator():
    problem = build(Spec(layout="vllm"))
    args = [torch.from_numpy(np.ascontiguousarray(x)) for x in problem.args]
    out, lse = pagedkv.decode_attention(*args, layout="vllm", return_lse=True, **EMULATOR)
    assert isinstance(out, torch.Tensor)
    assert_close(problem, out.numpy(), lse.numpy())


def biased(biases):
    def mod(score, q_pos, k_pos, head, seq):
        return score + 0.5 * head - k_pos + biases[k_pos % 3]

    return mod


BIASES = np.array([0.5, -2.0, 3.0], np.float32)
SCORE_MOD = biased(BIASES)  # one for all tests, since each is compiled anew


def test_arrays_that_a_score_mod_closes_over_are_frozen_on_every_backend():
    problem = build(Spec(layout="vllm", score_mod=biased(BIASES.copy())))
    before = BIASES.copy()
    for options in ({"backend": "cpu"}, EMULATOR):
        try:
            for _ in range(2):
                assert_close(problem, *run(problem, **options, score_mod=SCORE_MOD))
                BIASES[:] = 100.0
        finally:
            BIASES[:] = before


def test_what_numba_has_decorated_is_the_function_within():
    problem = build(Spec(layout="vllm", score_mod=SCORE_MOD))
    for options in ({"backend": "cpu"}, EMULATOR):
        assert_close(problem, *run(problem, **options, score_mod=njit(SCORE_MOD)))


@pytest.mark.parametrize("layout", ["vllm", "HND"])
def test_checked_kernels_in_the_emulator(layout):
    problem = build(Spec(layout=layout, group_size=3))
    expected = run(problem, **EMULATOR)
    for got in (run(problem, **EMULATOR, check=True), run(problem, **EMULATOR, check=False)):
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_no_sequences_in_the_emulator():
    arguments = OPERATIONS["decode_attention"]()
    arguments |= {name: arguments[name][:0] for name in ("q", "block_tables", "seq_lens")}
    assert pagedkv.decode_attention(**arguments, **EMULATOR).shape == (0, 4, D)


def test_misaligned_arrays_in_the_emulator():
    problem = build(Spec(layout="vllm", q_dtype="float16", kv_dtype="float16"))
    q = np.zeros((len(problem.q) + 1, 4, 64 + 4), np.float16)
    with pytest.raises(ValueError, match=r'^q must have rows at multiples of 16 bytes for backend "emulator"'):
        pagedkv.decode_attention(q[1:, :, :64], *problem.args[1:], layout="vllm", **EMULATOR)
    q = np.zeros(problem.q.size + 4, np.float16)[4:].reshape(problem.q.shape)
    with pytest.raises(ValueError, match=r'^q must begin at a multiple of 16 bytes for backend "emulator"'):
        pagedkv.decode_attention(q, *problem.args[1:], layout="vllm", **EMULATOR)
    pagedkv.decode_attention(q, *problem.args[1:], layout="vllm")


def test_rows_of_8_bytes_need_no_more():
    caches = {
        name: np.zeros(N * P * HKV * 8 + 8, np.uint8)[8:].reshape(N, P, HKV, 8) for name in ("k_cache", "v_cache")
    }
    arguments = {name: np.ones((1, HKV, 8), np.float32) for name in ("k", "v")} | {"slots": np.array([5])}
    pagedkv.write_kv(**arguments, **caches, kv_dtype="fp8_e4m3", **EMULATOR)
    assert (caches["k_cache"].reshape(-1, HKV, 8)[5] == 0x38).all()


@pytest.fixture(params=["cupy", "torch"])
def kind(request, monkeypatch):
    module = fake_cupy() if request.param == "cupy" else fake_torch()
    monkeypatch.setitem(sys.modules, request.param, module)
    return module.ndarray if request.param == "cupy" else module.Tensor


def device_arguments(operation, kind):
    """Valid arguments of an operation on a device, of a layout that there is a kernel for."""
    arguments = OPERATIONS[operation]()
    if operation == "decode_attention":
        k, v = np.zeros((N, HKV, D // 4, 8, 4), np.float32), np.zeros((N, HKV, D, 8), np.float32)
        arguments |= {"k_cache": k, "v_cache": v, "layout": "vllm"}
    return {name: kind(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_every_operation_on_a_device(operation, backend, kind):
    with recording() as devices:
        results = getattr(pagedkv, operation)(**device_arguments(operation, kind), backend=backend)
    (device,) = devices.values()
    assert device.launches
    results = results if isinstance(results, tuple) else (results,) if results is not None else ()
    pairs, one = ("gather_kv", "merge_states", "apply_rotary"), ("decode_attention", "prefill_attention")
    assert len(results) == (2 if operation in pairs else 1 if operation in one else 0)
    for x in results:
        assert type(x) is kind
        shadow, _ = identify("x", x).metadata(0)
        assert any(address_of(shadow) in args for _, _, args, _ in device.launches)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_device_array_that_begins_in_the_middle_of_a_vector(operation):
    """Every array whose rows are moved in vectors; the others only need their items aligned."""
    arguments = OPERATIONS[operation]()
    moved = {"q", "k_cache", "v_cache", "k", "v", "source", "destination", "outs", "cos", "sin"}
    with recording():
        for name, x in arguments.items():
            if not isinstance(x, np.ndarray):
                continue
            given = device_arguments(operation, InterfaceArray)
            given[name].changes["data"] = (given[name].changes["data"][0] + x.itemsize, False)
            if name in moved and x.itemsize < 16:
                with pytest.raises(ValueError, match=rf"^{name}(\[0\])? must begin at a multiple of 16 bytes"):
                    getattr(pagedkv, operation)(**given)
            given[name].changes["data"] = (given[name].changes["data"][0] - 1, False)
            with pytest.raises(ValueError, match=rf"^{name}(\[0\])? must be aligned to its item size of {x.itemsize}"):
                getattr(pagedkv, operation)(**given)


def test_scales_as_numbers_and_as_device_arrays(kind):
    """Numbers are arguments of the launch: there is nothing to copy to a device."""
    arguments = OPERATIONS["write_kv"]() | {name: np.zeros((N, P, HKV, D), np.uint8) for name in ("k_cache", "v_cache")}
    given = {name: kind(x) for name, x in arguments.items()}
    scale = kind(np.ones(HKV, np.float32))
    with recording() as devices:
        pagedkv.write_kv(**given, kv_dtype="fp8_e4m3", k_scale=0.625, v_scale=scale)
    (device,) = devices.values()
    (_, _, args, _) = device.launches[0]
    assert 0.625 in args
    assert address_of(identify("x", scale).metadata(0).shadow) in args


def test_check_reaches_every_kernel_on_a_device(monkeypatch, kind):
    operations = ("decode_attention", "write_kv", "gather_kv", "copy_blocks", "swap_blocks")
    for operation, by in itertools.product(operations, ("argument", "environment")):
        given = device_arguments(operation, kind)
        for checked in (False, True):
            monkeypatch.setenv("PAGEDKV_CHECK", "1" if checked and by == "environment" else "0")
            if by == "argument":
                if operation not in ("decode_attention", "write_kv"):
                    continue
                given["check"] = checked
            with recording() as devices:
                getattr(pagedkv, operation)(**given)
            launches = next(iter(devices.values())).launches
            if operation == "decode_attention":  # a kernel beforehand looks at its values
                assert any(kernel.name.startswith("check") for kernel, *_ in launches) == checked
            else:
                assert all(f"checked={checked}" in kernel.name for kernel, *_ in launches)


def test_a_pool_in_which_some_layers_are_on_the_host():
    """Each pair of caches goes its own way."""
    arguments = OPERATIONS["swap_blocks"]()
    source, destination = arguments["source"], arguments["destination"]
    mixed = [source, InterfaceArray(source)]
    assert [identify("x", x).on_device for x in mixed] == [False, True]
    with recording() as devices:
        pagedkv.swap_blocks(mixed, [destination, InterfaceArray(destination)], np.zeros((0, 2), np.int64))
    assert not devices


def test_nothing_is_at_the_addresses_of_these_tests():
    x = np.zeros((B, 4), np.float32)
    assert InterfaceArray(x).__cuda_array_interface__["data"][0] == address_of(x) + ELSEWHERE
    assert ELSEWHERE > 2**57, "no process has memory there"
    assert misaligned(x).ctypes.data % 2
