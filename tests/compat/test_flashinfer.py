"""compat.flashinfer: wrappers by FlashInfer's signatures, against the oracle."""

import math
import re
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch

from pagedkv.compat import flashinfer

from ..support.allocations import at_most
from ..support.interrupts import interrupts_at_every_instant
from ..support.problems import Spec, as_torch, assert_close, build

WORKSPACE = torch.empty(16, dtype=torch.uint8)
DECODE = Spec(seq_lens=(37, 0, 16), block_size=8)
PREFILL = DECODE.replace(query_lens=(5, 0, 16))
OPTIONS = {
    "plain": {},
    "window and soft cap": {"window": 7, "softcap": 3.0, "scale": 0.2},
    "sinks": {"sinks": True},
    "bfloat16, HND": {"q_dtype": "bfloat16", "kv_dtype": "bfloat16", "layout": "HND"},
    "fp8": {"kv_dtype": "fp8_e4m3", "kv_scales": "scalar"},
}


def page_table(problem):
    """indptr, indices and last_page_len."""
    size, lens = problem.spec.block_size, problem.spec.seq_lens
    counts = [-(-n // size) for n in lens]
    indices = np.concatenate([row[:n] for row, n in zip(problem.block_tables, counts, strict=True)])
    last = [(n - 1) % size + 1 if n else 0 for n in lens]
    return [torch.tensor(x).int() for x in (np.cumsum([0, *counts]), indices, last)]


def sizes(problem):
    spec = problem.spec
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size


def planned(problem):
    options, spec = problem.options, problem.spec
    window = -1 if spec.window is None else spec.window - 1
    kv_type = torch.float8_e4m3fn if spec.is_fp8 else getattr(torch, spec.kv_dtype)
    types = {"q_data_type": getattr(torch, spec.q_dtype), "kv_data_type": kv_type}
    return {"window_left": window, "logits_soft_cap": spec.softcap, "sm_scale": options["scale"], **types}


def cache_of(problem):
    """The pair (K, V)."""
    caches = as_torch(problem.k_cache), as_torch(problem.v_cache)
    return tuple(x.view(torch.float8_e4m3fn) for x in caches) if problem.spec.is_fp8 else caches


def given_to_run(problem):
    names = ("k_scale", "v_scale", "sinks")
    return {name: problem.options[name] for name in names if name in problem.options} | (
        {"sinks": as_torch(problem.options["sinks"])} if "sinks" in problem.options else {}
    )


def check(problem, out, lse):
    lse = lse.numpy() * math.log(2)
    numbers = out.view(torch.int16).numpy().view(problem.q.dtype) if out.dtype == torch.bfloat16 else out.numpy()
    assert_close(problem, numbers, lse)


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["decode", "prefill", "prefill-causal"])
def test_run_is_the_oracle(kind, changes):
    problem = build(
        (DECODE if kind == "decode" else PREFILL.replace(causal=kind == "prefill-causal")).replace(**changes)
    )
    layout = problem.spec.layout
    if kind == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout, use_tensor_cores=True)
        wrapper.plan(*page_table(problem), *sizes(problem), **planned(problem))
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout, backend="fa2")
        starts = as_torch(problem.query_starts)
        causal = problem.spec.causal
        wrapper.plan(starts, *page_table(problem), *sizes(problem), causal=causal, **planned(problem))
    q, cache, given = as_torch(problem.q), cache_of(problem), given_to_run(problem)
    out, lse = wrapper.run_return_lse(q, cache, **given)
    check(problem, out, lse)
    wrapper.reset_workspace_buffer(WORKSPACE, WORKSPACE)
    wrapper.end_forward()
    torch.testing.assert_close(wrapper.run(q, cache, **given), out, atol=0, rtol=0)
    into, logs = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    wrapper.run(q, cache, out=into, lse=logs, return_lse=True, **given)
    torch.testing.assert_close(into, out, atol=0, rtol=0)
    torch.testing.assert_close(logs, lse, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["bool", "bits"])
def test_a_custom_mask_goes_before_causal(kind):
    problem = build(PREFILL.replace(mask=kind, causal=False))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    mask = {"custom_mask" if kind == "bool" else "packed_custom_mask": as_torch(problem.options["mask"])}
    starts = as_torch(problem.query_starts)
    wrapper.plan(starts, *page_table(problem), *sizes(problem), causal=True, **mask, **planned(problem))
    for x in mask.values():
        x.zero_()  # what is planned stays
    check(problem, *wrapper.run(as_torch(problem.q), cache_of(problem), return_lse=True))


