"""The subjects of bench decode: pagedkv's kernels, and those of other libraries if installed.

A subject is a function that takes a problem on the GPU and returns a call without arguments, which returns (B, Hq, D)
in any shape. It refuses a problem with an exception, whose text becomes the reason in its row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...operations.attention import decode_attention
from ...typing import Kernel, Layout
from ..contest import Call, Refused, median
from .arrays import GpuProblem
from .device import Gpu
from .measure import sample

# Triton's candidates: tokens of a step, and programs for each multiprocessor.
TRITON_TILES = (32, 64, 128)
TRITON_WAVES = (2, 4, 8)
TRITON_WARPS, TRITON_STAGES = 4, 3
FLASHINFER_WORKSPACE = 2**28
# What vLLM's backend gives its kernel: segments of a sequence, and the thread blocks below which a step has any.
VLLM_SEGMENTS, VLLM_FEW = 16, 128

Subject = Callable[[GpuProblem], Call]


def _pagedkv(problem: GpuProblem, layout: Layout, kernel: Kernel) -> Call:
    k, v = problem.caches(layout)
    out = problem.new_out()
    return lambda: decode_attention(
        *(problem.q, k, v, problem.block_tables, problem.seq_lens),
        layout=layout,
        kv_dtype=problem.cell.kv_dtype,
        kernel=kernel,
        out=out,
    )


def with_torch(subjects: dict[str, Subject]) -> dict[str, Subject]:
    """Wrap subjects to refuse arrays other than torch's."""

    def made(subject: Subject, problem: GpuProblem) -> Call:
        if problem.gpu.framework != "torch":
            raise Refused("needs torch with CUDA")
        return subject(problem)

    return {name: partial(made, subject) for name, subject in subjects.items()}


def sdpa(problem: GpuProblem) -> Call:
    """SDPA on dense K and V; its causal mask ends at the last key, as torch's lower right one does."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    k, v = problem.dense
    q = problem.gpu.arranged(problem.dense_q, (0, 2, 1, 3))
    mask = causal_lower_right(q.shape[2], k.shape[2]) if problem.is_masked else None
    attention, grouped = torch.nn.functional.scaled_dot_product_attention, problem.cell.group_size > 1
    return lambda: attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)


def _sdpa_rows(problem: GpuProblem) -> Call:
    """SDPA on dense K and V, with the G query heads of a KV head as G query rows."""
    import torch

    k, v = problem.dense
    cell = problem.cell
    q = problem.q.view(-1, cell.num_kv_heads, cell.group_size, cell.head_dim)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)


def flex(problem: GpuProblem) -> Call:
    """flex_attention compiled for this shape, on dense K and V, with a mask of blocks if there is one."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    k, v = problem.dense
    q = problem.gpu.arranged(problem.dense_q, (0, 2, 1, 3))
    num_queries, num_keys, mask = q.shape[2], k.shape[2], None
    if problem.is_masked:
        cached = num_keys - num_queries
        mask = create_block_mask(lambda b, h, i, j: i + cached >= j, None, None, num_queries, num_keys, device=q.device)
    torch.compiler.reset()  # code for earlier shapes counts towards a limit, past which torch runs uncompiled
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    grouped = problem.cell.group_size > 1
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)


