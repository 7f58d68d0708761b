"""The arguments that subjects of the attention benches get, checked by fakes of their libraries."""

import sys
from types import ModuleType

import pytest
import torch

import pagedkv
from pagedkv.bench.gpu import decode_peers, measure, prefill_peers
from pagedkv.bench.gpu.arrays import GpuProblem
from pagedkv.bench.problem import BenchProblem, Cell

from ...support.device_fakes import InterfaceArray, recording
from .fake_gpu import FakeGpu

pytestmark = pytest.mark.usefixtures("one_launch")
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
RAGGED = Cell("x", (40, 3, 33), query_lens=(17, 1, 33), **SIZES)
EQUAL = Cell("x", (40, 40), query_lens=(17, 17), **SIZES)
FULL = Cell("x", (40, 40), query_lens=(17, 17), causal=False, **SIZES)
FP8 = Cell("x", (40, 3), kv_dtype="fp8_e4m3", query_lens=(17, 2), **SIZES)
STEP = Cell("x", (40, 3, 32), dtype="bfloat16", **SIZES)
EQUAL_STEP = Cell("x", (40, 40), **SIZES)
FP8_STEP = Cell("x", (40, 3), kv_dtype="fp8_e4m3", **SIZES)


def peers_of(cell):
    return decode_peers if max(cell.query_lens) == 1 else prefill_peers


def notes(subjects, cell, framework="torch"):
    peers = peers_of(cell)
    chosen = {name: peers.SUBJECTS[name] for name in subjects}
    rows = measure.measure(FakeGpu(framework), "prefill", cell, chosen, peers.FIRST, 1, lambda text: None)
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


@pytest.mark.parametrize("cell", [RAGGED, FULL, FP8, EQUAL_STEP, FP8_STEP], ids=str)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_kernels_of_pagedkv_get_each_layout(cell, framework):
    """On the host all layouts run the same code: this test is about the arrays that subjects get."""
    assert set(notes(peers_of(cell).OURS, cell, framework)) == {None}


@pytest.mark.parametrize(
    ("name", "launches"),
    [("v1", ["v1"]), ("v2", ["v2", "v2_reduce"]), ("split NHD", ["split"]), ("split HND", ["split"])],
)
def test_kernels_of_pagedkv_are_launched_for_device_arrays(monkeypatch, name, launches):
    def on_device(*args, out, **options):
        return pagedkv.decode_attention(*map(InterfaceArray, args), out=InterfaceArray(out), **options)

    monkeypatch.setattr(decode_peers, "decode_attention", on_device)
    call = decode_peers.SUBJECTS[name](GpuProblem(FakeGpu(), BenchProblem(EQUAL_STEP)))
    with recording() as devices:
        call()
    (device,) = devices.values()
    assert [kernel.name.partition("[")[0] for kernel, *_ in device.launches] == launches


@pytest.mark.parametrize("cell", [EQUAL, EQUAL_STEP], ids=str)
def test_torch_peers_without_torch(cell):
    assert set(notes(peers_of(cell).PEERS, cell, "numpy")) == {"needs torch with CUDA"}


def test_sdpa_is_right_on_dense_keys_and_refuses_the_rest():
    whole = Cell("x", (40, 40), query_lens=(40, 40), **SIZES)
    assert [note("SDPA", cell) for cell in (EQUAL, FULL, whole, EQUAL_STEP)] == [None] * 4
    assert note("SDPA rows", EQUAL_STEP) is None
    ragged = "dense K and V have sequences of one length"
    assert {note("SDPA", cell) for cell in (RAGGED, FP8, STEP)} == {ragged}
    assert note("SDPA", Cell("x", (40, 40), query_lens=(17, 16), **SIZES)) == "dense q has sequences of one length"
    assert note("SDPA", Cell("x", (40,), kv_dtype="fp8_e4m3", **SIZES)) == "no fp8 K and V"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_right_and_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled.append(options) or f)
    assert [note("FlexAttention", cell) for cell in (EQUAL, FULL, EQUAL_STEP)] == [None] * 3
    assert compiled.count({"dynamic": False, "fullgraph": True}) == 3  # torch compiles what it needs besides


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


@pytest.mark.parametrize(
    ("version", "package", "tables"), [(2, "flash_attn", "block_table"), (3, "flash_attn_interface", "page_table")]
)
def test_flash_attention_gets_the_pages_of_a_step(monkeypatch, version, package, tables):
    def flash_attn_with_kvcache(q, k, v, *, cache_seqlens, **options):
        return pagedkv.decode_attention(q[:, 0], k, v, options.pop(tables), cache_seqlens, **options)[:, None]

    install(monkeypatch, package, flash_attn_with_kvcache=flash_attn_with_kvcache)
    assert note(f"FlashAttention {version}", STEP) is None
    assert note(f"FlashAttention {version}", FP8_STEP) == "no fp8 cache under 16-bit queries"


class FakeFlashInfer:
    """Takes plan's arrays as FlashInfer's documentation says: of prefill and of decode, whose queries are one each."""

    def __init__(self, workspace, kv_layout, **options):
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")

    def plan(self, *arrays, q_data_type, kv_data_type, causal=True, pos_encoding_mode="NONE"):
        *starts, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size = arrays
        assert (num_qo_heads, num_kv_heads, head_dim, pos_encoding_mode) == (4, 2, 64, "NONE")
        counts = indptr.diff()
        self.starts = starts[0] if starts else torch.arange(len(counts) + 1, dtype=torch.int32)
        for x in (self.starts, indptr, indices, last_page_len):
            assert x.dtype == torch.int32
        self.causal, self.dtypes = causal, (q_data_type, kv_data_type)
        self.lens = (counts - 1) * page_size + last_page_len
        self.tables = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32)
        for i, count in enumerate(counts):
            self.tables[i, :count] = indices[indptr[i] : indptr[i + 1]]

    def run(self, q, kv):
        assert (q.dtype, kv[0].dtype) == self.dtypes
        return sdpa_of_pages(q, kv, self.tables, self.lens, self.starts, self.causal)


@pytest.mark.parametrize("cell", [RAGGED, FULL, FP8, STEP, FP8_STEP], ids=str)
def test_flashinfer_gets_the_pages(monkeypatch, cell):
    names = ["FlashInfer", "FlashInfer TC"] if peers_of(cell) is decode_peers else ["FlashInfer"]
    wrappers = [f"Batch{operation}WithPagedKVCacheWrapper" for operation in ("Prefill", "Decode")]
    install(monkeypatch, "flashinfer", **dict.fromkeys(wrappers, FakeFlashInfer))
    for peers in (decode_peers, prefill_peers):
        assert peers.FLASHINFER_WORKSPACE > 2**27  # what its documentation asks for
        monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE", 16)
    assert set(notes(names, cell)) == {None}


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


def test_missing_packages_are_named(monkeypatch):
    for package in ("flash_attn", "flash_attn_interface", "flashinfer", "vllm"):
        monkeypatch.setitem(sys.modules, package, None)
    names = ["FlashAttention 2", "FlashAttention 2 cache", "FlashAttention 3", "FlashInfer", "vLLM Triton"]
    packages = ["flash_attn", "flash_attn", "flash_attn_interface", "flashinfer", "vllm"]
    assert notes(names, EQUAL) == [f"{package} is not installed" for package in packages]


def test_the_fastest_configuration_is_chosen():
    gpu = FakeGpu()
    calls = [gpu.subject(name, milliseconds) for name, milliseconds in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    assert decode_peers.fastest(gpu, calls) is calls[1]
