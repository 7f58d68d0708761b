"""What the subjects of bench prefill get, by stand-ins that do as their documentation says, with torch's SDPA."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.bench.gpu.peers import FLASHINFER_WORKSPACE
from pagedkv.bench.gpu.prefill import peers, run
from pagedkv.bench.gpu.prefill.peers import FIRST, SUBJECTS
from pagedkv.bench.gpu.prefill.workloads import Cell, HostProblem

from ..fake_gpu import FakeGpu

pytestmark = pytest.mark.usefixtures("one_launch")
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
RAGGED = Cell("x", (40, 3, 33), query_lens=(17, 1, 33), **SIZES)
EQUAL = Cell("x", (40, 40), query_lens=(17, 17), **SIZES)
FULL = Cell("x", (40, 40), query_lens=(17, 17), causal=False, **SIZES)
FP8 = Cell("x", (40, 3), kv_dtype="fp8_e4m3", query_lens=(17, 2), **SIZES)


def notes(subjects, cell, framework="torch"):
    rows = run.measure(FakeGpu(framework), cell, {name: SUBJECTS[name] for name in subjects}, 1, lambda text: None)
    return [row["note"] for row in rows]


def note(subject, cell):
    return notes([subject], cell)[0]


def sdpa(q, k, v, causal):
    """torch's SDPA of one sequence: q (n, Hq, D) are the last of its tokens, k and v (L, Hkv, D)."""
    mask = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool() if causal else None
    heads = [x.float().transpose(0, 1)[None] for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).to(q.dtype)


def sdpa_of_pages(q, caches, tables, lens, starts, causal):
    """torch's SDPA of ragged q over pages (N, P, Hkv, D)."""
    rows = []
    for i, length in enumerate(lens.tolist()):
        k, v = (cache[tables[i].long()].float().flatten(0, 1)[:length] for cache in caches)
        rows.append(sdpa(q[starts[i] : starts[i + 1]], k, v, causal))
    return torch.cat(rows)


def install(monkeypatch, path, **members):
    """A module, and the packages that it is in."""
    parts = path.split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), ModuleType(parts[i]))
    vars(sys.modules[path]).update(members)


@pytest.mark.parametrize("cell", [RAGGED, FULL, FP8], ids=str)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_kernels_of_pagedkv_get_each_layout(cell, framework):
    """On the host they are one and the same: this is about the arrays that they get."""
    assert notes(peers.OURS, cell, framework) == [None, None]


def test_torch_peers_without_torch():
    assert set(notes(peers.PEERS, EQUAL, "numpy")) == {"needs torch with CUDA"}


def test_sdpa_is_right_on_dense_keys_and_refuses_the_rest():
    whole = Cell("x", (40, 40), query_lens=(40, 40), **SIZES)
    assert [note("SDPA", cell) for cell in (EQUAL, FULL, whole)] == [None] * 3
    assert note("SDPA", RAGGED) == "dense K and V have sequences of one length"
    assert note("SDPA", FP8) == "dense K and V have sequences of one length"
    assert note("SDPA", Cell("x", (40, 40), query_lens=(17, 16), **SIZES)) == "dense q has sequences of one length"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_right_and_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled.append(options) or f)
    assert [note("FlexAttention", cell) for cell in (EQUAL, FULL)] == [None, None]
    assert compiled.count({"dynamic": False, "fullgraph": True}) == 2  # torch compiles what it needs besides


