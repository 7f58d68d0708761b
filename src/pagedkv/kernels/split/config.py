"""What the split kernel is compiled for, and how it divides the tokens of a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..device.intrinsics import ELEMENT_BITS
from . import limits

SHORTEST_SPLIT = 256  # tokens
MOST_SPLITS = 64  # of a sequence: two for each lane of the warp that merges them
SPLIT_UNIT = 128  # splits are multiples of it: the most tokens that all warps take in one step
LONG = 2048  # tokens: from here on, partial results are at most 4 % of the traffic
VECTOR_BYTES = 16
WARP_SIZE = 32
NUM_WARPS = 4
NUM_THREADS = WARP_SIZE * NUM_WARPS


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """The compile-time constants of the split kernel; everything else is an argument of the launch.

    Attributes
    ----------
    head_dim, group_size, block_size : int
        D, G and P.
    q_kind, kv_kind : str
        Elements of q and `out`, and of the caches: "float32", "float16", "bfloat16"; "fp8_e4m3", "fp8_e5m2".
    modified : bool
        Logits are changed by a softcap, ALiBi slopes or `score_mod`.
    wide : bool
        A cache has more than 2**32 vectors, or a negative block or token stride: offsets take 64 bits.
    checked : bool
        Skip and record lengths and block ids out of range.
    hardware_fp8 : bool
        The device converts e4m3.
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
    checked: bool = False
    hardware_fp8: bool = True
    architecture: int = 9
    score_mod: Callable[..., Any] | None = None

    @property
    def on_tensor_cores(self) -> bool:
        """Tensor cores have no float32: such caches run on CUDA cores."""
        return self.kv_kind != "float32"

    @property
    def has_options(self) -> bool:
        """Something beside the plain kernel takes registers."""
        return self.modified or self.checked or self.wide

    @property
    def through_shared(self) -> bool:
        """Lanes hand words to each other through shared memory; see lanes.py."""
        return bool(limits.through_shared(self))

    @property
    def kv_bytes(self) -> int:
        """Bytes of an element of the caches."""
        return ELEMENT_BITS[self.kv_kind] // 8

    @property
    def q_bytes(self) -> int:
        """Bytes of an element of q and `out`."""
        return ELEMENT_BITS[self.q_kind] // 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row in a cache."""
        return self.head_dim * self.kv_bytes

    @property
    def vector_bytes(self) -> int:
        """The alignment of rows: 16 bytes, or 8 for some fp8 rows."""
        return math.gcd(self.row_bytes, VECTOR_BYTES)

    @property
    def staged(self) -> bool:
        """Warps with query heads of their own share rows, which wait in shared memory; see tensor_cores/stages.py."""
        return self.on_tensor_cores and self.group_size > 16 and self.head_dim <= limits.staged_dims(self)

    @property
    def num_tiles(self) -> int:
        """Thread blocks, side by side, that share the query heads of a KV head."""
        return -(-self.group_size // limits.heads(self))

    @property
    def num_heads(self) -> int:
        """Query heads of a thread block; the last tile may have fewer."""
        return -(-self.group_size // self.num_tiles)

    @property
    def head_shares(self) -> int:
        """Warps that take the same tokens, each with its share of the query heads: at most 16."""
        return limits.head_shares(self)

    @property
    def forgets(self) -> bool:
        """What only the end of the work needs is read again after the inner loop."""
        return bool(limits.forgets(self))

    @property
    def heads_of_warp(self) -> int:
        """Query heads of a warp; the last warp of a team may have fewer."""
        return -(-self.num_heads // self.head_shares)

    @property
    def dim_shares(self) -> int:
        """Warps that take the same tokens, each with its share of the values' dims.

        Strides and placement, such as `wide`, have no say in it: it decides the order of additions.
        """
        return 2 if self.on_tensor_cores and self.head_dim > limits.dims_of_warp(self) else 1

    @property
    def num_teams(self) -> int:
        """Teams of a thread block. A team is the warps that take the same tokens."""
        return NUM_WARPS // (self.head_shares * self.dim_shares)

    @property
    def long_split(self) -> int:
        """The fewest tokens of a split of a sequence of LONG tokens or more.

        Long enough that a partial result, float32 written and read once, is at most 4 % of the split's keys and values,
        and that these are 128 KiB or more, so that a block's prologue and epilogue count little.
        """
        traffic = 2 * 4 * self.group_size * (self.head_dim + 2)
        needed = max(25 * traffic / (2 * self.row_bytes), 2**16 / self.row_bytes)
        return -(-math.ceil(needed) // SHORTEST_SPLIT) * SHORTEST_SPLIT

    def split_size(self, num_tokens: int) -> int:
        """Tokens of each split but the last, of a sequence with this many visible tokens."""
        if num_tokens < LONG:
            return SHORTEST_SPLIT
        count = min(max(num_tokens // self.long_split, 1), MOST_SPLITS)
        return -(-num_tokens // (count * SPLIT_UNIT)) * SPLIT_UNIT

    def most_splits(self, capacity: int) -> int:
        """The most splits that a sequence of up to `capacity` visible tokens has."""
        short = -(-min(capacity, LONG - 1) // SHORTEST_SPLIT)
        return max(1, short, min(capacity // self.long_split, MOST_SPLITS) if capacity >= LONG else 0)