def _flashinfer(problem: GpuProblem, backend: str) -> Call:
    """BatchDecodeWithPagedKVCacheWrapper in layout NHD, planned in advance: only run() is timed.

    The backend "cuda cores" takes none of its own; "fa2" and "fa3" are those on tensor cores.
    """
    import flashinfer

    cell, (k, v) = problem.cell, problem.fp8_view()
    on_cores = (
        {"use_tensor_cores": False} if backend == "cuda cores" else {"use_tensor_cores": True, "backend": backend}
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(flashinfer_workspace(problem), "NHD", **on_cores)
    wrapper.plan(
        *map(problem.gpu.array, problem.pages()),
        *(cell.num_heads, cell.num_kv_heads, cell.head_dim, cell.block_size),
        pos_encoding_mode="NONE",
        q_data_type=problem.q.dtype,
        kv_data_type=k.dtype,
    )
    return lambda: wrapper.run(problem.q, (k, v))


def _xqa(problem: GpuProblem) -> Call:
    """FlashInfer's XQA, from TensorRT-LLM: it needs no plan, and pages of 16 to 128 tokens."""
    import flashinfer

    cell, out, xqa = problem.cell, problem.new_out(), flashinfer.decode.xqa_batch_decode_with_kv_cache
    inputs = (problem.q, problem.fp8_view(), flashinfer_workspace(problem), problem.block_tables, problem.seq_lens)
    scales = {"bmm1_scale": cell.head_dim**-0.5, "bmm2_scale": 1.0}
    return lambda: xqa(*inputs, max(cell.seq_lens), **scales, kv_layout="NHD", out=out)


def flashinfer_workspace(problem: GpuProblem) -> Any:
    """A workspace of FlashInfer's, which has to be zero when it is first used."""
    return problem.gpu.array(np.zeros(FLASHINFER_WORKSPACE, np.uint8))


def cudnn_sdpa(problem: GpuProblem, *, paged: bool) -> Call:
    """cuDNN's SDPA by its own frontend, on pages in HND or on dense K and V; its graph is built in advance."""
    import cudnn
    import torch

    cell, q = problem.cell, problem.dense_q.transpose(1, 2)
    if cell.kv_dtype:
        raise Refused("no fp8 cache under 16-bit queries")
    k, v = problem.hnd if paged else problem.dense
    out = torch.empty_like(problem.dense_q).transpose(1, 2)
    types, lens = cudnn.data_type, (len(cell.seq_lens), 1, 1, 1)
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(
        io_data_type={torch.float16: types.HALF, torch.bfloat16: types.BFLOAT16}[q.dtype],
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )
    arrays = {"q": q, "k": k, "v": v}
    options: dict[str, bool | int] = {"use_causal_mask_bottom_right": problem.is_masked}
    if paged:
        tables = problem.block_tables[:, None, :, None]
        arrays |= {"paged_attention_k_table": tables, "paged_attention_v_table": tables}
        arrays |= {"seq_len_q": problem.query_starts.diff().view(lens), "seq_len_kv": problem.seq_lens.view(lens)}
        options |= {"use_padding_mask": True, "paged_attention_max_seq_len_kv": max(cell.seq_lens)}
    tensors = {name: graph.tensor_like(array) for name, array in arrays.items()}
    result, _ = graph.sdpa(**tensors, **options, name="sdpa", is_inference=True, attn_scale=cell.head_dim**-0.5)
    result.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=out.device)
    buffers = {tensors[name]: array for name, array in arrays.items()} | {result: out}

    def call() -> Any:
        graph.execute(buffers, workspace, handle=handle)
        return out.transpose(1, 2)

    return call


def _flash_attention(problem: GpuProblem, *, version: int) -> Call:
    """flash_attn_with_kvcache on the pages, from flash_attn (2) or flash_attn_interface (3)."""
    if version == 2:
        from flash_attn import flash_attn_with_kvcache

        tables = {"block_table": problem.block_tables}
    else:
        from flash_attn_interface import flash_attn_with_kvcache

        tables = {"page_table": problem.block_tables}
    k, v = problem.unquantised()
    q = problem.q.unsqueeze(1)
    return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=problem.seq_lens, **tables)


