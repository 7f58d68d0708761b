"""The arrays of a problem on a GPU, in the forms that the subjects of the benches take."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...cached_property import cached_property
from ...layouts import FORMATS
from ...typing import Layout
from ..contest import Refused
from ..problem import BenchProblem
from .device import Gpu


class GpuProblem:
    """The arrays of a problem on the GPU; caches in each layout are made on first use.

    Attributes
    ----------
    gpu : Gpu
    host : BenchProblem
    cell : Cell
    q, block_tables, seq_lens, query_starts : array
    """

    def __init__(self, gpu: Gpu, host: BenchProblem) -> None:
        self.gpu, self.host, self.cell = gpu, host, host.cell
        self.q, self.block_tables, self.seq_lens = map(gpu.array, (host.q, host.block_tables, host.seq_lens))
        self.query_starts = gpu.array(host.query_starts)

    def new_out(self) -> Any:
        """Make an array of q's shape and dtype, for a result."""
        return self.gpu.array(np.zeros_like(self.host.q))

    def caches(self, layout: Layout) -> tuple[Any, Any]:
        """K and V in a layout; ValueError if it cannot have the sizes."""
        if layout == "vllm":
            return self.vllm
        return self.nhd if layout == "NHD" else self.hnd

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
        (k_shape, _), _ = FORMATS[self.cell.kv_kind].parts("vllm", num_blocks, block_size, num_kv_heads, head_dim)
        k = k.reshape(num_blocks, block_size, num_kv_heads, -1, k_shape[-1])
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

    @property
    def is_masked(self) -> bool:
        """Whether some query does not see all keys of its sequence."""
        return self.cell.causal and max(self.cell.query_lens) > 1

    def fp8_view(self) -> tuple[Any, Any]:
        """K and V in layout NHD, with torch's own fp8 dtypes."""
        import torch

        k, v = self.nhd
        if self.cell.kv_dtype is None:
            return k, v
        dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[self.cell.kv_dtype]
        return k.view(dtype), v.view(dtype)

    def unquantised(self) -> tuple[Any, Any]:
        """K and V in layout NHD, for subjects that do not take fp8 caches with 16-bit queries."""
        if self.cell.kv_dtype:
            raise Refused("no fp8 cache under 16-bit queries")
        return self.nhd

    def pages(self) -> tuple[npt.NDArray[np.int32], ...]:
        """FlashInfer's page table: where each sequence begins, the pages, and the tokens in each last one."""
        host, size = self.host, self.cell.block_size
        counts = -(-host.seq_lens // size)
        used = np.arange(host.block_tables.shape[1]) < counts[:, None]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return starts, host.block_tables[used], (host.seq_lens - 1) % size + 1
