"""torch's varlen_attn on the host: by torch's own names, against the dense oracle."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

import pagedkv
from pagedkv.compat import torch_varlen

from ..support.problems import Spec, as_torch, assert_close, build

torch_varlen.register()
LSE = AuxRequest(lse=True)
# Of torch, and what they mean here.
WINDOWS = {
    (-1, -1): {"causal": False},
    (-1, 0): {"causal": True},
    (8, 0): {"causal": True, "window": 9},
    (8, -1): {"causal": False, "window": 9},
    (8, 3): {"causal": False, "window": 9, "window_right": 3},
    (-1, 40): {"causal": False, "window_right": 40},
}
SPEC = Spec(seq_lens=(37, 5, 0), query_lens=(6, 5, 0), poison="zero")


def numbers(x):
    return x.float().numpy()


def paged(problem):
    """Arguments of varlen_attn for a problem."""
    q, k_cache, v_cache, tables, lens, starts = map(as_torch, problem.args)
    longest = int(lens.max())
    return (q, k_cache, v_cache, starts, None, longest, longest), {"seqused_k": lens, "block_table": tables}


def ragged(problem, room=lambda length: length):
    """The same with the keys of one sequence behind those of the other, in as many rows as `room` says."""
    (q, _, _, starts, _, longest, _), _ = paged(problem)
    begin = np.cumsum([0, *map(room, problem.seq_lens)], dtype=np.int32)
    shape = (begin[-1], *problem.contents[0][1].shape[1:])
    k, v = np.full((2, *shape), np.nan, problem.k_cache.dtype)
    for start, (_, keys, values) in zip(begin, problem.contents, strict=False):
        k[start : start + len(keys)], v[start : start + len(keys)] = keys, values
    return q, as_torch(k), as_torch(v), starts, torch.from_numpy(begin), longest, longest


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_those_of_the_oracle(window, dtype):
    spec = SPEC.replace(**WINDOWS[window], q_dtype=dtype, kv_dtype=dtype, scale=0.2)
    problem = build(spec)
    options = {"window_size": window, "scale": 0.2, "enable_gqa": True, "return_aux": LSE}
    args, pages = paged(problem)
    out, lse = varlen_attn(*args, **pages, **options)
    assert lse.is_contiguous()
    assert_close(problem, numbers(out), lse.numpy().T)
    for again in (
        varlen_attn(*ragged(problem), **options),
        varlen_attn(*ragged(problem, room=lambda n: 48), seqused_k=torch.tensor(spec.seq_lens).int(), **options),
        varlen_attn_out(torch.full_like(out, torch.nan), *args, **pages, **options),
    ):
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


@pytest.mark.parametrize("block_size", [1, 7, 256])
def test_pages_are_of_any_size(block_size):
    problem = build(SPEC.replace(block_size=block_size, group_size=1))
    args, pages = paged(problem)
    assert_close(problem, numbers(varlen_attn(*args, **pages, window_size=(-1, 0))), None)


def test_a_window_may_be_a_list():
    args, pages = paged(build(SPEC))
    as_list, as_tuple = (varlen_attn(*args, **pages, enable_gqa=True, window_size=x) for x in ([-1, 0], (-1, 0)))
    assert torch.equal(as_list, as_tuple)


def test_out_is_written_where_it_lies():
    args, pages = paged(build(SPEC))
    expected = varlen_attn(*args, **pages, enable_gqa=True)
    whole = torch.zeros(len(expected), 2, *expected.shape[1:])
    assert varlen_attn_out(whole[:, 0], *args, **pages, enable_gqa=True).data_ptr() == whole.data_ptr()
    assert torch.equal(whole[:, 0], expected)
    assert not whole[:, 1].any()


@pytest.mark.parametrize("hint", [{"num_splits": 1}, {"num_splits": 4}, {"max_q": 10**6}, {"max_k": 10**6}], ids=str)
def test_no_result_depends_on_a_hint(hint):
    args, pages = paged(build(SPEC))
    expected = varlen_attn(*args, **pages, enable_gqa=True)
    named = dict(zip(("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"), args, strict=True))
    assert torch.equal(varlen_attn(**named | pages | {"enable_gqa": True} | hint), expected)


def test_sequences_without_keys_and_no_sequences():
    q, k = torch.randn(3, 2, 64), torch.zeros(0, 2, 64)
    nothing = torch.zeros(3, dtype=torch.int32)
    out, lse = varlen_attn(q[:0], k, k, nothing, nothing, 0, 0, return_aux=LSE)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (2, 0)
    assert varlen_attn(q[:0], k, k, nothing[:1], nothing[:1], 0, 0).shape == (0, 2, 64)


def dense(q, k, v, left, right):
    """out and LSE of one sequence, in float64; the last query sits at the last key."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[2] ** 0.5
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    logits[:, (ahead < -left) | (ahead > right)] = -torch.inf
    lse = logits.logsumexp(2)
    weights = (logits - lse[..., None]).exp().nan_to_num(0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("key_lens", [(3, 9, 0), (0, 0, 0), (1, 2, 3)], ids=str)
def test_more_queries_than_keys(window, key_lens):
    """As in cross attention: the last query sits at the last key, and a row without keys is 0 and has LSE -inf."""
    query_lens, block_size = (7, 4, 2), 4
    q = torch.randn(sum(query_lens), 4, 64)
    k, v = torch.randn(2, sum(key_lens), 2, 64)
    starts_q, starts_k = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (query_lens, key_lens))
    options = {"window_size": window, "enable_gqa": True, "return_aux": LSE}
    out, lse = varlen_attn(q, k, v, starts_q, starts_k, 7, 9, **options)
    left, right = (np.inf if x < 0 else x for x in window)
    parts = zip(q.split(query_lens), k.split(key_lens), v.split(key_lens), strict=True)
    expected, expected_lse = zip(*(dense(*part, left, right) for part in parts), strict=True)
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), torch.cat(expected_lse, dim=1), atol=1e-5, rtol=0)

    pages = torch.full((2, 9, block_size, 2, 64), torch.nan)
    for i, part in enumerate(zip(k.split(key_lens), v.split(key_lens), strict=True)):
        for page, x in zip(pages, part, strict=True):
            page[3 * i : 3 * i + 3].flatten(0, 1)[: len(x)] = x
    where = {"seqused_k": torch.tensor(key_lens).int(), "block_table": torch.arange(9).int().view(3, 3)}
    paged_out, paged_lse = varlen_attn(q, *pages, starts_q, None, 7, 9, **where, **options)
    assert torch.equal(paged_out, out)
    assert torch.equal(paged_lse, lse)


