"""compat.flash_attn against dense attention written with torch, over the parameters of FlashAttention's own tests."""

import math
import re

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from pagedkv.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from ..support.allocations import at_most

HKV, D = 2, 32


def dense(q, k, v, *, causal, window_size, leftpad=0, softcap=0.0, slopes=None, scale=None):
    """Attention of q (n, Hq, D) to k, v (L, Hkv, D), aligned at the bottom right, and its LSE (Hq, n)."""
    n, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length) - (torch.arange(n)[:, None] + length - n)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    left, right = window_size
    hidden = (torch.arange(length) < leftpad).expand(n, length).clone()
    if left >= 0:
        hidden |= distance < -left
    if causal or right >= 0:
        hidden |= distance > (0 if causal else right)
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(dim=-1).nan_to_num(0.0)
    return torch.einsum("hnl,lhd->nhd", weights, v), scores.logsumexp(dim=-1)


def rotated(x, positions, cos, sin, interleaved):
    """x (n, H, D) with its first dims rotated, pair by pair."""
    half, result = cos.shape[1], x.double().clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[positions, i].double()[:, None], sin[positions, i].double()[:, None]
        result[..., a] = x[..., a] * c - x[..., b] * s
        result[..., b] = x[..., b] * c + x[..., a] * s
    return result.to(x.dtype)


def strided(x):
    """x with a stride in its last axis."""
    return torch.stack([x, x.flip(-1)], -1)[..., 0]


@st.composite
def kvcache_cases(draw):
    """The parameters of test_flash_attn_kvcache of FlashAttention, with page sizes of any number."""
    seqlen_q, seqlen_k = draw(st.sampled_from([(1, 20), (1, 139), (3, 24), (64, 80), (64, 256), (3, 799), (30, 30)]))
    new_kv = draw(st.booleans())
    page = draw(st.sampled_from([None, 7, 16, 256]))
    return {
        "batch": draw(st.sampled_from([1, 3])),
        "are_strided": draw(st.booleans()),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "group": draw(st.sampled_from([1, 3])),
        "new_kv": new_kv,
        "rotary": draw(st.sampled_from([None, None, (16, True), (32, True), (16, False), (32, False)]))
        if new_kv
        else None,
        "page": page,
        "batch_idx": page is None and draw(st.booleans()),
        "leftpad": draw(st.booleans()),
        "causal": draw(st.booleans()),
        "window_size": draw(st.sampled_from([(-1, -1), (-1, -1), (5, 0), (0, 3), (17, -1), (-1, 6)])),
        "alibi": draw(st.sampled_from([None, None, "heads", "sequences"])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 15.0])),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=60)