def test_masks_of_any_shape_and_stride():
    problem = build(PREFILL.replace(mask="bool", causal=False))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    mask = as_torch(problem.options["mask"])
    twice = torch.stack([mask, ~mask], dim=1)[:, :1]
    wrapper.plan(
        as_torch(problem.query_starts), *page_table(problem), *sizes(problem), custom_mask=twice, **planned(problem)
    )
    check(problem, *wrapper.run(as_torch(problem.q), cache_of(problem), return_lse=True))


def test_several_tokens_of_a_request_are_causal():
    problem = build(DECODE.replace(seq_lens=(37, 3, 16), query_lens=(3, 3, 3)))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(*page_table(problem), *sizes(problem), q_len_per_req=3, **planned(problem))
    check(problem, *wrapper.run(as_torch(problem.q), cache_of(problem), return_lse=True))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_tokens_are_appended_to_their_pages(layout):
    cache = torch.zeros((4, 2, 8, 2, 16) if layout == "NHD" else (4, 2, 2, 8, 16))
    k, v = torch.randn(2, 2, 2, 16)
    request, positions, indices, indptr, last = (
        torch.tensor(x).int() for x in ([1, 0], [9, 3], [2, 3, 0], [0, 1, 3], [4, 2])
    )
    flashinfer.append_paged_kv_cache(k, v, request, positions, cache, indices, indptr, last, layout)
    tokens = cache if layout == "NHD" else cache.transpose(2, 3)
    torch.testing.assert_close(tokens[0, :, 1], torch.stack([k[0], v[0]]))
    torch.testing.assert_close(tokens[2, :, 3], torch.stack([k[1], v[1]]))
    assert tokens.any(dim=-1).any(dim=-1).sum() == 4