def test_compiled_with_fullgraph():
    args, pages = paged(build(SPEC))

    def layer(q):
        return varlen_attn(q * 2, *args[1:], **pages, enable_gqa=True, window_size=(-1, 0)) + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of torch's own modules
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(args[0]), layer(args[0]))
    torch._dynamo.reset()


def test_a_backward_pass_is_refused():
    q, starts = torch.randn(3, 2, 64, requires_grad=True), torch.tensor([0, 3], dtype=torch.int32)
    out = varlen_attn(q, q, q, starts, starts, 3, 3)
    with pytest.raises(NotImplementedError, match=r"no gradients.*torch.no_grad\(\)"):
        out.sum().backward()


STARTS = torch.tensor([0, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"cu_seq_k": None}, ValueError, "cu_seq_k must say where each sequence begins"),
        ({"cu_seq_k": STARTS.long()}, TypeError, "cu_seq_k must be a tensor of torch.int32, got torch.int64"),
        ({"cu_seq_k": STARTS + 2}, ValueError, "cu_seq_k must never decrease, in 0..4, .* got [2, 5]"),
        ({"cu_seq_k": STARTS.flip(0)}, ValueError, "cu_seq_k must never decrease, in 0..4, .* got [3, 0]"),
        ({"cu_seq_q": STARTS.long()}, TypeError, "cu_seq_q must be a tensor of torch.int32, got torch.int64"),
        ({"cu_seq_q": STARTS * 2}, ValueError, "cu_seq_q must end at or before num_tokens = 4, got 6"),
        ({"cu_seq_q": torch.tensor([0, 2**31 - 1]).int()}, ValueError, "cu_seq_q must end at or before num_tokens = 4"),
        ({"cu_seq_k": STARTS[None]}, ValueError, "cu_seq_k must have shape (n,), got (1, 2)"),
        ({"value": None}, TypeError, "value must be a torch.Tensor, got NoneType"),
        ({"value": torch.zeros(4, 2, 32)}, ValueError, "value must have shape"),
        ({"seqused_k": STARTS[1:] + 1}, ValueError, "seqused_k must be at most .* [3], got [4]"),
        ({"block_table": STARTS[None]}, ValueError, "seqused_k must say .* where block_table is given, got None"),
    ],
)
def test_wrong_arguments_are_named(changed, error, message):
    x = torch.randn(4, 2, 64)
    pages = x.view(2, 2, 2, 64) if "block_table" in changed else x
    args = {"query": x, "key": pages, "value": pages, "cu_seq_q": STARTS, "cu_seq_k": STARTS, "max_q": 3, "max_k": 3}
    with pytest.raises(error, match=re.escape(message).replace(r"\.\*", ".*")):
        varlen_attn(**args | changed)


