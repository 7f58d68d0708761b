"""The problems that contestants compute: cells of shapes and dtypes, their arrays, and the right results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cached_property import cached_property
from ..layouts import FLOAT32, FORMATS, INT8_MAX
from ..operations.attention import prefill_attention
from ..typing import KvDtype
from .report import Row

# The largest error allowed, relative to the largest expected magnitude.
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
# Not a multiple of any cell's row: repeating this many values still makes all rows of a cache differ.
NUM_VALUES = 2**22 + 15
CODES_OF_ONE = 32  # the code of int8 that stands for 1 where a row has the usual scale
# The rows whose results are compared: so many at the beginning, in the middle and at the end of so many sequences. Of
# cells with one query token a sequence all are.
CHECKED_ROWS, CHECKED_SEQS = 32, 4


def span(values: Sequence[int]) -> str:
    """Write values as one number if they are equal, otherwise as the least and the greatest."""
    return str(values[0]) if min(values) == max(values) else f"{min(values)}..{max(values)}"


@dataclass(frozen=True, slots=True)
class Cell:
    """The shapes and dtypes of one call.

    Attributes
    ----------
    group : str
        What the cell is for.
    seq_lens : tuple of int
        Tokens of each of the B sequences.
    num_heads, num_kv_heads, head_dim, block_size : int
        Hq, Hkv, D and P.
    dtype : str
        The dtype of q, and of the cache unless `kv_dtype` is given.
    kv_dtype : str or None
        "fp8_e4m3", "fp8_e5m2", "int8" or None.
    query_lens : tuple of int
        The query tokens of each sequence, its last ones; one each unless given.
    causal : bool
    """

    group: str
    seq_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "float16"
    kv_dtype: KvDtype | None = None
    query_lens: tuple[int, ...] = ()
    causal: bool = True

    def __post_init__(self) -> None:
        if not self.query_lens:
            object.__setattr__(self, "query_lens", (1,) * len(self.seq_lens))

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def kv_kind(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def is_ragged(self) -> bool:
        return len(set(self.seq_lens)) > 1

    @property
    def num_bytes(self) -> int:
        """The bytes that a kernel has to read at least: K and V of every token of every sequence, once.

        ``2 * sum(seq_lens) * num_kv_heads * head_dim * itemsize``, where 2 stands for K and V, and 4 more for the scale
        of each row of int8. Leaves out q and the
        result (together G / L of this with a 16-bit cache and equal lengths: 0.2 % for G = 4 and L = 2048), block
        tables, unused slots of last blocks, and partial results.
        """
        kv_format = FORMATS[self.kv_kind]
        row_bytes = self.head_dim * kv_format.stored.itemsize + (FLOAT32.itemsize if kv_format.scale == "row" else 0)
        return 2 * sum(self.seq_lens) * self.num_kv_heads * row_bytes

    @property
    def num_flops(self) -> int:
        """Operations of Q K^T and P V for pairs that the mask keeps: 4 for each dim, query head and pair.

        Whole tiles past the diagonal, and the softmax, do not count.
        """
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        pairs = sum(n * (length - n) + n * (n + 1) // 2 if self.causal else n * length for n, length in lens)
        return 4 * self.head_dim * self.num_heads * pairs

    def columns(self, operation: str) -> Row:
        """The first columns of a row about the cell; for prefill they name query tokens, too."""
        sizes = {"B": len(self.seq_lens), "Hq": self.num_heads, "Hkv": self.num_kv_heads, "D": self.head_dim}
        queries = {"n": span(self.query_lens)} if operation == "prefill" else {}
        rest = {"L": span(self.seq_lens), "P": self.block_size, "q": self.dtype, "kv": self.kv_kind}
        causal = {"causal": "yes" if self.causal else "no"} if queries else {}
        return {operation: self.group, **sizes, **queries, **rest, **causal}


class BenchProblem:
    """The arrays of a cell on the host: normally distributed values, in blocks in random order.

    Attributes
    ----------
    cell : Cell
    q : (T, Hq, D) array
    kv : (2, N, P, Hkv, D) array
        K and V in layout NHD; uint8 for fp8.
    options : dict
        The keyword arguments of the cell's caches: kv_dtype, and the scales of rows that have them.
    block_tables : (B, max_blocks) int32 array
        0 past the last block of a sequence.
    seq_lens : (B,) int32 array
    query_starts : (B + 1,) int32 array
    """

    def __init__(self, cell: Cell) -> None:
        rng = np.random.default_rng(0)
        self.cell = cell
        self.query_starts = np.cumsum([0, *cell.query_lens], dtype=np.int32)
        self.q = _normal(rng, (int(self.query_starts[-1]), cell.num_heads, cell.head_dim), FORMATS[cell.dtype].element)
        counts = [-(-length // cell.block_size) for length in cell.seq_lens]
        shape = (2, sum(counts), cell.block_size, cell.num_kv_heads, cell.head_dim)
        kv_format = FORMATS[cell.kv_kind]
        self.kv = _normal(rng, shape, kv_format.element).view(kv_format.stored)
        self.options: dict[str, Any] = {"kv_dtype": cell.kv_dtype}
        if kv_format.scale == "row":  # in memory the tokens of a head are side by side
            scales = rng.uniform(0.5, 1.5, (2, shape[1], shape[3], shape[2])).astype(np.float32) / CODES_OF_ONE
            self.options |= dict(zip(("k_scales", "v_scales"), scales.swapaxes(2, 3), strict=True))
        self.block_tables = np.zeros((len(counts), max(counts)), np.int32)
        self.block_tables[np.arange(max(counts)) < np.array(counts)[:, None]] = rng.permutation(sum(counts))
        self.seq_lens = np.array(cell.seq_lens, np.int32)

    @property
    def checked(self) -> npt.NDArray[np.int64]:
        """The rows of q whose results are compared."""
        return np.concatenate([self.query_starts[i] + np.arange(a, b) for i, a, b in self._parts])

    @cached_property
    def expected(self) -> npt.NDArray[Any]:
        """The CPU backend's result for the checked rows, (rows, Hq, D), for q widened to float32."""
        cell, parts = self.cell, self._parts
        seqs = [i for i, _, _ in parts]
        # With a causal mask the rows up to b are the last ones of a sequence that ends there.
        ends = [b - cell.query_lens[i] if cell.causal else 0 for i, _, b in parts]
        lens, starts = self.seq_lens[seqs] + np.array(ends, np.int32), np.cumsum([0, *(b - a for _, a, b in parts)])
        result: npt.NDArray[np.float32] = prefill_attention(
            *(self.q[self.checked].astype(np.float32), self.kv[0], self.kv[1], self.block_tables[seqs], lens),
            starts.astype(np.int32),
            causal=cell.causal,
            backend="cpu",
            **self.options,
        )
        return result

    def error_of(self, out: npt.NDArray[Any]) -> float:
        """The largest error of a result in any shape, over the largest magnitude; infinite if it is not finite."""
        rows = np.asarray(out, np.float32).reshape(self.q.shape)
        error = np.abs(rows[self.checked] - self.expected).max() / np.abs(self.expected).max()
        return float(error) if np.isfinite(rows).all() else math.inf

    @cached_property
    def _parts(self) -> list[tuple[int, int, int]]:
        """(sequence, first row, row after the last one) for each part that is compared."""
        query_lens = self.cell.query_lens
        num_seqs = len(query_lens) if max(query_lens) == 1 else min(len(query_lens), CHECKED_SEQS)
        parts = set()
        for i in np.linspace(0, len(query_lens) - 1, num_seqs).astype(int).tolist():
            size = min(query_lens[i], CHECKED_ROWS)
            parts |= {(i, a, a + size) for a in (0, (query_lens[i] - size) // 2, query_lens[i] - size)}
        return sorted(parts)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    values = rng.standard_normal(min(NUM_VALUES, math.prod(shape)), np.float32)
    if dtype == np.int8:
        values = np.clip(np.rint(values * CODES_OF_ONE), -INT8_MAX, INT8_MAX)
    return np.resize(values.astype(dtype), shape)
