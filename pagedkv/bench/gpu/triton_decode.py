"""A paged split-KV decode kernel in Triton, of the usual kind for caches in layout NHD, as a peer.

Importing it imports triton. A program takes one split of a sequence for one KV head, with that head's query heads as
the rows of a matrix product, padded to 16. A second kernel merges the splits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
FEWEST_ROWS = 16  # of a tensor-core operand


@triton.jit
def _split(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    tables,
    lens,
    partial,
    lse,
    scale,
    max_blocks,
    num_splits,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + seq)
    per_split = tl.cdiv(tl.cdiv(length, TILE), num_splits) * TILE
    first = split * per_split
    last = tl.minimum(first + per_split, length)
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    query_head = (seq * HKV + head) * G + row
    queries = tl.load(q + query_head[:, None] * D + column[None, :], mask=row[:, None] < G, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    for start in range(first, last, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < last
        block = tl.load(tables + seq * max_blocks + token // P, mask=inside, other=0).to(tl.int64)
        at = ((block * P + token % P) * HKV + head) * D
        keys = tl.load(k + at[None, :] + column[:, None], mask=inside[None, :], other=0.0).to(queries.dtype)
        scores = tl.where(inside[None, :], tl.dot(queries, keys) * scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        values = tl.load(v + at[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(queries.dtype)
        total = total * rescale + tl.sum(weights, 1)
        sums = sums * rescale[:, None] + tl.dot(weights.to(queries.dtype), values)
        largest = new_largest
    is_head = row < G
    has_keys = first < last
    place = query_head * num_splits + split
    tl.store(lse + place, tl.where(has_keys, largest + tl.log2(tl.where(has_keys, total, 1.0)), largest), mask=is_head)
    sums = sums / tl.where(has_keys, total, 1.0)[:, None]
    tl.store(partial + place[:, None] * D + column[None, :], sums, mask=is_head[:, None])


@triton.jit
def _merge(partial, lse, out, num_splits, D: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    split, column = tl.arange(0, SPLITS), tl.arange(0, D)
    place = row * num_splits + split
    exponents = tl.load(lse + place, mask=split < num_splits, other=float("-inf"))
    weights = tl.exp2(exponents - tl.max(exponents, 0))
    parts = tl.load(partial + place[:, None] * D + column[None, :], mask=split[:, None] < num_splits, other=0.0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * D + column, merged.to(out.dtype.element_ty))


class TritonDecode:
    """Decode calls in one configuration, with memory for their results.

    Parameters
    ----------
    q : (B, Hq, D) tensor
        float16 or bfloat16; D a power of two, at least 16.
    k, v : (N, P, Hkv, D) tensors
        Contiguous; of q's dtype, or float8_e4m3fn or float8_e5m2.
    tables, lens : (B, max_blocks) and (B,) int32 tensors
        Contiguous; no length is 0.
    num_splits : int
        Splits of each sequence.
    tile : int
        Tokens of a step; a power of two, at least 16.
    num_warps, num_stages : int
        Triton's options.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        tables: Any,
        lens: Any,
        num_splits: int,
        tile: int,
        num_warps: int,
        num_stages: int,
    ) -> None:
        self._inputs = (q, k, v, tables, lens)
        self._num_splits, self._tile = num_splits, tile
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        num_rows, head_dim = q.shape[0] * q.shape[1], q.shape[2]
        self._partial = torch.empty((num_rows, num_splits, head_dim), dtype=torch.float32, device=q.device)
        self._lse = torch.empty((num_rows, num_splits), dtype=torch.float32, device=q.device)
        self._out = torch.empty_like(q)

    def __call__(self) -> Any:
        """Launch both kernels; returns (B, Hq, D) of q's dtype, always in the same memory."""
        q, k, v, tables, lens = self._inputs
        num_seqs, num_heads, head_dim = q.shape
        block_size, num_kv_heads = k.shape[1:3]
        group_size, num_splits = num_heads // num_kv_heads, self._num_splits
        _split[(num_seqs, num_kv_heads, num_splits)](
            *(q, k, v, tables, lens, self._partial, self._lse),
            *(head_dim**-0.5 * LOG2_E, tables.shape[1], num_splits),
            **{"HKV": num_kv_heads, "G": group_size, "D": head_dim, "P": block_size, "TILE": self._tile},
            ROWS=max(FEWEST_ROWS, triton.next_power_of_2(group_size)),
            **self._options,
        )
        _merge[(num_seqs * num_heads,)](
            *(self._partial, self._lse, self._out, num_splits), D=head_dim, SPLITS=triton.next_power_of_2(num_splits)
        )
        return self._out
