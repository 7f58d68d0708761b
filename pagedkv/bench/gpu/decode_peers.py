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
VLLM_PARTITION = 512

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


def _flashinfer(problem: GpuProblem, *, tensor_cores: bool) -> Call:
    """BatchDecodeWithPagedKVCacheWrapper in layout NHD, planned in advance: only run() is timed."""
    import flashinfer

    cell, (k, v) = problem.cell, problem.fp8_view()
    workspace = problem.gpu.array(np.zeros(FLASHINFER_WORKSPACE, np.uint8))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        *map(problem.gpu.array, problem.pages()),
        *(cell.num_heads, cell.num_kv_heads, cell.head_dim, cell.block_size),
        pos_encoding_mode="NONE",
        q_data_type=problem.q.dtype,
        kv_data_type=k.dtype,
    )
    return lambda: wrapper.run(problem.q, (k, v))


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


def _vllm(problem: GpuProblem, *, version: int) -> Call:
    """vLLM's paged_attention_v1 and v2, of a version that still has them."""
    import torch
    from vllm import _custom_ops as ops

    cell, out = problem.cell, problem.new_out()
    k, v = problem.vllm
    longest = max(cell.seq_lens)
    one = torch.ones((), dtype=torch.float32, device=out.device)
    last = (cell.num_kv_heads, cell.head_dim**-0.5, problem.block_tables, problem.seq_lens, cell.block_size, longest)
    inputs = (problem.q, k, v, *last, None, cell.kv_dtype or "auto", one, one)
    if version == 1:
        operation, outputs = ops.paged_attention_v1, [out]
    else:
        shape = (*out.shape[:2], -(-longest // VLLM_PARTITION))
        sums, largest = (torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2))
        parts = torch.empty((*shape, cell.head_dim), dtype=out.dtype, device=out.device)
        operation, outputs = ops.paged_attention_v2, [out, sums, largest, parts]

    def call() -> Any:
        operation(*outputs, *inputs)
        return out

    return call


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
        "FlashInfer": partial(_flashinfer, tensor_cores=False),
        "FlashInfer TC": partial(_flashinfer, tensor_cores=True),
        "Triton": _triton,
        "FlashAttention 2": partial(_flash_attention, version=2),
        "FlashAttention 3": partial(_flash_attention, version=3),
        "vLLM v1": partial(_vllm, version=1),
        "vLLM v2": partial(_vllm, version=2),
    }
)
SUBJECTS = OURS | PEERS
