"""What the split kernel is compiled for, and how it divides the tokens of a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..device.sizes import ELEMENT_BITS, SCALED_BY_ROW, WARP_SIZE

SHORTEST_SPLIT = 256  # tokens
SPLIT_UNIT = 128  # tokens; splits are multiples of what all warps take in one step, which is at most this
# Numbers of splits of a sequence; powers of two, so that the kernel shifts instead of dividing.
FEW_SPLITS = 8  # up to here the cost of partial results does not count
# The most, unless few KV heads need more for a FULL_GRID: 8 KV heads make 256 thread blocks, which run at once. An H200
# takes 40 us for a sequence of 32,768 tokens, and took 47 with 64 splits.
MANY_SPLITS = 32
FULL_GRID = 128  # thread blocks that occupy a large GPU: an H100 has 132 multiprocessors
MOST_SPLITS = FULL_GRID  # with one KV head: four for each lane of the warp that merges them
# The largest share of a split's traffic that its partial result may be.
SHORT_SHARE, LONG_SHARE = 0.13, 0.04
LONG_BYTES = 2**17  # of the keys and values of a long split, enough to outweigh its prologue and epilogue
VECTOR_BYTES = 16
MOST_DIMS_OF_WARP = 256  # dims of O; 16 heads of 128 dims, or 8 of 256, take 64 registers of a lane
NUM_WARPS = 4
NUM_THREADS = WARP_SIZE * NUM_WARPS
# Splits that a thread loads at once when it adds them, 16 bytes of each. It is the lowest power of two with which the
# bandwidth of a multiprocessor, and not the latency of L2, limits the merge: in 0.25 us it takes in 27 KiB, and all
# threads together ask for 32.
MERGE_LOADS = 16
MOST_THREADS_PER_QUAD = MOST_SPLITS // MERGE_LOADS  # more would have fewer splits each than a thread loads at once


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """The compile-time constants of the split kernel; everything else is an argument of the launch.

    Attributes
    ----------
    head_dim, group_size, block_size : int
        D, G and P.
    q_kind, kv_kind : str
        Elements of q and `out`, and of the caches: "float32", "float16", "bfloat16"; "fp8_e4m3", "fp8_e5m2", "int8".
    modified : bool
        Logits are changed by a softcap, ALiBi slopes or `score_mod`.
    wide : bool
        A cache has more than 2**32 vectors, or a negative block or token stride: offsets take 64 bits.
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
    hardware_fp8: bool = True
    architecture: int = 9
    score_mod: Callable[..., Any] | None = None

    @property
    def on_tensor_cores(self) -> bool:
        """Whether the kernel runs on tensor cores, which would round a float32 q, or float32 caches."""
        return self.q_kind != "float32"

    @property
    def by_row(self) -> bool:
        """Whether rows have scales of their own."""
        return self.kv_kind in SCALED_BY_ROW

    @property
    def through_shared(self) -> bool:
        """Whether lanes exchange words through shared memory (lanes.py) instead of shuffles.

        Before 9.0 ptxas puts a branch for diverged lanes before each shuffle in a loop, and keeps registers free for
        it: 1872 bytes would spill at D = 256, G = 8.
        """
        return self.on_tensor_cores and self.architecture < 9

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
        """Bytes of a load, to which rows are aligned: 16, or 8 for some fp8 rows."""
        return math.gcd(self.row_bytes, VECTOR_BYTES)

    @property
    def staged(self) -> bool:
        """Whether warps have query heads of their own, and share rows in shared memory (tensor_cores/stages.py)."""
        return self.on_tensor_cores and self.group_size > 16 and self.head_dim <= MOST_DIMS_OF_WARP

    @property
    def most_heads(self) -> int:
        """The most query heads for which a thread block has registers."""
        if self.staged:
            return 16 * NUM_WARPS  # an mma has 16 rows
        if self.on_tensor_cores:
            return 16 if self.head_dim <= 128 else 8
        return 4 if self.head_dim <= 128 else 2

    @property
    def num_tiles(self) -> int:
        """Thread blocks, side by side, that share the query heads of a KV head."""
        return -(-self.group_size // self.most_heads)

    @property
    def num_heads(self) -> int:
        """Query heads of a thread block; the last tile may have fewer."""
        return -(-self.group_size // self.num_tiles)

    @property
    def warps_for_heads(self) -> int:
        """Warps of a group that divide the query heads of a thread block among them: at most 16 for each."""
        return NUM_WARPS if self.staged else 1

    @property
    def heads_of_warp(self) -> int:
        """Query heads of a warp; the last warp of a group may have fewer."""
        return -(-self.num_heads // self.warps_for_heads)

    @property
    def warps_for_dims(self) -> int:
        """Warps of a group that divide the dims of values among them.

        It must not depend on `wide`, since it decides the order of additions.
        """
        return 2 if self.on_tensor_cores and self.head_dim > MOST_DIMS_OF_WARP else 1

    @property
    def num_warp_groups(self) -> int:
        """Warp groups of a thread block. A warp group is the warps that take the same tokens."""
        return NUM_WARPS // (self.warps_for_heads * self.warps_for_dims)

    @property
    def threads_per_quad(self) -> int:
        """Threads that divide the splits of a quad (four dims of a head) in the merge; one with many quads."""
        return max(1, min(NUM_THREADS // (self.num_heads * self.head_dim // 4), MOST_THREADS_PER_QUAD))

    @property
    def short_split(self) -> int:
        """The fewest tokens of a split whose partial result is at most SHORT_SHARE of its traffic.

        Splits are that long in sequences of FEW_SPLITS times as many tokens.
        """
        return max(SHORTEST_SPLIT, self._tokens_for(SHORT_SHARE))

    @property
    def long_split(self) -> int:
        """Tokens of a split of a sequence that makes a full grid by itself."""
        return max(SHORTEST_SPLIT, self._tokens_for(LONG_SHARE), _whole_units(LONG_BYTES / (2 * self.row_bytes)))

    def _tokens_for(self, share: float) -> int:
        """Tokens of a split whose partial result, float32 written and read once, is at most `share` of its traffic."""
        traffic = 2 * 4 * self.group_size * (self.head_dim + 2)
        return _whole_units(traffic / (2 * self.row_bytes * share))

    def split_size(self, num_tokens: int, num_kv_heads: int) -> int:
        """Tokens of each split but the last, of a sequence with this many visible tokens."""
        size = max(num_tokens // filling_splits(num_kv_heads), min(num_tokens // FEW_SPLITS, self.short_split))
        size = min(size, self.long_split) // SPLIT_UNIT * SPLIT_UNIT
        return max(size, SHORTEST_SPLIT, _whole_units(num_tokens / max(filling_splits(num_kv_heads), MANY_SPLITS)))

    def most_splits(self, capacity: int, num_kv_heads: int) -> int:
        """The most splits that a sequence of up to `capacity` visible tokens may have."""
        filling = filling_splits(num_kv_heads)
        # Sizes are rounded down to whole units: n splits of 383 tokens become 3/2 n of 256.
        few, full = FEW_SPLITS + FEW_SPLITS // 2, filling + -(-filling // 2)
        short = min(-(-capacity // SHORTEST_SPLIT), max(few, -(-capacity // self.short_split)), full)
        return max(1, min(max(short, -(-capacity // self.long_split)), max(filling, MANY_SPLITS)))


def filling_splits(num_kv_heads: int) -> int:
    """The number of splits with which one sequence makes a full grid; a power of two."""
    return max(FULL_GRID >> (num_kv_heads.bit_length() - 1), 1)


def _whole_units(num_tokens: float) -> int:
    return math.ceil(num_tokens / SPLIT_UNIT) * SPLIT_UNIT
