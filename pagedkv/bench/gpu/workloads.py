"""The workloads of bench decode: cells, and the bytes of K and V that each has to read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...layouts import FP8_DTYPES
from ...operations.attention import decode_attention
from ...typing import KvDtype

# (B, Hq, Hkv, D, L, P) of KernelBench-Hard's problem 03_paged_attention, which is bfloat16.
KERNELBENCH = (
    (8, 32, 8, 128, 1024, 16),
    (32, 32, 8, 128, 2048, 16),
    (4, 64, 8, 128, 4096, 16),
    (16, 32, 8, 128, 1535, 16),
    (8, 16, 4, 64, 2000, 16),
)
FLOATS: dict[str, Any] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Not a multiple of any cell's row: repeating this many values still makes all rows of a cache differ.
NUM_VALUES = 2**22 + 15


@dataclass(frozen=True, slots=True)
class Cell:
    """Shapes and dtypes of one decode call.

    Attributes
    ----------
    group : str
        What the cell is for: one of `GROUPS`.
    seq_lens : tuple of int
        Tokens of each of the B sequences.
    num_heads, num_kv_heads, head_dim, block_size : int
        Hq, Hkv, D and P.
    dtype : str
        The dtype of q, and of the cache unless `kv_dtype` is given.
    kv_dtype : str or None
        "fp8_e4m3", "fp8_e5m2" or None.
    """

    group: str
    seq_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "float16"
    kv_dtype: KvDtype | None = None

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def is_ragged(self) -> bool:
        return len(set(self.seq_lens)) > 1

    @property
    def length(self) -> str:
        """L, or the shortest and the longest."""
        return f"{min(self.seq_lens)}..{max(self.seq_lens)}" if self.is_ragged else str(self.seq_lens[0])

    @property
    def num_bytes(self) -> int:
        """The least that a kernel has to read: K and V of every token of every sequence, once.

        ``2 * sum(seq_lens) * num_kv_heads * head_dim * itemsize``, where 2 stands for K and V. Leaves out q and the
        result (together G / L of this with a 16-bit cache and equal lengths: 0.2 % for G = 4 and L = 2048), block
        tables, unused slots of last blocks, and partial results.
        """
        itemsize = 1 if self.kv_dtype else 2
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_dim * itemsize


def _equal(
    group: str,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    length: int,
    block_size: int,
    dtype: str = "float16",
) -> Cell:
    return Cell(group, (length,) * num_seqs, num_heads, num_kv_heads, head_dim, block_size, dtype)


def _drawn(num_seqs: int, longest: int) -> tuple[int, ...]:
    """Log-uniform lengths, the same at every call."""
    logarithms = np.random.default_rng(5).uniform(0, math.log(longest), num_seqs)
    return tuple(int(math.exp(x)) for x in logarithms)


def cells() -> list[Cell]:
    """All cells by group, the most important groups first."""
    return [
        *(_equal("headline", 32, 32, 8, 128, length, 16) for length in (2048, 8192)),
        *(_equal("kernelbench", *shape, "bfloat16") for shape in KERNELBENCH),
        *(_equal("pages", 32, 32, 8, 128, 2048, block_size) for block_size in (1, 16, 256)),
        *(_equal("heads", 32, 32, num_kv_heads, 128, 2048, 16) for num_kv_heads in (32, 4, 2)),
        *(_equal("lengths", 8, 32, 8, 128, 2**n, 16) for n in range(7, 18, 2)),
        *(_equal("one", 1, 32, 8, 128, length, 16) for length in (1024, 8192, 131072)),
        Cell("ragged", (*(1,) * 16, 100_000, *(1,) * 15)),
        Cell("ragged", _drawn(32, 16384)),
        *(
            Cell("fp8", (length,) * 32, kv_dtype=kv_dtype)
            for kv_dtype in ("fp8_e4m3", "fp8_e5m2")
            for length in (2048, 8192)
        ),
    ]


def quick_cells() -> list[Cell]:
    """A small cell of each kind, to see that everything runs."""
    return [
        Cell("lengths", (200,) * 4),
        Cell("lengths", (600,) * 4),
        Cell("ragged", (1, 700, 33, 1), 8, 2, 64),
        Cell("fp8", (200,) * 4, kv_dtype="fp8_e4m3"),
    ]


GROUPS = tuple(dict.fromkeys(cell.group for cell in cells()))


class HostProblem:
    """The arrays of a cell on the host, with normal values and with blocks in random order.

    Attributes
    ----------
    cell : Cell
    q : (B, Hq, D) array
    kv : (2, N, P, Hkv, D) array
        K and V in layout NHD; uint8 for fp8.
    block_tables : (B, max_blocks) int32 array
        0 past the last block of a sequence.
    seq_lens : (B,) int32 array
    """

    def __init__(self, cell: Cell) -> None:
        rng = np.random.default_rng(0)
        self.cell = cell
        self.q = rng.standard_normal((len(cell.seq_lens), cell.num_heads, cell.head_dim), np.float32).astype(
            FLOATS[cell.dtype]
        )
        counts = [-(-length // cell.block_size) for length in cell.seq_lens]
        shape = (2, sum(counts), cell.block_size, cell.num_kv_heads, cell.head_dim)
        values = rng.standard_normal(min(NUM_VALUES, math.prod(shape)), np.float32)
        stored = values.astype(FP8_DTYPES[cell.kv_dtype] if cell.kv_dtype else FLOATS[cell.dtype])
        self.kv = np.resize(stored.view(np.uint8) if cell.kv_dtype else stored, shape)
        self.block_tables = np.zeros((len(counts), max(counts)), np.int32)
        self.block_tables[np.arange(max(counts)) < np.array(counts)[:, None]] = rng.permutation(sum(counts))
        self.seq_lens = np.array(cell.seq_lens, np.int32)

    @cached_property
    def expected(self) -> npt.NDArray[np.float32]:
        """The CPU backend's result, (B, Hq, D), for q widened to float32 so that it is not rounded."""
        arguments = (self.q.astype(np.float32), self.kv[0], self.kv[1], self.block_tables, self.seq_lens)
        result: npt.NDArray[np.float32] = decode_attention(*arguments, kv_dtype=self.cell.kv_dtype, backend="cpu")
        return result


def only(wanted: Sequence[str] | None, among: Sequence[Cell]) -> list[Cell]:
    """The cells of the wanted groups; all if None."""
    return [cell for cell in among if wanted is None or cell.group in wanted]