def test_states_are_merged_in_base_2():
    v, s = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4)
    out, lse = flashinfer.merge_states(v, s)
    weights = torch.softmax(s * math.log(2), dim=1)
    torch.testing.assert_close(out, (weights[..., None] * v).sum(dim=1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, torch.log2(torch.exp2(s).sum(dim=1)), atol=1e-5, rtol=1e-5)
    with pytest.raises(TypeError, match=r"s must be a torch\.Tensor, got ndarray"):
        flashinfer.merge_states(v, s.numpy())
    again = flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    torch.testing.assert_close(again, (out, lse))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_forward_has_options_of_its_own(kind):
    """As in FlashInfer: those of plan do not count, and are replaced for later calls."""
    problem = build(
        (DECODE if kind == "decode" else PREFILL.replace(causal=True)).replace(
            window=7, scale=0.2, finite_left_of_window=True
        )
    )
    options = {"window_left": 6, "sm_scale": 0.2} | ({} if kind == "decode" else {"causal": True})
    if kind == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", False, True)
        wrapper.begin_forward(*page_table(problem), *sizes(problem), q_data_type=torch.float32)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", False, None)
        starts = as_torch(problem.query_starts)
        wrapper.begin_forward(starts, *page_table(problem), *sizes(problem), q_data_type=torch.float32)
    q, cache = as_torch(problem.q), cache_of(problem)
    plain = wrapper.forward(q, cache)
    check(problem, *wrapper.forward_return_lse(q, cache, **options))
    assert torch.equal(wrapper.run(q, cache), wrapper.forward(q, cache, **options))
    assert torch.equal(wrapper.forward(q, cache), plain)
    with pytest.raises(ValueError, match="pos_encoding_mode must be"):
        wrapper.forward(q, cache, pos_encoding_mode="ALIBI")
    for wrong in ({"logits_soft_cap": "5"}, {"sm_scale": "1"}, *[{"causal": 2}] * (kind == "prefill")):
        with pytest.raises(TypeError):
            wrapper.forward(q, cache, window_left=6, **wrong)
        assert torch.equal(wrapper.run(q, cache), plain)


def test_data_type_is_that_of_what_has_no_type_of_its_own():
    problem = build(DECODE.replace(kv_dtype="fp8_e4m3", q_dtype="float16"))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    types = {"data_type": torch.float8_e4m3fn, "q_data_type": torch.float16}
    wrapper.plan(*page_table(problem), *sizes(problem), **types)
    check(problem, *wrapper.run(as_torch(problem.q), cache_of(problem), return_lse=True))


@pytest.mark.parametrize("causal", [False, True])
def test_more_tokens_than_keys(causal):
    """The last token sits at the last key."""
    q, cache = torch.randn(9, 4, 64), torch.randn(4, 2, 8, 2, 64)
    starts, indptr, indices, last = (torch.tensor(x).int() for x in ([0, 7, 9], [0, 1, 3], [2, 1, 0], [3, 1]))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    plan = partial(wrapper.plan, starts, indptr, indices, last, 4, 2, 64, 8, causal=causal, q_data_type=torch.float32)
    plan()
    out = wrapper.run(q, cache)
    assert torch.equal(wrapper.run(q, cache), out)
    for interrupt in interrupts_at_every_instant(("flashinfer/wrapper", "compat/ragged")):
        plan()
        with suppress(KeyboardInterrupt), interrupt:
            wrapper.run(q, cache)
        assert torch.equal(wrapper.run(q, cache), out), interrupt.came_at
    k, v = (x.repeat_interleave(2, dim=1).double() for x in cache[2, :, :3])
    seen = torch.ones(7, 3).tril(3 - 7) if causal else torch.ones(7, 3)
    logits = torch.einsum("qhd,khd->hqk", q[:7].double(), k) / 8
    weights = logits.masked_fill(seen == 0, -torch.inf).softmax(dim=2).nan_to_num(0.0)
    torch.testing.assert_close(out[:7].double(), torch.einsum("hqk,khd->qhd", weights, v), atol=1e-5, rtol=1e-5)


def test_no_room_is_made_for_tokens_that_q_has_not():
    starts, indptr, indices, last = (torch.tensor(x).int() for x in ([0, 10**7], [0, 1], [2], [3]))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with at_most(2**20):
        wrapper.plan(starts, indptr, indices, last, 4, 2, 64, 8, q_data_type=torch.float32)
        with pytest.raises(ValueError, match=r"q must have shape .* = \(10000000, 4, 64\), as planned"):
            wrapper.run(torch.zeros(9, 4, 64), torch.zeros(4, 2, 8, 2, 64))


def test_new_tokens_know_their_requests_and_positions():
    """The example in FlashInfer's documentation of append_paged_kv_cache, and an empty request."""
    starts, last = torch.tensor([0, 45, 53, 78, 100, 100]).int(), torch.tensor([13, 8, 9, 6, 0]).int()
    lens = flashinfer.get_seq_lens(torch.tensor([0, 3, 4, 6, 8, 8]).int(), last, 16)
    requests, positions = flashinfer.get_batch_indices_positions(starts, lens, 100)
    assert requests.tolist() == [0] * 45 + [1] * 8 + [2] * 25 + [3] * 22
    assert positions.tolist() == [*range(45), *range(8), *range(25), *range(22)]
    with pytest.raises(ValueError, match="nnz must be 100"):
        flashinfer.get_batch_indices_positions(starts, lens, 99)
    for wrong in (starts.flip(0), starts + 1):
        with pytest.raises(ValueError, match="append_indptr must begin with 0 and never decrease"):
            flashinfer.get_batch_indices_positions(wrong, lens, 100)


def test_tokens_outside_of_the_pages_of_their_request_are_refused():
    """Even where the next request has a page there."""
    cache, k = torch.zeros(4, 2, 8, 2, 16), torch.ones(1, 2, 16)
    indices, indptr, last = (torch.tensor(x).int() for x in ([2, 3, 0], [0, 1, 3], [8, 2]))
    for request, position, message in [
        (0, 8, "positions must be"),
        (0, -1, "positions must"),
        (-1, 0, "batch_indices"),
    ]:
        where = torch.tensor([request]).int(), torch.tensor([position]).int()
        with pytest.raises(IndexError, match=message):
            flashinfer.append_paged_kv_cache(k, k, *where, cache, indices, indptr, last)
    with pytest.raises(TypeError, match=r"positions must be a tensor of torch\.int32, got torch\.int64"):
        flashinfer.append_paged_kv_cache(k, k, where[0], torch.tensor([0]), cache, indices, indptr, last)
    mixed = cache[:, 0].to(torch.float8_e4m3fn), cache[:, 1].to(torch.float8_e5m2)
    with pytest.raises(TypeError, match="paged_kv_cache must be of one dtype"):
        flashinfer.append_paged_kv_cache(k, k, torch.zeros(1).int(), torch.zeros(1).int(), mixed, indices, indptr, last)
    assert not cache.any()


def test_prefill_has_a_window_of_the_call():
    problem = build(PREFILL.replace(window=7))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    options = {"causal": True} | planned(problem) | {"window_left": -1}
    wrapper.plan(as_torch(problem.query_starts), *page_table(problem), *sizes(problem), **options)
    check(problem, *wrapper.run(as_torch(problem.q), cache_of(problem), return_lse=True, window_left=6))


PLAN = [
    ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode must be \"NONE\", got 'ROPE_LLAMA'"),
    ({"q_data_type": "float33"}, "q_data_type must be a torch.dtype or its name, got 'float33'"),
    ({"o_data_type": torch.float16}, "o_data_type must be torch.float32, that of q"),
    ({"window_right": 2}, "window_right must be 0 or -1"),
    ({"q_len_per_req": 2}, "every request must have at least q_len_per_req = 2 tokens, got [37, 0, 16]"),
    ({"last_page_len": torch.tensor([9, 0, 8]).int()}, "last_page_len must be in 1..page_size = 1..8, got [9, 0, 8]"),
    ({"indptr": torch.tensor([0, 5]).int()}, "indptr must have shape (4,), got (2,)"),
    ({"indptr": torch.tensor([-4, -4, -4, -4]).int()}, "indptr must never decrease, in 0..7, the pages of indices"),
    ({"indptr": torch.tensor([1, 1, -(2**31), -1]).int()}, "never decrease"),
    ({"indices": torch.arange(8)}, "indices must be a tensor of torch.int32, got torch.int64"),
    ({"last_page_len": np.ones(3, np.int32)}, "last_page_len must be a tensor of torch.int32, got ndarray"),
]
NAMES = ["indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size"]