@pytest.mark.parametrize("changed", [{"dropout_p": 0.1}, {"return_debug_mask": True}, {"alibi_slopes": torch.ones(2)}])
def test_what_varlen_attn_has_not_is_refused_of_the_operator(changed):
    [name], x = changed, torch.randn(3, 2, 64)
    more = {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False} | changed
    with pytest.raises(ValueError, match=f"{name}.* not served here"):
        torch.ops.aten._flash_attention_forward(x, x, x, STARTS, STARTS, 3, 3, **more)


def test_a_dense_batch_is_refused():
    x = torch.randn(1, 3, 2, 64)
    with pytest.raises(ValueError, match="cu_seq_q must be an int32 tensor, got None"):
        torch.ops.aten._flash_attention_forward(x, x, x, None, None, 3, 3, 0.0, True, False)


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0", "3.0.0"])
def test_other_versions_of_torch_are_refused(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    message = f"torch must be at least 2.13 and below 2.15 .* got {version}: call pagedkv.prefill_attention"
    with pytest.raises(ImportError, match=message):
        torch_varlen.register()


def test_a_second_registration_changes_nothing():
    args, pages = paged(build(SPEC))
    expected = varlen_attn(*args, **pages, enable_gqa=True)
    torch_varlen.register()
    assert torch.equal(varlen_attn(*args, **pages, enable_gqa=True), expected)
    q, k_cache, v_cache, starts = args[:4]
    native = pagedkv.prefill_attention(
        q, k_cache, v_cache, pages["block_table"], pages["seqused_k"], starts, causal=False
    )
    assert torch.equal(native, expected)


def test_a_length_past_the_table_is_refused_beside_a_sequence_with_few_keys():
    q, pages, starts = torch.randn(6, 2, 64), torch.randn(2, 4, 2, 64), torch.tensor([0, 3, 6]).int()
    tables = torch.tensor([[0], [1]]).int()
    with pytest.raises(ValueError, match=re.escape("seqused_k must be lengths in 0..4")):
        varlen_attn(q, pages, pages, starts, None, 3, 5, seqused_k=torch.tensor([5, 1]).int(), block_table=tables)
    with pytest.raises(ValueError, match="one for each of its 1 rows"):
        varlen_attn(q, pages, pages, starts, None, 3, 5, seqused_k=torch.tensor([4, 1]).int(), block_table=tables[:1])
