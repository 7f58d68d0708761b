"""The subjects of bench prefill: pagedkv's kernels, and those of other libraries if installed.

A subject is a function that takes a problem on the GPU and returns a call without arguments, which returns (T, Hq, D),
or (B, n, Hq, D) where all sequences have as many query tokens. It refuses a problem with an exception, whose text
becomes the reason in its row. What does not depend on K and V is made before: page tables, schedules, masks, code.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ...operations.attention import prefill_attention
from ...typing import Layout
from ..contest import Call
from .arrays import GpuProblem
from .decode_peers import Subject, cudnn_sdpa, flashinfer_workspace, flex, sdpa, vllm_unified, with_torch


def _pagedkv(problem: GpuProblem, layout: Layout) -> Call:
    k, v = problem.caches(layout)
    out = problem.new_out()
    return lambda: prefill_attention(
        *(problem.q, k, v, problem.block_tables, problem.seq_lens, problem.query_starts),
        layout=layout,
        causal=problem.cell.causal,
        kv_dtype=problem.cell.kv_dtype,
        out=out,
    )


def _flash_attention_2(problem: GpuProblem) -> Call:
    """flash_attn_varlen_func on K and V without pages: its pages are multiples of 256 tokens."""
    from flash_attn import flash_attn_varlen_func

    cell, (k, v) = problem.cell, problem.packed
    starts = problem.gpu.array(np.cumsum([0, *cell.seq_lens], dtype=np.int32))
    longest = max(cell.query_lens), max(cell.seq_lens)
    return lambda: flash_attn_varlen_func(problem.q, k, v, problem.query_starts, starts, *longest, causal=cell.causal)


def _flash_attention_2_cache(problem: GpuProblem) -> Call:
    """flash_attn_with_kvcache on K and V without pages, which splits keys where query tokens are few."""
    from flash_attn import flash_attn_with_kvcache

    q, causal, lens = problem.dense_q, problem.cell.causal, problem.seq_lens
    k, v = (problem.gpu.arranged(x, (0, 2, 1, 3)) for x in problem.dense)
    return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=causal)


def _flash_attention_3(problem: GpuProblem) -> Call:
    """flash_attn_with_kvcache of flash_attn_interface on the pages, with ragged queries."""
    from flash_attn_interface import flash_attn_with_kvcache

    k, v = problem.unquantised()
    return lambda: flash_attn_with_kvcache(
        *(problem.q, k, v),
        cache_seqlens=problem.seq_lens,
        page_table=problem.block_tables,
        cu_seqlens_q=problem.query_starts,
        max_seqlen_q=max(problem.cell.query_lens),
        causal=problem.cell.causal,
    )


def _flashinfer(problem: GpuProblem, backend: str) -> Call:
    """BatchPrefillWithPagedKVCacheWrapper in layout NHD, planned in advance: only run() is timed."""
    import flashinfer

    cell, (k, v) = problem.cell, problem.fp8_view()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(flashinfer_workspace(problem), "NHD", backend=backend)
    wrapper.plan(
        problem.query_starts,
        *map(problem.gpu.array, problem.pages()),
        *(cell.num_heads, cell.num_kv_heads, cell.head_dim, cell.block_size),
        causal=cell.causal,
        q_data_type=problem.q.dtype,
        kv_data_type=k.dtype,
    )
    return lambda: wrapper.run(problem.q, (k, v))


FIRST = "prefill NHD"
OURS: dict[str, Subject] = {
    FIRST: partial(_pagedkv, layout="NHD"),
    "prefill HND": partial(_pagedkv, layout="HND"),
}
FLASH_ATTENTION_2 = "FlashAttention 2"
PEERS = with_torch(
    {
        "SDPA": sdpa,
        "cuDNN": partial(cudnn_sdpa, paged=True),
        "cuDNN dense": partial(cudnn_sdpa, paged=False),
        "FlexAttention": flex,
        FLASH_ATTENTION_2: _flash_attention_2,
        "FlashAttention 2 cache": _flash_attention_2_cache,
        "FlashAttention 3": _flash_attention_3,
        "FlashInfer fa2": partial(_flashinfer, backend="fa2"),
        "FlashInfer fa3": partial(_flashinfer, backend="fa3"),
        "vLLM Triton": vllm_unified,
    }
)
SUBJECTS = OURS | PEERS
