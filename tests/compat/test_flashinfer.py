"""compat.flashinfer: wrappers by FlashInfer's signatures, against the oracle."""

import math
import re

import numpy as np
import pytest
import torch

from pagedkv.compat import flashinfer

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
    for again in (wrapper.run(q, cache, **given), wrapper.forward(q, cache, **given)):
        torch.testing.assert_close(again, out, atol=0, rtol=0)
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
    again = flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    torch.testing.assert_close(again, (out, lse))


PLAN = [
    ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode must be \"NONE\", got 'ROPE_LLAMA'"),
    ({"q_data_type": "float33"}, "q_data_type must be a torch.dtype or its name, got 'float33'"),
    ({"o_data_type": torch.float16}, "o_data_type must be torch.float32, that of q"),
    ({"window_right": 2}, "window_right must be 0 or -1"),
    ({"q_len_per_req": 2}, "every request must have at least q_len_per_req = 2 tokens, got [37, 0, 16]"),
    ({"last_page_len": torch.tensor([9, 0, 8]).int()}, "last_page_len must be in 1..page_size = 1..8, got [9, 0, 8]"),
    ({"indptr": torch.tensor([0, 5]).int()}, "indptr must have 4 entries"),
]
NAMES = ["indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size"]


@pytest.mark.parametrize(("changes", "message"), PLAN, ids=lambda x: x if isinstance(x, str) else None)
def test_plans_that_cannot_be_honoured_are_refused_by_name(changes, message):
    problem = build(DECODE)
    given = dict(zip(NAMES, [*page_table(problem), *sizes(problem)], strict=True)) | {"q_data_type": torch.float32}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(ValueError, match=re.escape(message)):
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
        ("q must have shape (tokens, 4, 64), as planned", (q[:, :2], cache), {}),
        ("paged_kv_cache must have pages of 8 tokens of torch.float32", (q, (cache[0][:, :4], cache[1])), {}),
        ("window_left must be -1, which was planned, got 3", (q, cache), {"window_left": 3}),
        ("what follows them is for jit_args", (q, cache, 1), {}),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            wrapper.run(*args, **options)
    with pytest.raises(ValueError, match="use_cuda_graph must be False"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(ValueError, match="prefix_len_ptr must not be given"):
        prefill.plan(torch.tensor([0, 1, 1, 1]).int(), *page_table(problem), *sizes(problem), prefix_len_ptr=q)
