"""The subjects of bench prefill: pagedkv's kernels, and those of other libraries if installed.

A subject is a function that takes a problem on the GPU and returns a call without arguments, which returns (T, Hq, D),
or (B, n, Hq, D) where all sequences have as many query tokens. It refuses a problem with an exception, whose text
becomes the reason in its row. What does not depend on K and V is made before: page tables, schedules, masks, code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np

from ....operations.attention import prefill_attention
from ....typing import Layout
from ...reasons import Refused
from .. import peers
from ..frameworks import Call, Gpu
from ..peers import fp8_view, pages_of, torch_of
from .workloads import Cell, HostProblem


class Problem(peers.Problem):
    """The arrays of a cell on the GPU; see `peers.Problem`.

    Attributes
    ----------
    query_starts : array
    """

    host: HostProblem
    cell: Cell

    def __init__(self, gpu: Gpu, host: HostProblem) -> None:
        super().__init__(gpu, host)
        self.query_starts = gpu.array(host.query_starts)

    @cached_property
    def dense_q(self) -> Any:
        """q as (B, n, Hq, D); Refused where sequences have different numbers of query tokens."""
        lens = self.cell.query_lens
        if len(set(lens)) > 1:
            raise Refused("dense q has sequences of one length")
        return self.q.reshape(len(lens), lens[0], *self.q.shape[1:])

    @cached_property
    def packed(self) -> tuple[Any, Any]:
        """K and V without pages, one sequence after the other, each (sum of lengths, Hkv, D)."""
        if self.cell.kv_dtype:
            raise Refused("no fp8 K and V")
        size = self.cell.block_size
        slots = np.concatenate(
            [
                (row.astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1)[:length]
                for row, length in zip(self.host.block_tables, self.cell.seq_lens, strict=True)
            ]
        )
        at = self.gpu.array(slots)
        k, v = (cache.reshape(-1, *cache.shape[2:])[at] for cache in self.nhd)
        return k, v


def _pagedkv(problem: Problem, layout: Layout) -> Call:
    k, v = getattr(problem, layout.lower())
    out = problem.new_out()
    return lambda: prefill_attention(
        *(problem.q, k, v, problem.block_tables, problem.seq_lens, problem.query_starts),
        layout=layout,
        causal=problem.cell.causal,
        kv_dtype=problem.cell.kv_dtype,
        out=out,
    )


def _sdpa(problem: Problem) -> Call:
    """SDPA on dense K and V; its causal mask ends at the last key, as torch's lower right one does."""
    torch = torch_of(problem)
    from torch.nn.attention.bias import causal_lower_right

    k, v = problem.dense
    q = problem.gpu.arranged(problem.dense_q, (0, 2, 1, 3))
    mask = causal_lower_right(q.shape[2], k.shape[2]) if problem.cell.causal else None
    attention = torch.nn.functional.scaled_dot_product_attention
    grouped = problem.cell.group_size > 1
    return lambda: attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)


def _flex(problem: Problem) -> Call:
    """flex_attention compiled for this shape, on dense K and V, with a mask of blocks."""
    torch = torch_of(problem)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    k, v = problem.dense
    q = problem.gpu.arranged(problem.dense_q, (0, 2, 1, 3))
    mask = None
    if problem.cell.causal:
        cached = k.shape[2] - q.shape[2]
        mask = create_block_mask(
            lambda b, h, i, j: i + cached >= j, None, None, q.shape[2], k.shape[2], device=q.device
        )
    torch.compiler.reset()  # see bench decode
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    grouped = problem.cell.group_size > 1
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)


def _flash_attention_2(problem: Problem) -> Call:
    """flash_attn_varlen_func on K and V without pages: its pages are multiples of 256 tokens."""
    torch_of(problem)
    from flash_attn import flash_attn_varlen_func

    cell, (k, v) = problem.cell, problem.packed
    starts = problem.gpu.array(np.cumsum([0, *cell.seq_lens], dtype=np.int32))
    longest = max(cell.query_lens), max(cell.seq_lens)
    return lambda: flash_attn_varlen_func(problem.q, k, v, problem.query_starts, starts, *longest, causal=cell.causal)