@given(case=kvcache_cases())
def test_kvcache_meets_dense_attention(case):
    torch.manual_seed(case["seed"])
    seqlen_q, seqlen_k, batch = case["seqlen_q"], case["seqlen_k"], case["batch"]
    heads, page = HKV * case["group"], case["page"]
    q = torch.randn(batch, seqlen_q, heads, D)
    k_new, v_new = torch.randn(2, batch, seqlen_q, HKV, D)
    if page is None:
        rows = 2 * batch if case["batch_idx"] else batch
        caches = torch.randn(2, rows, seqlen_k + seqlen_q, HKV, D)
        index = torch.randperm(rows)[:batch].int()
        tables = index[:, None] if case["batch_idx"] else torch.arange(batch, dtype=torch.int32)[:, None]
        where = {"cache_batch_idx": index} if case["batch_idx"] else {}
    else:
        width = -(-(seqlen_k + seqlen_q) // page)
        caches = torch.randn(2, batch * width + 2, page, HKV, D)
        tables = torch.randperm(batch * width)[: batch * width].view(batch, width).int()
        where = {"block_table": tables}
    lens = torch.randint(0, seqlen_k + 1, (batch,), dtype=torch.int32)
    leftpad = (torch.rand(batch) * (lens + 1)).int() if case["leftpad"] else None
    slopes = {None: None, "heads": torch.rand(heads), "sequences": torch.rand(batch, heads)}[case["alibi"]]
    cos, sin = (f(torch.arange(seqlen_k + seqlen_q)[:, None] * torch.rand(16)) for f in (torch.cos, torch.sin))
    width, interleaved = case["rotary"] or (0, False)
    tables_of_angles = {"rotary_cos": cos[:, : width // 2], "rotary_sin": sin[:, : width // 2]} if width else {}
    k_cache, v_cache = caches[0].clone(), caches[1].clone()
    new = {"k": k_new, "v": v_new, "rotary_interleaved": interleaved, **tables_of_angles} if case["new_kv"] else {}
    options = {name: case[name] for name in ("causal", "window_size", "softcap")}
    given = {"q": q, "cache_seqlens": lens, "cache_leftpad": leftpad, "alibi_slopes": slopes, **new, **where}
    if case["are_strided"]:
        given |= {name: strided(x) for name, x in given.items() if isinstance(x, torch.Tensor) and "rotary" not in name}
    out, lse = flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, return_softmax_lse=True, **given, **options)

    is_local = case["causal"] or case["window_size"] != (-1, -1)
    for i, length in enumerate(lens.tolist()):
        flat = [x[tables[i].long()].flatten(0, 1) for x in caches]
        queries = q[i]
        if case["new_kv"]:
            positions = length + torch.arange(seqlen_q)
            own_k = k_new[i]
            if width:
                own_k = rotated(own_k, positions, cos[:, : width // 2], sin[:, : width // 2], interleaved)
                at = positions if is_local else torch.full((seqlen_q,), length)
                queries = rotated(queries, at, cos[:, : width // 2], sin[:, : width // 2], interleaved)
            flat[0][length : length + seqlen_q], flat[1][length : length + seqlen_q] = own_k, v_new[i]
            length += seqlen_q
        after = [x[tables[i].long()].flatten(0, 1)[:length] for x in (k_cache, v_cache)]
        torch.testing.assert_close(after[0], flat[0][:length], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(after[1], flat[1][:length], atol=0, rtol=0)
        own = None if slopes is None else slopes if slopes.dim() == 1 else slopes[i]
        pad = 0 if leftpad is None else int(leftpad[i])
        expected, expected_lse = dense(queries, *(x[:length] for x in flat), leftpad=pad, slopes=own, **options)
        torch.testing.assert_close(out[i].double(), expected, atol=3e-5, rtol=1e-4)
        torch.testing.assert_close(lse[i].double(), expected_lse, atol=3e-5, rtol=1e-4)


@settings(max_examples=25)
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=4),
    causal=st.booleans(),
    window_size=st.sampled_from([(-1, -1), (4, 0), (2, 3)]),
    page=st.sampled_from([None, 3, 16]),
    seed=st.integers(0, 99),
)
def test_varlen_meets_dense_attention(lens, causal, window_size, page, seed):
    torch.manual_seed(seed)
    query_lens, key_lens = (torch.tensor([0, *x]) for x in zip(*lens, strict=True))
    cu_q, cu_k = query_lens.cumsum(0).int(), key_lens.cumsum(0).int()
    q, (k, v) = torch.randn(int(cu_q[-1]), 4, D), torch.randn(2, int(cu_k[-1]), HKV, D)
    tables, k_given, v_given = None, k, v
    if page:
        width = -(-int(key_lens.max()) // page)
        tables = torch.randperm(len(lens) * width).view(len(lens), width).int()
        k_given, v_given = torch.full((2, max(len(lens) * width, 1), page, HKV, D), math.nan)
        for i, (_, n) in enumerate(lens):
            t = torch.arange(n)
            at = tables[i, t // page].long(), t % page
            k_given[at], v_given[at] = k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]]
    out, lse, none = flash_attn_varlen_func(
        q, k_given, v_given, cu_q, cu_k, 40, 60, causal=causal, window_size=window_size, return_attn_probs=True,
        block_table=tables,
    )  # fmt: skip
    assert none is None
    for i in range(len(lens)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        expected, expected_lse = dense(q[rows], k[keys], v[keys], causal=causal, window_size=window_size)
        torch.testing.assert_close(out[rows].double(), expected, atol=3e-5, rtol=1e-4)
        torch.testing.assert_close(lse[:, rows].double(), expected_lse, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("window_size", [(-1, -1), (-2, -7)], ids=str)
def test_all_queries_of_one_sequence_are_rotated_as_its_next_token(window_size, page):
    q, k_cache, v_cache = torch.randn(1, 3, 4, D), *torch.randn(2, 2, 8, HKV, D)
    cos, sin, k = torch.rand(9, 4), torch.rand(9, 4), torch.randn(1, 2, HKV, D)
    where = {} if page is None else {"block_table": torch.tensor([[1, 0]]).int()}
    given = {"k": k, "v": k, "rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": 5, "window_size": window_size}
    given["causal"] = np.False_
    out = flash_attn_with_kvcache(q, k_cache, v_cache, **given, **where)
    row = 0 if page is None else 1
    queries = rotated(q[0], torch.full((3,), 5), cos, sin, True)
    expected, _ = dense(queries, k_cache[row, :7], v_cache[row, :7], causal=False, window_size=(-1, -1))
    torch.testing.assert_close(out[0].double(), expected, atol=3e-5, rtol=1e-4)


def test_tensors_that_repeat_elements():
    """All sequences read one row of one cache, and have one query, one length and one slope for all heads."""
    q, cache = torch.randn(1, 2, 1, D), torch.randn(1, 8, 1, D)
    many, lens, slopes = q.expand(3, 2, 4, D), torch.tensor([5]).int(), torch.tensor([0.5])
    keys = cache.expand(3, 8, HKV, D)
    options = {"cache_seqlens": lens.expand(3), "cache_leftpad": lens.new_tensor([2]).expand(3), "causal": True}
    out = flash_attn_with_kvcache(many, keys, keys, alibi_slopes=slopes.expand(4), **options)
    masks = {"causal": True, "window_size": (-1, -1), "leftpad": 2, "slopes": slopes.expand(4)}
    expected, _ = dense(many[0], keys[0, :5], keys[0, :5], **masks)
    torch.testing.assert_close(out.double(), expected.expand(3, 2, 4, D), atol=3e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="k_cache must not repeat an element"):
        flash_attn_with_kvcache(many, keys, keys, many[:, :, :2], many[:, :, :2], cache_seqlens=3)


Q, CACHE, NEW = torch.zeros(1, 2, 4, D), torch.zeros(1, 8, HKV, D), torch.zeros(1, 2, HKV, D)
LENS, ANGLES = torch.tensor([3]).int(), torch.ones(9, D // 2)
PAIR, ROWS, FULL_AND_SHORT = Q.repeat(2, 1, 1, 1), torch.zeros(2, 1).int(), torch.tensor([9, 1]).int()
REFUSED = [
    ({"qv": Q}, "qv must not be given: pagedkv has no second query for a latent V (MLA)"),
    ({"q_descale": torch.ones(1, 2)}, "q_descale must not be given"),
    ({"attention_chunk": 4}, "attention_chunk must not be given: chunks are no window of pagedkv"),
    ({"cu_seqlens_q": LENS}, "cu_seqlens_q must not be given: call flash_attn_varlen_func"),
    ({"block_table": LENS[:, None], "page_table": LENS[:, None]}, "two names of one argument"),
    ({"block_table": LENS[:, None], "cache_batch_idx": LENS}, "cache_batch_idx is for contiguous caches"),
    ({"rotary_cos": ANGLES, "rotary_sin": ANGLES}, "v, rotary_cos and rotary_sin need k"),
    ({"k": NEW, "cache_seqlens": LENS}, "k needs v, and rotary_cos needs rotary_sin"),
    ({"k": NEW, "v": NEW}, "cache_seqlens must say where k goes, got None"),
    (
        {"k": NEW, "v": NEW, "cache_seqlens": 7},
        "cache_seqlens must be at least 0, and leave room for 2 new tokens of 8",
    ),
    ({"k": NEW, "v": NEW, "cache_seqlens": -1}, "cache_seqlens must be at least 0"),
    ({"k": NEW, "v": NEW[:, :1], "cache_seqlens": LENS}, "k and v must have shape (1, seqlen_new, num_kv_heads"),
    ({"cache_seqlens": 3.7}, "cache_seqlens must be a tensor of torch.int32, got float"),
    ({"cache_seqlens": LENS.long()}, "cache_seqlens must be a tensor of torch.int32, got torch.int64"),
    ({"cache_seqlens": 9}, "cache_seqlens must be in 0..max_blocks * block_size = 0..8"),
    ({"q": PAIR, "cache_seqlens": FULL_AND_SHORT, "block_table": ROWS}, "cache_seqlens must be lengths in 0..8"),
    (
        {"q": PAIR, "cache_seqlens": ROWS[:, 0], "block_table": ROWS[:1]},
        "block_table must have shape (2, n), got (1, 1)",
    ),
    ({"q": PAIR}, "k_cache must have a row for each of 2 sequences, got 1"),
    ({"q": PAIR, "cache_batch_idx": LENS}, "cache_batch_idx must have shape (2,), got (1,)"),
    ({"cache_batch_idx": LENS}, "cache_batch_idx must be rows of k_cache in 0..0, got [3]"),
    ({"cache_leftpad": LENS.long()}, "cache_leftpad must be a tensor of torch.int32"),
    (
        {"cache_seqlens": 1, "cache_leftpad": LENS - 4},
        "cache_leftpad must be in 0..cache_seqlens, got [-1] for [1] keys",
    ),
    ({"cache_seqlens": 1, "cache_leftpad": LENS}, "cache_leftpad must be in 0..cache_seqlens, got [3] for [1] keys"),
    ({"block_table": LENS[:, None].numpy()}, "block_table must be a tensor of torch.int32, got ndarray"),
    ({"window_size": (3.5, 0)}, "window_size must be two ints, got (3.5, 0)"),
    ({"softmax_scale": "1"}, "softmax_scale must be a number, got str"),
    ({"q": Q.numpy()}, "q must be a torch.Tensor, got ndarray: torch.from_numpy shares its memory"),
    ({"k_descale": torch.ones(1, HKV)}, "k_descale and v_descale are for caches of fp8"),
    ({"q": Q[0]}, "q must have shape (batch_size, seqlen, num_heads, head_dim)"),
    ({"k": NEW, "v": NEW, "cache_seqlens": LENS, "softcap": -1.0}, "softcap must be positive"),
    (
        {"k": NEW, "v": NEW, "cache_seqlens": LENS, "return_softmax_lse": LENS.repeat(2)},
        "return_softmax_lse must be True or False, got tensor([3, 3]",
    ),
    ({"causal": LENS.repeat(2)}, "causal must be True or False, got tensor([3, 3]"),
    ({"cache_seqlens": 2**40}, "cache_seqlens must be at most 2147483647, got 1099511627776"),
    ({"cache_seqlens": LENS.to("meta")}, "cache_seqlens must be a dense tensor with data, got one of torch.strided on"),
    ({"q": None}, "q must be a torch.Tensor, got NoneType"),
    ({"q": Q.to_sparse()}, "q must be a dense tensor with data, got one of torch.sparse_coo on cpu"),
    ({"q": Q[..., :0], "k": NEW, "v": NEW, "cache_seqlens": LENS}, "q must have shape"),
    (
        {
            **{"k": NEW.repeat(1, 4, 1, 1), "v": NEW.repeat(1, 4, 1, 1), "cache_seqlens": LENS, "window_size": (0, 0)},
            **{"q": Q[:, :1], "block_table": torch.tensor([[-1, 0]]).int()},
        },
        "block_table must hold a block for each new token, got [[-1, -1, -1, -1, -1, 0, 0, 0]]",
    ),
    ({"softcap": torch.ones(2)}, "softcap must be one number, got (2,)"),
    ({"softmax_scale": torch.tensor(True)}, "softmax_scale must be a number, got bool"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else None)
def test_what_cannot_be_honoured_is_refused_and_nothing_is_written(changes, message):
    k_cache, v_cache = CACHE.clone(), CACHE.clone()
    given = {"q": Q, **changes}
    with pytest.raises((TypeError, ValueError, IndexError), match=re.escape(message)):
        flash_attn_with_kvcache(given.pop("q"), k_cache, v_cache, **given)
    assert not k_cache.any()
    assert not v_cache.any()


def test_a_number_may_be_a_tensor_of_one_element():
    q, k = torch.randn(2, 1, 3, 4, D)
    options = {"softmax_scale": 0.5, "softcap": 2.0}
    expected = flash_attn_with_kvcache(q, k, k, **options)
    for wrap in (torch.tensor, lambda x: torch.tensor([x], dtype=torch.float64)):
        given = {name: wrap(x) for name, x in options.items()}
        assert torch.equal(flash_attn_with_kvcache(q, k, k, **given), expected)


def test_no_queries():
    assert flash_attn_with_kvcache(Q[:, :0], CACHE, CACHE, cache_seqlens=3).shape == (1, 0, 4, D)


VARLEN = [
    ({"cu_seqlens_q": None}, "cu_seqlens_q must be a tensor of torch.int32, got NoneType"),
    ({"cu_seqlens_k": torch.tensor([0, 2])}, "cu_seqlens_k must be a tensor of torch.int32, got torch.int64"),
    ({"cu_seqlens_k": torch.tensor([0, 1, 2]).int()}, "cu_seqlens_k must have shape (2,), got (3,)"),
    ({"cu_seqlens_k": torch.tensor([2, 0]).int()}, "cu_seqlens_k must never decrease"),
    ({"k": CACHE, "v": CACHE}, "head_dim), or pages with a block_table, got"),
    ({"seqused_k": LENS}, "seqused_k must be at most the tokens between cu_seqlens_k, [2], got [3]"),
    ({"k": NEW[0].numpy()}, "k must be a torch.Tensor, got ndarray"),
    ({"cu_seqlens_q": torch.tensor([]).int()}, "cu_seqlens_q must have shape (batch_size + 1,), got (0,)"),
    ({"v": None}, "v must be a torch.Tensor, got NoneType"),
    (
        {"k": CACHE[:, :0], "v": CACHE[:, :0], "cu_seqlens_k": torch.zeros(2).int(), "block_table": LENS[:, None]},
        "block_size must be at least 1, got 0",
    ),
    ({"v": torch.tensor(1.0)}, "k and v must have shape (total_k, num_kv_heads, head_dim)"),
    ({"return_attn_probs": torch.ones(2)}, "return_attn_probs must be True or False, got tensor([1., 1.])"),
    ({"cu_seqlens_q": torch.tensor([0, 3]).int()}, "cu_seqlens_q must end at or before num_tokens = 2, got 3"),
    (
        dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([1, -(2**31), -1]).int()),
        "cu_seqlens_k must never decrease",
    ),
]


@pytest.mark.parametrize(("changes", "message"), VARLEN, ids=lambda x: x if isinstance(x, str) else None)
def test_varlen_names_arguments_as_its_caller(changes, message):
    starts = torch.tensor([0, 2]).int()
    given = {"q": Q[0], "k": NEW[0], "v": NEW[0], "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        flash_attn_varlen_func(**given | changes)


@pytest.mark.parametrize("starts", [[0, 2, 10**7], [0, 10**7, 2], [0, -(2**31), 2]], ids=str)
def test_varlen_makes_no_room_for_queries_that_q_has_not(starts):
    keys, pages = torch.tensor([0, 1, 2]).int(), torch.tensor([[0], [0]]).int()
    for k, where in ((NEW[0], {}), (CACHE, {"block_table": pages})):
        with at_most(2**20), pytest.raises(ValueError, match="cu_seqlens_q must"):
            flash_attn_varlen_func(Q[0], k, k, torch.tensor(starts).int(), keys, **where)


def test_hints_change_nothing_and_unknown_names_are_a_type_error():
    plain = flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=4)
    hints = {"num_splits": 3, "scheduler_metadata": LENS, "pack_gqa": True, "sm_margin": 2, "attention_chunk": 0}
    assert torch.equal(plain, flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=4, **hints))
    with pytest.raises(TypeError, match="there is no argument block_tables"):
        flash_attn_with_kvcache(Q, CACHE, CACHE, block_tables=LENS)
    with pytest.raises(ValueError, match=r"dropout_p must be 0\.0"):
        flash_attn_varlen_func(Q[0], Q[0], Q[0], LENS, LENS, 2, 2, 0.1)
    with pytest.raises(NotImplementedError, match="no gradients"):
        flash_attn_with_kvcache(Q.clone().requires_grad_(), CACHE, CACHE)


def test_caches_of_fp8_have_scales_for_each_head():
    codes = torch.randn(1, 8, HKV, D).to(torch.float8_e4m3fn)
    descale = torch.tensor([[0.5, 2.0]])
    out = flash_attn_with_kvcache(Q + 0.1, codes, codes, cache_seqlens=5, k_descale=descale, v_descale=descale)
    wide = codes.float() * descale[0, :, None]
    torch.testing.assert_close(out, flash_attn_with_kvcache(Q + 0.1, wide, wide, cache_seqlens=5), atol=1e-5, rtol=1e-5)
    two, differing = codes.repeat(2, 1, 1, 1), torch.tensor([[1.0, 1.0], [1.0, 2.0]])
    with pytest.raises(ValueError, match="must be the same for all sequences"):
        flash_attn_with_kvcache(PAIR, two, two, k_descale=differing)
    with pytest.raises(ValueError, match=r"k_descale must have shape \(1, num_kv_heads\), got \(2, 2\)"):
        flash_attn_with_kvcache(Q, codes, codes, k_descale=differing)
