"""The subjects of bench decode: pagedkv's kernels, and those of other libraries if installed.

A subject is a function that takes a problem on the GPU and returns a call without arguments, which returns (B, Hq, D)
in any shape. It refuses a problem with an exception, whose text becomes the reason in its row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...layouts import cache_shapes
from ...operations.attention import decode_attention
from ...typing import Kernel, Layout
from ..reasons import Refused
from ..report import median
from .frameworks import Call, Gpu
from .samples import sample
from .workloads import HostProblem

# Triton's candidates: tokens of a step, and programs for each multiprocessor.
TRITON_TILES = (32, 64, 128)
TRITON_WAVES = (2, 4, 8)
TRITON_WARPS, TRITON_STAGES = 4, 3
FLASHINFER_WORKSPACE = 2**28
VLLM_PARTITION = 512


class Problem:
    """The arrays of a cell on the GPU; caches in each layout are made on first use.

    Attributes
    ----------
    gpu : Gpu
    host : HostProblem
    cell : Cell
    q, block_tables, seq_lens : array
    """

    def __init__(self, gpu: Gpu, host: HostProblem) -> None:
        self.gpu, self.host, self.cell = gpu, host, host.cell
        self.q, self.block_tables, self.seq_lens = map(gpu.array, (host.q, host.block_tables, host.seq_lens))

    def new_out(self) -> Any:
        """A new (B, Hq, D) of q's dtype, for a result."""
        return self.gpu.array(np.zeros_like(self.host.q))

    @cached_property
    def nhd(self) -> tuple[Any, Any]:
        """K and V, each (N, P, Hkv, D)."""
        return self.gpu.array(self.host.kv[0]), self.gpu.array(self.host.kv[1])

    @cached_property
    def hnd(self) -> tuple[Any, Any]:
        """K and V, each (N, Hkv, P, D)."""
        k, v = self.nhd
        return self.gpu.arranged(k, (0, 2, 1, 3)), self.gpu.arranged(v, (0, 2, 1, 3))

    @cached_property
    def vllm(self) -> tuple[Any, Any]:
        """K (N, Hkv, D / x, P, x) and V (N, Hkv, D, P); ValueError if the layout cannot have the sizes."""
        k, v = self.nhd
        num_blocks, block_size, num_kv_heads, head_dim = k.shape
        itemsize = self.host.kv.itemsize
        cache_shapes("vllm", num_blocks, block_size, num_kv_heads, head_dim, itemsize)
        k = k.reshape(num_blocks, block_size, num_kv_heads, -1, 16 // itemsize)
        return self.gpu.arranged(k, (0, 2, 3, 1, 4)), self.gpu.arranged(v, (0, 2, 3, 1))

    @cached_property
    def dense(self) -> tuple[Any, Any]:
        """K and V without pages, each (B, Hkv, L, D) and contiguous, as torch tensors."""
        if self.cell.is_ragged:
            raise Refused("dense K and V have sequences of one length")
        if self.cell.kv_dtype:
            raise Refused("no fp8 K and V")
        tables, (num_seqs, length) = self.block_tables.long(), (len(self.cell.seq_lens), self.cell.seq_lens[0])

        def gathered(cache: Any) -> Any:
            tokens = cache[tables].reshape(num_seqs, -1, *cache.shape[2:])[:, :length]
            return self.gpu.arranged(tokens, (0, 2, 1, 3))

        return gathered(self.nhd[0]), gathered(self.nhd[1])


def torch_of(problem: Problem) -> Any:
    """torch, if the arrays are its tensors."""
    if problem.gpu.framework != "torch":
        raise Refused("needs torch with CUDA")
    import torch

    return torch


def fp8_view(problem: Problem, torch: Any) -> tuple[Any, Any]:
    """K and V in layout NHD, with torch's own fp8 dtypes."""
    k, v = problem.nhd
    if problem.cell.kv_dtype is None:
        return k, v
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[problem.cell.kv_dtype]
    return k.view(dtype), v.view(dtype)


def _pagedkv(problem: Problem, layout: Layout, kernel: Kernel) -> Call:
    k, v = getattr(problem, layout.lower())
    out = problem.new_out()
    return lambda: decode_attention(
        *(problem.q, k, v, problem.block_tables, problem.seq_lens),
        layout=layout,
        kv_dtype=problem.cell.kv_dtype,
        kernel=kernel,
        out=out,
    )


def _sdpa(problem: Problem, *, rows: bool) -> Call:
    """SDPA on dense K and V: a KV head's G query heads as heads (enable_gqa) or as G query rows."""
    torch = torch_of(problem)
    k, v = problem.dense
    num_seqs, cell = len(problem.q), problem.cell
    attention = torch.nn.functional.scaled_dot_product_attention
    if rows:
        q = problem.q.view(num_seqs, cell.num_kv_heads, cell.group_size, cell.head_dim)
        return lambda: attention(q, k, v)
    q = problem.q.view(num_seqs, cell.num_heads, 1, cell.head_dim)
    return lambda: attention(q, k, v, enable_gqa=cell.group_size > 1)


def _flex(problem: Problem) -> Call:
    """flex_attention compiled for this shape, on dense K and V, without a mask."""
    torch = torch_of(problem)
    from torch.nn.attention.flex_attention import flex_attention

    k, v = problem.dense
    q = problem.q.view(len(problem.q), problem.cell.num_heads, 1, problem.cell.head_dim)
    # Code for earlier shapes counts towards a limit, past which torch silently runs uncompiled.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda: compiled(q, k, v, enable_gqa=problem.cell.group_size > 1)


def pages_of(host: HostProblem) -> tuple[npt.NDArray[np.int32], ...]:
    """FlashInfer's page table: where each sequence begins, the pages, and the tokens in each last one."""
    counts = -(-host.seq_lens // host.cell.block_size)
    used = np.arange(host.block_tables.shape[1]) < counts[:, None]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return starts, host.block_tables[used], (host.seq_lens - 1) % host.cell.block_size + 1


def _flashinfer(problem: Problem, *, tensor_cores: bool) -> Call:
    """BatchDecodeWithPagedKVCacheWrapper in layout NHD, planned in advance: only run() is timed."""
    torch = torch_of(problem)
    import flashinfer

    cell, host = problem.cell, problem.host
    k, v = fp8_view(problem, torch)
    workspace = problem.gpu.array(np.zeros(FLASHINFER_WORKSPACE, np.uint8))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        *map(problem.gpu.array, pages_of(host)),
        *(cell.num_heads, cell.num_kv_heads, cell.head_dim, cell.block_size),
        pos_encoding_mode="NONE",
        q_data_type=problem.q.dtype,
        kv_data_type=k.dtype,
    )
    return lambda: wrapper.run(problem.q, (k, v))


def _flash_attention(problem: Problem, *, version: int) -> Call:
    """flash_attn_with_kvcache on the pages, from flash_attn (2) or flash_attn_interface (3)."""
    torch_of(problem)
    if version == 2:
        from flash_attn import flash_attn_with_kvcache

        tables = {"block_table": problem.block_tables}
    else:
        from flash_attn_interface import flash_attn_with_kvcache

        tables = {"page_table": problem.block_tables}
    if problem.cell.kv_dtype:
        raise Refused("no fp8 cache under 16-bit queries")
    k, v = problem.nhd
    q = problem.q.unsqueeze(1)
    return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=problem.seq_lens, **tables)


