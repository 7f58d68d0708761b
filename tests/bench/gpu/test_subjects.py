"""The arguments that subjects of the attention benches get, checked by fakes of their libraries."""

import sys
from types import ModuleType, SimpleNamespace

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


OPTIONS_OF_FLASHINFER = [
    more | {"backend": backend} for backend in ("fa2", "fa3") for more in ({}, {"use_tensor_cores": True})
]


class FakeFlashInfer:
    """Takes plan's arrays as FlashInfer's documentation says: of prefill and of decode, whose queries are one each."""

    def __init__(self, workspace, kv_layout, **options):
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")
        assert options in ({"use_tensor_cores": False}, *OPTIONS_OF_FLASHINFER)

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
    names = [name for name in peers_of(cell).PEERS if "FlashInfer" in name and "XQA" not in name]
    assert names[-2:] == ["FlashInfer fa2", "FlashInfer fa3"]
    wrappers = [f"Batch{operation}WithPagedKVCacheWrapper" for operation in ("Prefill", "Decode")]
    install(monkeypatch, "flashinfer", **dict.fromkeys(wrappers, FakeFlashInfer))
    monkeypatch.setattr(decode_peers, "FLASHINFER_WORKSPACE", 16)
    assert set(notes(names, cell)) == {None}


def test_workspaces_of_flashinfer_are_zero_and_as_large_as_its_documentation_asks_for():
    workspace = decode_peers.flashinfer_workspace(GpuProblem(FakeGpu("torch"), BenchProblem(STEP)))
    assert len(workspace) > 2**27
    assert not workspace[:: 2**20].any()


@pytest.mark.parametrize("cell", [STEP, FP8_STEP], ids=str)
def test_xqa_gets_the_pages(monkeypatch, cell):
    def xqa(q, kv, workspace, tables, lens, longest, *, bmm1_scale, bmm2_scale, kv_layout, out):
        assert (longest, bmm1_scale, bmm2_scale, kv_layout) == (int(lens.max()), 64**-0.5, 1.0, "NHD")
        out[...] = sdpa_of_pages(q, kv, tables, lens, torch.arange(len(q) + 1), True)
        return out

    install(monkeypatch, "flashinfer", decode=SimpleNamespace(xqa_batch_decode_with_kv_cache=xqa))
    monkeypatch.setattr(decode_peers, "FLASHINFER_WORKSPACE", 16)
    assert note("FlashInfer XQA", cell) is None


class FakeCudnn:
    """The module and a graph of it, as far as SDPA needs them: tensors of the graph are (shape, strides)."""

    data_type = SimpleNamespace(HALF="half", BFLOAT16="bfloat16", FLOAT="float")
    heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")

    class Tensor:
        def __init__(self, like=None):
            self.like = like

        def set_output(self, is_output):
            return self

        def set_dim(self, shape):
            self.shape = shape
            return self

        def set_stride(self, strides):
            self.strides = strides
            return self

    def create_handle(self):
        return "handle"

    def set_stream(self, handle, stream):
        assert (handle, stream) == ("handle", 7)

    def pygraph(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert (intermediate_data_type, compute_data_type, handle) == ("float", "float", "handle")
        self.io_data_type = io_data_type
        return self

    def tensor_like(self, array):
        return self.Tensor(array)

    def sdpa(self, name, is_inference, attn_scale, **options):
        assert (name, is_inference, attn_scale) == ("sdpa", True, 64**-0.5)
        self.options, self.result = options, self.Tensor()
        return self.result, None

    def build(self, modes):
        assert modes == ["A", "fallback"]

    def get_workspace_size(self):
        return 0

    def execute(self, buffers, workspace, handle):
        given = {name: buffers[x] for name, x in self.options.items() if isinstance(x, self.Tensor)}
        q, k, v = (given.pop(name) for name in "qkv")
        out, rest = buffers[self.result], {**self.options, **given}
        assert (self.result.shape, self.result.strides) == (list(out.shape), list(out.stride()))
        assert self.io_data_type == {torch.float16: "half", torch.bfloat16: "bfloat16"}[q.dtype]
        causal = rest.pop("use_causal_mask_bottom_right")
        lens = [k.shape[2]] * len(q)
        if "use_padding_mask" in rest:
            tables, lens = rest["paged_attention_k_table"], rest["seq_len_kv"].flatten().tolist()
            assert tables is rest["paged_attention_v_table"]
            assert (rest["seq_len_q"] == q.shape[2]).all()
            assert rest["paged_attention_max_seq_len_kv"] == max(lens)
            k, v = (x[tables[:, 0, :, 0].long()].transpose(1, 2).flatten(2, 3) for x in (k, v))
        for i, length in enumerate(lens):
            keys = [x[i, :, :length].transpose(0, 1) for x in (k, v)]
            out[i] = sdpa(q[i].transpose(0, 1), *keys, causal).transpose(0, 1)


@pytest.mark.parametrize(
    ("name", "cell"),
    [("cuDNN", cell) for cell in (STEP, EQUAL_STEP, EQUAL, FULL)] + [("cuDNN dense", EQUAL), ("cuDNN dense", FULL)],
    ids=str,
)
def test_cudnn_gets_pages_and_dense_keys(monkeypatch, name, cell):
    fake = FakeCudnn()
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    assert note(name, cell) is None
    assert note("cuDNN", FP8_STEP) == "no fp8 cache under 16-bit queries"
    assert note("cuDNN", RAGGED) == "dense q has sequences of one length"


def unified_attention(
    *, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
    block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None, num_par_softmax_segments=None,
    softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None,
):  # fmt: skip
    """vLLM's arguments."""
    assert causal, "Only causal attention is supported"
    assert (window_size, softcap, q_descale, softmax_scale) == ((-1, -1), 0.0, None, 64**-0.5)
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(seqused_k.max()))
    assert k_descale.shape == v_descale.shape == (len(seqused_k), k.shape[2])
    if max_seqlen_q == 1:
        assert (seq_threshold_3D, num_par_softmax_segments) == (64, 16)
        assert softmax_segm_output.shape == (*softmax_segm_max.shape, 64) == (*softmax_segm_expsum.shape, 64)
    out[...] = sdpa_of_pages(q, (k, v), block_table, seqused_k, cu_seqlens_q, causal)


@pytest.mark.parametrize("where", ["vllm.v1.attention.ops", "vllm.attention.ops"])
def test_vllm_gets_the_pages(monkeypatch, where):
    install(monkeypatch, f"{where}.triton_unified_attention", unified_attention=unified_attention)
    assert [note("vLLM Triton", cell) for cell in (RAGGED, FP8, STEP, FP8_STEP)] == [None] * 4
    assert note("vLLM Triton", FULL) == "AssertionError: Only causal attention is supported"


def test_missing_packages_are_named(monkeypatch):
    for package in ("flash_attn", "flash_attn_interface", "flashinfer", "vllm", "cudnn"):
        monkeypatch.setitem(sys.modules, package, None)
    names = ["FlashAttention 2", "FlashAttention 2 cache", "FlashAttention 3", "FlashInfer fa3", "vLLM Triton", "cuDNN"]
    packages = ["flash_attn", "flash_attn", "flash_attn_interface", "flashinfer", "vllm", "cudnn"]
    assert notes(names, EQUAL) == [f"{package} is not installed" for package in packages]
    assert note("FlashInfer XQA", STEP) == "flashinfer is not installed"


def test_the_fastest_configuration_is_chosen():
    gpu = FakeGpu()
    calls = [gpu.subject(name, milliseconds) for name, milliseconds in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    assert decode_peers.fastest(gpu, calls) is calls[1]
