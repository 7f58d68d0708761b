"""The workloads of bench prefill: cells, and the products that each has to compute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ....operations.attention import prefill_attention
from .. import workloads
from ..workloads import FLOATS, NUM_VALUES

# The rows whose results are compared: so many at the beginning, in the middle and at the end of so many sequences.
CHECKED_ROWS, CHECKED_SEQS = 32, 4


@dataclass(frozen=True, slots=True)
class Cell(workloads.Cell):
    """Shapes and dtypes of one prefill call.

    Attributes
    ----------
    query_lens : tuple of int
        The query tokens of each sequence: its last ones.
    causal : bool
    others : as in `workloads.Cell`
    """

    query_lens: tuple[int, ...] = ()
    causal: bool = True

    @property
    def query_length(self) -> str:
        """Query tokens of a sequence, or the fewest and the most."""
        shortest, longest = min(self.query_lens), max(self.query_lens)
        return str(longest) if shortest == longest else f"{shortest}..{longest}"

    @property
    def num_flops(self) -> int:
        """Operations of Q K^T and P V, of pairs that the mask leaves: 4 for each dim, query head and pair.

        Whole tiles past the diagonal, and the softmax, do not count.
        """
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        pairs = sum(n * (length - n) + n * (n + 1) // 2 if self.causal else n * length for n, length in lens)
        return 4 * self.head_dim * self.num_heads * pairs


def _equal(group: str, num_seqs: int, query_len: int, length: int, **sizes: Any) -> Cell:
    return Cell(group, (length,) * num_seqs, query_lens=(query_len,) * num_seqs, **sizes)


def _mixed(chunk: int, cached: int, num_steps: int, length: int, **sizes: Any) -> Cell:
    """A chunk behind cached tokens, beside decode steps of sequences of one length."""
    lens, query_lens = (cached + chunk, *(length,) * num_steps), (chunk, *(1,) * num_steps)
    return Cell("mixed", lens, query_lens=query_lens, **sizes)


def cells() -> list[Cell]:
    """All cells by group, the most important groups first."""
    return [
        *(_equal("prompt", 16384 // length, length, length) for length in (1024, 4096, 16384)),
        _equal("prompt", 4, 4096, 4096, dtype="bfloat16"),
        *(
            _equal("verify", num_seqs, n, length)
            for num_seqs, n, length in ((4, 8, 32768), (32, 4, 8192), (1, 16, 131072))
        ),
        _equal("chunk", 1, 2048, 32768),
        _equal("chunk", 4, 512, 8192),
        _mixed(2048, 6144, 64, 4096),
        *(
            _equal("dims", 4, 4096, 4096, head_dim=d, num_heads=h, num_kv_heads=h // 4)
            for d, h in ((64, 32), (256, 16))
        ),
        *(_equal("heads", 4, 4096, 4096, num_kv_heads=num_kv_heads) for num_kv_heads in (32, 2)),
        *(_equal("pages", 4, 4096, 4096, block_size=block_size) for block_size in (1, 256)),
        _equal("full", 4, 4096, 4096, causal=False),
        _equal("fp8", 4, 4096, 4096, kv_dtype="fp8_e4m3"),
        _equal("fp8", 4, 8, 32768, kv_dtype="fp8_e4m3"),
    ]


def quick_cells() -> list[Cell]:
    """A small cell of each kind, to see that everything runs."""
    small = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    return [
        _equal("prompt", 2, 300, 300, **small),
        _equal("verify", 2, 8, 700, **small),
        _equal("chunk", 2, 100, 300, **small),
        _mixed(100, 40, 3, 70, **small),
        _equal("full", 1, 130, 130, causal=False, **small),
        _equal("fp8", 2, 100, 300, kv_dtype="fp8_e4m3", **small),
    ]


GROUPS = tuple(dict.fromkeys(cell.group for cell in cells()))


class HostProblem(workloads.HostProblem):
    """The arrays of a cell on the host; see `workloads.HostProblem`.

    Attributes
    ----------
    q : (T, Hq, D) array
    query_starts : (B + 1,) int32 array
    """

    cell: Cell

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.query_starts = np.cumsum([0, *cell.query_lens], dtype=np.int32)
        shape = int(self.query_starts[-1]), cell.num_heads, cell.head_dim
        values = np.random.default_rng(3).standard_normal(min(NUM_VALUES, math.prod(shape)), np.float32)
        self.q = np.resize(values.astype(FLOATS[cell.dtype]), shape)

    @cached_property
    def checked(self) -> npt.NDArray[np.int64]:
        """The rows of q whose results are compared."""
        return np.concatenate([self.query_starts[i] + np.arange(a, b) for i, a, b in self._parts])

    @cached_property
    def expected(self) -> npt.NDArray[np.float32]:
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
            kv_dtype=cell.kv_dtype,
            backend="cpu",
        )
        return result

    @cached_property
    def _parts(self) -> list[tuple[int, int, int]]:
        """(sequence, first row, row after the last one) of what is compared."""
        num_seqs = len(self.seq_lens)
        parts = set()
        for i in np.linspace(0, num_seqs - 1, min(num_seqs, CHECKED_SEQS)).astype(int).tolist():
            n = self.cell.query_lens[i]
            size = min(n, CHECKED_ROWS)
            parts |= {(i, a, a + size) for a in (0, (n - size) // 2, n - size)}
        return sorted(parts)