def _triton(problem: GpuProblem) -> Call:
    """The fastest of nine configurations of `triton_decode`, which are timed first."""
    from .triton_decode import TritonDecode

    cell = problem.cell
    if cell.head_dim & (cell.head_dim - 1):
        raise Refused("head_dim is no power of two")
    k, v = problem.fp8_view()
    inputs = (problem.q, k, v, problem.block_tables, problem.seq_lens)
    programs, processors = len(problem.q) * cell.num_kv_heads, problem.gpu.num_multiprocessors
    calls: dict[tuple[int, int], Call] = {}
    for tile in TRITON_TILES:
        for waves in TRITON_WAVES:
            num_splits = min(-(-waves * processors // programs), -(-max(cell.seq_lens) // tile))
            calls[num_splits, tile] = TritonDecode(*inputs, num_splits, tile, TRITON_WARPS, TRITON_STAGES)
    return fastest(problem.gpu, list(calls.values()))


def fastest(gpu: Gpu, calls: list[Call]) -> Call:
    """Choose the call with the shortest median of five launches, after a warm-up."""

    def seconds(call: Call) -> float:
        call()
        return median([sample(gpu, call, 1).seconds for _ in range(5)])

    return min(calls, key=seconds)


def vllm_unified(problem: GpuProblem) -> Call:
    """vLLM's Triton kernel on the pages, which serves prefill and decode; few sequences of a step in segments."""
    import torch

    cell, (k, v), unified_attention = problem.cell, problem.fp8_view(), _unified_attention()
    out = problem.new_out()
    one = torch.ones((len(cell.seq_lens), cell.num_kv_heads), dtype=torch.float32, device=out.device)
    arguments = {
        **{"q": problem.q, "k": k, "v": v, "out": out, "block_table": problem.block_tables},
        **{"cu_seqlens_q": problem.query_starts, "max_seqlen_q": max(cell.query_lens)},
        **{"seqused_k": problem.seq_lens, "max_seqlen_k": max(cell.seq_lens)},
        **{"softmax_scale": cell.head_dim**-0.5, "causal": cell.causal, "window_size": (-1, -1), "softcap": 0.0},
        **{"q_descale": None, "k_descale": one, "v_descale": one},
    }
    if max(cell.query_lens) == 1:  # as its backend plans a step
        shape = (len(cell.seq_lens), cell.num_heads, VLLM_SEGMENTS)
        sums, largest = (torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2))
        parts = torch.empty((*shape, 1 << (cell.head_dim - 1).bit_length()), dtype=torch.float32, device=out.device)
        arguments |= {"seq_threshold_3D": VLLM_FEW // cell.num_kv_heads, "num_par_softmax_segments": VLLM_SEGMENTS}
        arguments |= {"softmax_segm_output": parts, "softmax_segm_max": largest, "softmax_segm_expsum": sums}

    def call() -> Any:
        unified_attention(**arguments)
        return out

    return call


def _unified_attention() -> Callable[..., None]:
    """Import vLLM's kernel from its current or its older place."""
    import vllm  # noqa: F401

    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ModuleNotFoundError:
        from vllm.attention.ops.triton_unified_attention import unified_attention
    result: Callable[..., None] = unified_attention
    return result


FIRST = "split NHD"
OURS: dict[str, Subject] = {
    FIRST: partial(_pagedkv, layout="NHD", kernel="split"),
    "split HND": partial(_pagedkv, layout="HND", kernel="split"),
    "v1": partial(_pagedkv, layout="vllm", kernel="v1"),
    "v2": partial(_pagedkv, layout="vllm", kernel="v2"),
}
PEERS = with_torch(
    {
        "SDPA": sdpa,
        "SDPA rows": _sdpa_rows,
        "FlexAttention": flex,
        "cuDNN": partial(cudnn_sdpa, paged=True),
        "FlashInfer": partial(_flashinfer, backend="cuda cores"),
        "FlashInfer fa2": partial(_flashinfer, backend="fa2"),
        "FlashInfer fa3": partial(_flashinfer, backend="fa3"),
        "FlashInfer XQA": _xqa,
        "Triton": _triton,
        "FlashAttention 2": partial(_flash_attention, version=2),
        "FlashAttention 3": partial(_flash_attention, version=3),
        "vLLM Triton": vllm_unified,
    }
)
SUBJECTS = OURS | PEERS
