"""The config of v1 and v2, and the constants that follow from it, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..device.sizes import ELEMENT_BITS, WARP_SIZE

NUM_THREADS = 128
NUM_WARPS = NUM_THREADS // WARP_SIZE
PARTITION_SIZE = 512


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The compile-time constants of v1 and v2; everything else is an argument of the launch.

    Attributes
    ----------
    head_dim, block_size : int
    q_kind, kv_kind : str
        Elements of q and `out`, and of the caches: "float32", "float16", "bfloat16"; "fp8_e4m3", "fp8_e5m2".
    packed : bool
        Within one head of one block the caches are C-contiguous.
    hardware_fp8 : bool
        The device has instructions for fp8.
    score_mod : callable or None
    """

    head_dim: int
    block_size: int
    q_kind: str
    kv_kind: str
    packed: bool = True
    hardware_fp8: bool = False
    score_mod: Callable[..., Any] | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of an element of the caches."""
        return ELEMENT_BITS[self.kv_kind] // 8

    @property
    def q_bytes(self) -> int:
        """Bytes of an element of q and `out`."""
        return ELEMENT_BITS[self.q_kind] // 8

    @property
    def chunk_size(self) -> int:
        """Tokens that a warp takes at a time: a block, or 32 tokens of a longer one."""
        return min(self.block_size, WARP_SIZE)

    @property
    def thread_group_size(self) -> int:
        """Lanes that share a token of K."""
        return WARP_SIZE // self.chunk_size

    @property
    def vec_size(self) -> int:
        """Elements of a 16-byte K vector, the x of the layout."""
        return 16 // self.kv_bytes

    @property
    def v_vec_size(self) -> int:
        """Tokens of a V vector: 16 bytes, or a row of 8 bytes."""
        return min(16 // self.kv_bytes, self.chunk_size)

    @property
    def v_chunk_size(self) -> int:
        """Tokens of V that a warp takes at a time: few, so that few lanes share a row and a lane sums few rows."""
        most_bytes = 64 if self.head_dim <= 256 else 32  # of a row, whole sectors
        return min(self.chunk_size, most_bytes // self.kv_bytes)

    @property
    def num_v_vecs_per_row(self) -> int:
        """Lanes that share a row of a chunk of V."""
        return self.v_chunk_size // self.v_vec_size

    @property
    def num_rows_per_iter(self) -> int:
        """Rows of V (elements of head_dim) that a warp reads at once."""
        return WARP_SIZE // self.num_v_vecs_per_row

    @property
    def num_rows_per_thread(self) -> int:
        """Rows of V whose sums a lane keeps."""
        return -(-self.head_dim // self.num_rows_per_iter)
