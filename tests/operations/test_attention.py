"""Arrays and options of the public operations."""

import math
from inspect import signature

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.calls import AttentionArguments, per_head
from pagedkv.cpu import backend
from pagedkv.cuda.plans.cache import OPTIONS
from pagedkv.cuda.plans.gpu_plan import ARRAYS
from pagedkv.operations import attention as operations
from pagedkv.visible import Visible

from ..support.problems import FLOATS
from ..support.strategies import own_parity
from ..support.wrong_arguments import (
    BF16,
    HKV,
    HQ,
    B,
    D,
    N,
    P,
    attention_arguments,
    fp8,
    ragged_arguments,
    read_only,
    vllm,
)


class Kernel:
    """A fake CPU backend: it records calls and their LSE arrays, and fills outputs with ones."""

    def __init__(self):
        self.calls = []

    def plan(self, call):
        return call

    def run(self, call, q, caches, out, lse, *, is_given):
        assert is_given == (call.out is not None)
        self.calls.append((call, lse))
        out[...] = 1
        if lse is not None:
            lse[...] = 1

    @property
    def call(self):
        ((call, _),) = self.calls
        return call

    def scales(self):
        """Both scales as the CPU's kernels get them."""
        return [per_head(scale, self.call.spec.num_kv_heads) for scale in (self.call.k_scale, self.call.v_scale)]


