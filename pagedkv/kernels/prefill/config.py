"""What the prefill kernels are compiled for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..device.sizes import ELEMENT_BITS, SCALED_BY_ROW, WARP_SIZE

NUM_THREADS = 4 * WARP_SIZE  # threads of a block on CUDA cores
MOST_DIMS = 256  # for more, a warp has not the registers of the accumulators
# Sequences with up to this many rows (tokens times query heads of a KV head) and more than PART tokens are split.
FEW_ROWS = 32
PART = 512  # tokens that one warp takes in sequences of up to LONGEST_OF_PARTS
LONGEST_OF_PARTS = 2**17
# With up to this many KV heads, chunks have few tiles of rows for a GPU: thread blocks share the keys of a tile.
FEW_KV_HEADS = 2
STRETCH = 5120  # tokens of a thread block's share, after which sums begin anew: tiles of any number of keys
ENOUGH_BLOCKS = 256  # thread blocks that keep a GPU busy
MOST_STATES = 2048  # in a workspace; if there would be more, a tile has one thread block, and one state


@dataclass(frozen=True, slots=True)
class TensorConfig:
    """The compile-time constants of the kernels on tensor cores; everything else is an argument of the launch.

    Attributes
    ----------
    head_dim, group_size, block_size : int
        D, at most MOST_DIMS, G and P.
    q_kind : str
        Elements of q and `out`, which tensor cores multiply: "float16" or "bfloat16".
    kv_kind : str
        Elements of the caches: q_kind, "fp8_e4m3", "fp8_e5m2" or "int8".
    modified : bool
        Logits are changed by a softcap, ALiBi slopes or `score_mod`.
    wide : bool
        A cache has more than 2**32 vectors, or a negative block or token stride: offsets take 64 bits.
    hardware_fp8 : bool
        The device converts e4m3.
    shared_kib : int
        Shared memory of a multiprocessor.
    architecture : int
        Major compute capability.
    score_mod : callable or None
    """

    head_dim: int
    group_size: int
    block_size: int
    q_kind: str
    kv_kind: str
    modified: bool = False
    wide: bool = False
    hardware_fp8: bool = True
    shared_kib: int = 228
    architecture: int = 9
    score_mod: Callable[..., Any] | None = None

    @property
    def is_coded(self) -> bool:
        """Whether rows have 8 bits an element, which are widened to q's kind in shared memory."""
        return ELEMENT_BITS[self.kv_kind] == 8

    @property
    def by_row(self) -> bool:
        """Whether rows have scales of their own."""
        return self.kv_kind in SCALED_BY_ROW

    @property
    def can_split(self) -> bool:
        """Whether keys may be split: before 9.0, one row tile of 256 dims would already spill 296 bytes."""
        return self.architecture >= 9 or self.head_dim <= 128

    @property
    def vector_bytes(self) -> int:
        """Bytes that a thread copies at once from a cache; they become 16 bytes of operands."""
        return ELEMENT_BITS[self.kv_kind]


@dataclass(frozen=True, slots=True)
class CoresConfig:
    """The compile-time constants of the kernel on CUDA cores.

    Attributes
    ----------
    head_dim : int
        D.
    q_kind, kv_kind : str
        Elements of q and `out`, and of the caches.
    is_vllm : bool
        The caches have layout vllm.
    hardware_fp8, score_mod
        As in TensorConfig.
    """

    head_dim: int
    q_kind: str
    kv_kind: str
    is_vllm: bool = False
    hardware_fp8: bool = True
    score_mod: Callable[..., Any] | None = None
