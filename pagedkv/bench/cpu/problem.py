"""A decode step for all contestants: the same queries, keys and values, and what should come out."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ... import reference
from ...layouts import FP8_KINDS

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
# Largest error allowed, relative to the largest expected magnitude. Over fp8 some round q to bfloat16.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3, "fp8_e4m3": 2e-2, "fp8_e5m2": 2e-2}


def random_pages(dtype: str, num_tokens: int, num_kv_heads: int = NUM_KV_HEADS) -> npt.NDArray[Any]:
    """K and V caches (2, N, P, Hkv, D) of normal values; of fp8 the codes."""
    values = np.random.default_rng(0).standard_normal(2**20, np.float32).astype(DTYPES[dtype])
    pages = np.resize(values, (2, num_tokens // BLOCK_SIZE, BLOCK_SIZE, num_kv_heads, HEAD_DIM))
    return pages.view(np.uint8) if dtype.startswith("fp8") else pages


class Problem:
    """One token for each of num_seqs sequences of `length` tokens, whose blocks are in random order.

    Attributes
    ----------
    dtype : str
        The cache's.
    kv_dtype : str or None
        As `decode_attention` takes it.
    q : (num_seqs, num_heads, head_dim) array
        Of the cache's dtype; float32 over fp8.
    pages : (2, N, P, Hkv, D) array
        The keys and the values.
    block_tables, seq_lens : array of int32
    """

    def __init__(self, dtype: str, group_size: int, num_seqs: int, length: int) -> None:
        self.dtype, self.group_size, self.num_seqs, self.length = dtype, group_size, num_seqs, length
        self.kv_dtype = next((kind for kind in FP8_KINDS if kind == dtype), None)
        rng = np.random.default_rng(1)
        self.pages = random_pages(dtype, num_seqs * length)
        self.block_tables = rng.permutation(self.pages.shape[1]).astype(np.int32).reshape(num_seqs, -1)
        self.seq_lens = np.full(num_seqs, length, np.int32)
        q = rng.standard_normal((num_seqs, NUM_KV_HEADS * group_size, HEAD_DIM))
        self.q = q.astype(np.float32 if self.kv_dtype else DTYPES[dtype])

    def tokens(self, i: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Keys and values of sequence i in order, each (L, Hkv, D)."""
        k, v = (cache[self.block_tables[i]].reshape(self.length, NUM_KV_HEADS, HEAD_DIM) for cache in self.pages)
        return k, v

    @cached_property
    def expected(self) -> dict[int, npt.NDArray[np.float64]]:
        """The output (num_heads, head_dim) for the first and for the last sequence, by the reference."""
        return {i: self._expected(i) for i in {0, self.num_seqs - 1}}

    def _expected(self, i: int) -> npt.NDArray[np.float64]:
        k, v = (x[None] for x in self.tokens(i))  # one block of all tokens
        of_heads = [
            reference.decode_attention(
                *(self.q[i : i + 1, h * self.group_size : (h + 1) * self.group_size], k[:, :, h : h + 1]),
                *(v[:, :, h : h + 1], np.zeros((1, 1), np.int32), self.seq_lens[:1]),
                kv_dtype=self.kv_dtype,
            )
            for h in range(NUM_KV_HEADS)
        ]
        return np.concatenate(of_heads, axis=1)[0].astype(np.float64)

    def error_of(self, out: npt.NDArray[Any]) -> float:
        """The largest error of an output in any shape, over the largest magnitude; infinite if it is not finite."""
        rows = np.asarray(out, np.float64).reshape(self.q.shape)
        errors = [float(np.abs(rows[i] - x).max() / np.abs(x).max()) for i, x in self.expected.items()]
        return max(errors) if np.isfinite(rows).all() else math.inf