@pytest.fixture
def kernel(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(backend, "plan", kernel.plan)
    monkeypatch.setattr(backend, "run", kernel.run)
    return kernel


def decode(**changes):
    return pagedkv.decode_attention(**attention_arguments() | changes)


def prefill(**changes):
    return pagedkv.prefill_attention(**ragged_arguments() | changes)


def as_torch(x):
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(x)


def test_what_options_are_by_default(kernel):
    out = decode()
    assert (out == 1).all()
    assert kernel.calls[0][1] is None, "no LSE"
    spec, options = kernel.call.spec, kernel.call.options
    assert (spec.layout, spec.kind, spec.num_blocks, spec.block_size) == ("NHD", "float32", N, P)
    for scale in kernel.scales():
        assert scale.dtype == np.float32
        assert scale.tolist() == [1.0] * HKV
    assert options.scale == 1 / math.sqrt(D)
    assert options.visible == Visible()
    assert kernel.call.exact is False
    for name in ("softcap", "alibi_slopes", "sinks", "score_mod"):
        assert getattr(options, name) is None


def test_options_reach_the_kernel(kernel):
    vectors = {name: np.arange(HQ, dtype=np.float32) for name in ("alibi_slopes", "sinks")}
    flags = {"causal": False, "exact": True}
    prefill(scale=np.float32(0.5), window=np.int64(2**40), softcap=3, score_mod=own_parity, **flags, **vectors)
    options = kernel.call.options
    assert (options.scale, options.softcap) == (0.5, 3.0)
    assert options.visible == Visible(2**31 - 1, 2**31 - 1)
    assert {type(x) for x in (options.scale, options.softcap)} == {float}
    assert {type(x) for x in options.visible.scalars} == {int}
    assert kernel.call.exact is True
    assert options.score_mod is own_parity
    for name, vector in vectors.items():
        np.testing.assert_array_equal(getattr(options, name), vector)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("operation", ["decode_attention", "prefill_attention"])
def test_large_arrays_are_not_copied_and_results_are_of_the_same_kind(kernel, operation, framework, dtype):
    arguments = ragged_arguments() if operation == "prefill_attention" else attention_arguments()
    arguments |= {name: arguments[name].astype(FLOATS[dtype]) for name in ("q", "k_cache", "v_cache")}
    given_arrays = {name: as_torch(x) for name, x in arguments.items()} if framework == "torch" else arguments
    out, lse = getattr(pagedkv, operation)(**given_arrays, return_lse=True)
    for name in ("q", "k_cache", "v_cache"):
        view, x = getattr(kernel.call, name), arguments[name]
        assert view.__array_interface__ == x.__array_interface__
        assert view.dtype == x.dtype
    if framework == "torch":
        assert (str(out.dtype), str(lse.dtype)) == (f"torch.{dtype}", "torch.float32")
    else:
        assert (out.dtype, lse.dtype) == (FLOATS[dtype], np.float32)
    assert tuple(out.shape) == arguments["q"].shape
    assert tuple(lse.shape) == arguments["q"].shape[:2]
    assert (out == 1).all()
    assert (lse == 1).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_out_is_the_very_object(kernel, framework, dtype):
    arguments = {name: x.astype(FLOATS[dtype]) for name, x in list(attention_arguments().items())[:3]}
    out = np.zeros((B, HQ + 1, D), FLOATS[dtype])[:, :HQ]
    given_out = as_torch(out) if framework == "torch" else out
    result, lse = decode(**arguments, out=given_out, return_lse=True)
    assert result is given_out
    assert (out == 1).all()
    assert isinstance(lse, np.ndarray)


def test_frameworks_may_mix_and_the_result_follows_q(kernel):
    arguments = attention_arguments()
    assert isinstance(decode(q=torch.from_numpy(arguments["q"])), torch.Tensor)
    assert isinstance(decode(k_cache=torch.from_numpy(arguments["k_cache"])), np.ndarray)


def test_tensors_that_require_grad(kernel):
    out = decode(q=torch.zeros(B, HQ, D, requires_grad=True))
    assert not out.requires_grad


@pytest.mark.parametrize(
    "changes",
    [
        {
            "q": np.zeros((0, HQ, D), np.float32),
            "block_tables": np.zeros((0, 2), np.int32),
            "seq_lens": np.zeros(0, np.int32),
        },
        {
            "q": np.zeros((0, HQ, D), np.float32),
            "block_tables": np.zeros((0, 0), np.int32),
            "seq_lens": np.zeros(0, np.int32),
            "k_cache": np.zeros((0, P, HKV, D), np.float32),
            "v_cache": np.zeros((0, P, HKV, D), np.float32),
        },
    ],
)
def test_without_sequences_results_are_empty(kernel, changes):
    out, lse = decode(**changes, return_lse=True)
    assert out.shape == (0, HQ, D)
    assert lse.shape == (0, HQ)
    starts = np.zeros(1, np.int32)
    assert prefill(**changes, query_starts=starts).shape == (0, HQ, D)
    padding = np.full((5, HQ, D), 3, np.float32)
    assert (prefill(**changes | {"q": padding}, query_starts=starts, out=padding.copy()) == 3).all()
    assert not kernel.calls


def test_without_query_tokens_results_are_empty(kernel):
    assert prefill(q=np.zeros((0, HQ, D), np.float32), query_starts=np.zeros(B + 1, np.int32)).shape == (0, HQ, D)
    assert not kernel.calls


def fused():
    """q and out as interleaved rows of one buffer."""
    buffer = np.zeros((B, 3, HQ, D), np.float32)
    return {"q": buffer[:, 0], "out": buffer[:, 2]}


@pytest.mark.parametrize(
    "changes",
    [
        fused(),
        {name: read_only(x) for name, x in attention_arguments().items()},
        {"q": np.broadcast_to(np.zeros((1, 1, D), np.float32), (B, HQ, D))},
        {"q": np.zeros((B, HQ, D), np.float32)[::-1, ::-1]},
        {"q": np.zeros((B, HQ, D + 8), np.float32)[..., 8:]},
        {"out": np.zeros((HQ, B, D), np.float32).transpose(1, 0, 2)},
        {"out": np.zeros((B, HQ, D), np.float32)[::-1]},
        {"seq_lens": np.zeros(B, np.int32), "block_tables": np.zeros((B, 0), np.int32)},
        {"seq_lens": np.zeros(B, np.int32), "block_tables": np.full((B, 2), -7, np.int32)},
        {"block_tables": np.full((B, 9), N - 1, np.int32)[:, 2:8]},
        {"scale": 0},
        {"scale": -1},
        {"window": 1},
        {"softcap": 1e-30},
        {"check": True},
        {"check": False},
        {"backend": "cpu"},
        {"kernel": "split", "backend": "cpu"},
        {"kernel": "v1", **vllm(p=8)},
        {"kernel": "v2", **vllm(p=256)},
        {"kernel": "auto", **vllm(p=16)},
        {"layout": "HND", **{name: np.zeros((N, HKV, P, D), np.float32) for name in ("k_cache", "v_cache")}},
        {**fp8(), "kv_dtype": "fp8_e4m3"},
        {**fp8(), "kv_dtype": "fp8_e5m2", "q": np.zeros((B, HQ, D), BF16)},
        {**fp8(), "kv_dtype": "fp8_e4m3", "k_scale": 2, "v_scale": np.full(HKV, 0.5, np.float32)},
        {"k_cache": np.zeros((N, P, HKV, D), BF16), "v_cache": np.zeros((N, P, HKV, D), BF16)},
        {"k_cache": np.zeros((N, P, HKV, D), np.float16), "v_cache": np.zeros((N, P, HKV, D), np.float16)},
    ],
)
def test_rare_but_valid_arguments_are_accepted(kernel, changes):
    assert (decode(**changes) == 1).all()


def test_an_array_of_a_float_without_an_axis_is_a_number(kernel):
    half = np.array(0.5, np.float32)
    decode(scale=half, softcap=np.array(3.0), k_scale=half, v_scale=half[()], **fp8(), kv_dtype="fp8_e4m3")
    options = kernel.call.options
    assert (options.scale, options.softcap, kernel.call.k_scale, kernel.call.v_scale) == (0.5, 3.0, 0.5, 0.5)
    for name, wrong in (("scale", np.array(1)), ("softcap", np.array(True)), ("scale", np.array([0.5]))):
        with pytest.raises(TypeError, match=f"^{name} must be a number, got ndarray$"):
            decode(**{name: wrong})


@pytest.mark.parametrize(("given_scale", "expected"), [(2, [2, 2]), (np.float32(0.5), [0.5, 0.5]), (None, [1, 1])])
def test_scales_become_one_per_head(kernel, given_scale, expected):
    decode(**fp8(), kv_dtype="fp8_e4m3", k_scale=given_scale, v_scale=torch.tensor([3.0, 4.0]))
    assert [x.tolist() for x in kernel.scales()] == [expected, [3, 4]]
    assert {x.dtype for x in kernel.scales()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "starts", [[0, 5, 7, 7], [0, 0, 0, 0], [0, 9, 9, 9], [0, 4, 9, 9]], ids=["padded", "empty", "one", "full"]
)
def test_accepted_query_starts(kernel, starts):
    assert prefill(query_starts=np.array(starts, np.int32)).shape == (9, HQ, D)


@pytest.mark.parametrize("operation", [pagedkv.decode_attention, pagedkv.prefill_attention])
def test_every_argument_is_handed_on(monkeypatch, operation):
    """A new one belongs in AttentionArguments, from which a device takes the key of a plan, and in both calls."""
    seen = []
    monkeypatch.setattr(operations, "attention_call", seen.append)
    given = {name: object() for name in signature(operation).parameters}
    with pytest.raises(AttributeError):  # where the call is used
        operation(**given)
    assert given.items() <= seen[0]._asdict().items()
    keys = {name for names in (ARRAYS, OPTIONS, ["max_seq_len"]) for name in names}
    assert keys == set(AttentionArguments._fields) >= set(given)


@pytest.mark.parametrize("operation", [decode, prefill])
def test_a_bound_on_lengths_reaches_the_backend_clamped_to_the_tables(kernel, operation):
    capacity = 3 * P
    for bound in (None, capacity, np.int64(capacity), 10**30):
        kernel.calls.clear()
        operation(max_seq_len=bound)
        assert kernel.call.max_seq_len == capacity
    kernel.calls.clear()
    operation(seq_lens=np.array([9, 5, 0], np.int32), max_seq_len=10)
    assert kernel.call.max_seq_len == 10


@pytest.mark.usefixtures("without_lines")
def test_a_bound_of_0_is_for_sequences_without_tokens():
    """Of a size that other tests compile split for."""
    q, pages = np.ones((B, 3, 64), np.float32), np.ones((N, 16, 1, 64), np.float32)
    sizes = {"q": q, "k_cache": pages, "v_cache": pages, "seq_lens": np.zeros(B, np.int32)}
    for name in ("cpu", "emulator"):
        assert (decode(**sizes, max_seq_len=0, backend=name) == 0).all()