@pytest.mark.parametrize(("changes", "message"), PLAN, ids=lambda x: x if isinstance(x, str) else None)
def test_plans_that_cannot_be_honoured_are_refused_by_name(changes, message):
    problem = build(DECODE)
    given = dict(zip(NAMES, [*page_table(problem), *sizes(problem)], strict=True)) | {"q_data_type": torch.float32}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        wrapper.plan(**(given | changes))
    with pytest.raises(RuntimeError, match="call plan before run"):
        wrapper.run(as_torch(problem.q), cache_of(problem))


def test_runs_that_were_not_planned_are_refused():
    problem = build(DECODE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*page_table(problem), *sizes(problem), **planned(problem))
    q, cache = as_torch(problem.q), cache_of(problem)
    for message, args, options in [
        ("q must have dtype torch.float32, which was planned", (q.half(), cache), {}),
        (
            "q must have shape (tokens, num_qo_heads, head_dim) = (3, 4, 64), as planned, got (3, 2, 64)",
            (q[:, :2], cache),
            {},
        ),
        ("paged_kv_cache must have pages of shape (8, 2, 64) of torch.float32", (q, (cache[0][:, :4], cache[1])), {}),
        ("window_left must be -1, which was planned, got 3", (q, cache), {"window_left": 3}),
        ("what follows them is for jit_args", (q, cache, 1), {}),
        ("paged_kv_cache must have pages of shape (8, 2, 64)", (q, tuple(x[:, :, :1] for x in cache)), {}),
        ("paged_kv_cache must have pages", (q, (cache[0], cache[1].half())), {}),
        ("paged_kv_cache must be a tensor", (q, [*cache]), {}),
        ("lse must have dtype torch.float32 and shape (3, 4)", (q, cache), {"lse": torch.ones(4), "return_lse": True}),
        ("and needs return_lse=True", (q, cache), {"lse": torch.ones(3, 4)}),
        ("k_scale must be one number, got (2,)", (q, cache), {"k_scale": torch.ones(2)}),
    ]:
        out = torch.zeros_like(q)
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            wrapper.run(*args, out=out, **options)
        assert not out.any()
    with pytest.raises(ValueError, match="use_cuda_graph must be False"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(ValueError, match="prefix_len_ptr must not be given"):
        prefill.plan(torch.tensor([0, 1, 1, 1]).int(), *page_table(problem), *sizes(problem), prefix_len_ptr=q)
    for name, mask in (("custom_mask", torch.zeros(37).byte()), ("packed_custom_mask", torch.zeros(5).bool())):
        with pytest.raises(TypeError, match=f"{name} must have dtype"):
            prefill.plan(torch.tensor([0, 1, 1, 1]).int(), *page_table(problem), *sizes(problem), **{name: mask})
    prefill.plan(torch.tensor([0, 1, 1, 3]).int(), *page_table(problem), *sizes(problem), q_data_type=torch.float32)
    with pytest.raises(ValueError, match=r"q must have shape .* = \(3, 4, 64\), as planned, got \(2, 4, 64\)"):
        prefill.run(q[:2], cache)
    with pytest.raises(TypeError, match=r"after use_cuda_graph come use_tensor_cores, .* and kv_lay"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, kv_lay="HND")