def _triton(problem: Problem) -> Call:
    """The fastest of nine configurations of `triton_decode`, found by timing them."""
    torch = torch_of(problem)
    from .triton_decode import TritonDecode

    cell = problem.cell
    if cell.head_dim & (cell.head_dim - 1):
        raise Refused("head_dim is no power of two")
    k, v = fp8_view(problem, torch)
    inputs = (problem.q, k, v, problem.block_tables, problem.seq_lens)
    programs, processors = len(problem.q) * cell.num_kv_heads, problem.gpu.num_multiprocessors
    calls: dict[tuple[int, int], Call] = {}
    for tile in TRITON_TILES:
        for waves in TRITON_WAVES:
            num_splits = min(-(-waves * processors // programs), -(-max(cell.seq_lens) // tile))
            calls[num_splits, tile] = TritonDecode(*inputs, num_splits, tile, TRITON_WARPS, TRITON_STAGES)
    return fastest(problem.gpu, list(calls.values()))


def fastest(gpu: Gpu, calls: list[Call]) -> Call:
    """The call with the shortest median of five launches, after a warm-up."""

    def milliseconds(call: Call) -> float:
        call()
        return median([sample(gpu, call, 1).milliseconds for _ in range(5)])

    return min(calls, key=milliseconds)


def _vllm(problem: Problem, *, version: int) -> Call:
    """vLLM's paged_attention_v1 and v2, of a version that still has them."""
    torch = torch_of(problem)
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
OURS: dict[str, Callable[[Problem], Call]] = {
    FIRST: partial(_pagedkv, layout="NHD", kernel="split"),
    "split HND": partial(_pagedkv, layout="HND", kernel="split"),
    "v1": partial(_pagedkv, layout="vllm", kernel="v1"),
    "v2": partial(_pagedkv, layout="vllm", kernel="v2"),
}
PEERS: dict[str, Callable[[Problem], Call]] = {
    "SDPA": partial(_sdpa, rows=False),
    "SDPA rows": partial(_sdpa, rows=True),
    "FlexAttention": _flex,
    "FlashInfer": partial(_flashinfer, tensor_cores=False),
    "FlashInfer TC": partial(_flashinfer, tensor_cores=True),
    "Triton": _triton,
    "FlashAttention 2": partial(_flash_attention, version=2),
    "FlashAttention 3": partial(_flash_attention, version=3),
    "vLLM v1": partial(_vllm, version=1),
    "vLLM v2": partial(_vllm, version=2),
}
SUBJECTS = OURS | PEERS
# The peers' packages, for the versions in the header.
PACKAGES = ("torch", "cupy", "triton", "flashinfer-python", "flash-attn", "flash-attn-3", "vllm", "numba-cuda")