def _flash_attention_2_cache(problem: Problem) -> Call:
    """flash_attn_with_kvcache on K and V without pages, which splits keys where query tokens are few."""
    torch_of(problem)
    from flash_attn import flash_attn_with_kvcache

    q, causal, lens = problem.dense_q, problem.cell.causal, problem.seq_lens
    k, v = (problem.gpu.arranged(x, (0, 2, 1, 3)) for x in problem.dense)
    return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=causal)


def _flash_attention_3(problem: Problem) -> Call:
    """flash_attn_with_kvcache of flash_attn_interface on the pages, with ragged queries."""
    torch_of(problem)
    from flash_attn_interface import flash_attn_with_kvcache

    if problem.cell.kv_dtype:
        raise Refused("no fp8 cache under 16-bit queries")
    k, v = problem.nhd
    return lambda: flash_attn_with_kvcache(
        *(problem.q, k, v),
        cache_seqlens=problem.seq_lens,
        page_table=problem.block_tables,
        cu_seqlens_q=problem.query_starts,
        max_seqlen_q=max(problem.cell.query_lens),
        causal=problem.cell.causal,
    )


def _flashinfer(problem: Problem) -> Call:
    """BatchPrefillWithPagedKVCacheWrapper in layout NHD, planned in advance: only run() is timed."""
    torch = torch_of(problem)
    import flashinfer

    cell, (k, v) = problem.cell, fp8_view(problem, torch)
    workspace = problem.gpu.array(np.zeros(peers.FLASHINFER_WORKSPACE, np.uint8))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        problem.query_starts,
        *map(problem.gpu.array, pages_of(problem.host)),
        *(cell.num_heads, cell.num_kv_heads, cell.head_dim, cell.block_size),
        causal=cell.causal,
        q_data_type=problem.q.dtype,
        kv_data_type=k.dtype,
    )
    return lambda: wrapper.run(problem.q, (k, v))


def _vllm(problem: Problem) -> Call:
    """vLLM's kernel in Triton for prefill and decode alike."""
    torch = torch_of(problem)
    cell, (k, v), unified_attention = problem.cell, fp8_view(problem, torch), _unified_attention()
    out = problem.new_out()
    one = torch.ones((len(cell.seq_lens), cell.num_kv_heads), dtype=torch.float32, device=out.device)
    arguments = {
        **{"q": problem.q, "k": k, "v": v, "out": out, "block_table": problem.block_tables},
        **{"cu_seqlens_q": problem.query_starts, "max_seqlen_q": max(cell.query_lens)},
        **{"seqused_k": problem.seq_lens, "max_seqlen_k": max(cell.seq_lens)},
        **{"softmax_scale": cell.head_dim**-0.5, "causal": cell.causal, "window_size": (-1, -1), "softcap": 0.0},
        **{"q_descale": None, "k_descale": one, "v_descale": one},
    }

    def call() -> Any:
        unified_attention(**arguments)
        return out

    return call


def _unified_attention() -> Callable[..., None]:
    """From where vLLM has it, or from where older versions have it."""
    import vllm  # noqa: F401

    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ModuleNotFoundError:
        from vllm.attention.ops.triton_unified_attention import unified_attention
    result: Callable[..., None] = unified_attention
    return result


FIRST = "prefill NHD"
OURS: dict[str, Callable[[Problem], Call]] = {
    FIRST: partial(_pagedkv, layout="NHD"),
    "prefill HND": partial(_pagedkv, layout="HND"),
}
FLASH_ATTENTION_2 = "FlashAttention 2"
PEERS: dict[str, Callable[[Problem], Call]] = {
    "SDPA": _sdpa,
    "FlexAttention": _flex,
    FLASH_ATTENTION_2: _flash_attention_2,
    "FlashAttention 2 cache": _flash_attention_2_cache,
    "FlashAttention 3": _flash_attention_3,
    "FlashInfer": _flashinfer,
    "vLLM Triton": _vllm,
}
SUBJECTS = OURS | PEERS