def test_flash_attention_2_gets_packed_tokens(monkeypatch):
    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
        parts = [x.tensor_split(of[1:-1].long()) for x, of in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))]
        return torch.cat([sdpa(*three, causal) for three in zip(*parts, strict=True)])

    install(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    assert [note("FlashAttention 2", cell) for cell in (RAGGED, EQUAL, FULL)] == [None] * 3
    assert note("FlashAttention 2", FP8) == "no fp8 K and V"


def test_flash_attention_2_gets_a_dense_cache(monkeypatch):
    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, causal):
        sequences = zip(q, k_cache, v_cache, cache_seqlens, strict=True)
        return torch.stack([sdpa(x, k[:n], v[:n], causal) for x, k, v, n in sequences])

    install(monkeypatch, "flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache)
    assert [note("FlashAttention 2 cache", cell) for cell in (EQUAL, FULL)] == [None, None]
    assert note("FlashAttention 2 cache", RAGGED) == "dense q has sequences of one length"


def test_flash_attention_3_gets_the_pages(monkeypatch):
    def flash_attn_with_kvcache(q, k, v, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, causal):
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        return sdpa_of_pages(q, (k, v), page_table, cache_seqlens, cu_seqlens_q, causal)

    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
    assert [note("FlashAttention 3", cell) for cell in (RAGGED, FULL)] == [None, None]
    assert note("FlashAttention 3", FP8) == "no fp8 cache under 16-bit queries"


class FakeFlashInfer:
    """Takes plan's arrays as FlashInfer's documentation says."""

    def __init__(self, workspace, kv_layout):
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")

    def plan(self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **more):
        for x in (qo_indptr, indptr, indices, last_page_len):
            assert x.dtype == torch.int32
        self.starts, self.options = qo_indptr, more
        counts = indptr.diff()
        self.lens = (counts - 1) * page_size + last_page_len
        self.tables = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32)
        for i, count in enumerate(counts):
            self.tables[i, :count] = indices[indptr[i] : indptr[i + 1]]

    def run(self, q, kv):
        assert (q.dtype, kv[0].dtype) == (self.options["q_data_type"], self.options["kv_data_type"])
        return sdpa_of_pages(q, kv, self.tables, self.lens, self.starts, self.options["causal"])


@pytest.mark.parametrize("cell", [RAGGED, FULL, FP8], ids=str)
def test_flashinfer_gets_the_pages(monkeypatch, cell):
    install(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=FakeFlashInfer)
    monkeypatch.setattr(peers.peers, "FLASHINFER_WORKSPACE", 16)
    assert FLASHINFER_WORKSPACE > 2**27  # what its documentation asks for
    assert note("FlashInfer", cell) is None


def unified_attention(
    *, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
    block_table, softcap, q_descale, k_descale, v_descale,
):  # fmt: skip
    """vLLM's arguments."""
    assert causal, "Only causal attention is supported"
    assert (window_size, softcap, q_descale, softmax_scale) == ((-1, -1), 0.0, None, 64**-0.5)
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(seqused_k.max()))
    assert k_descale.shape == v_descale.shape == (len(seqused_k), k.shape[2])
    out[...] = sdpa_of_pages(q, (k, v), block_table, seqused_k, cu_seqlens_q, causal)


@pytest.mark.parametrize("where", ["vllm.v1.attention.ops", "vllm.attention.ops"])
def test_vllm_gets_the_pages(monkeypatch, where):
    install(monkeypatch, f"{where}.triton_unified_attention", unified_attention=unified_attention)
    assert [note("vLLM Triton", cell) for cell in (RAGGED, FP8)] == [None, None]
    assert note("vLLM Triton", FULL) == "AssertionError: Only causal attention is supported"


def test_what_is_not_installed_says_its_name(monkeypatch):
    for package in ("flash_attn", "flash_attn_interface", "flashinfer", "vllm"):
        monkeypatch.setitem(sys.modules, package, None)
    names = ["FlashAttention 2", "FlashAttention 2 cache", "FlashAttention 3", "FlashInfer", "vLLM Triton"]
    packages = ["flash_attn", "flash_attn", "flash_attn_interface", "flashinfer", "vllm"]
    assert notes(names, EQUAL) == [f"{package} is not installed" for package in packages]


def test_a_row_that_is_wrong_is_noticed():
    host = HostProblem(EQUAL)
    whole = pagedkv.prefill_attention(
        host.q.astype(np.float32), *host.kv, host.block_tables, host.seq_lens, host.query_starts
    )
    for row, value in ((int(host.checked[-1]), 9.0), (5, np.nan)):
        result = whole.copy()
        result[row, 1, 2] = value
        subjects = {FIRST: lambda problem, result=result: lambda: result}
        (measured,) = run.measure(FakeGpu(), EQUAL, subjects, 1, lambda text: None)
        assert measured["us"] is None
        assert measured["note"].startswith("wrong: error")
