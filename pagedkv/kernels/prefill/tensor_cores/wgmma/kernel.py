"""Prefill attention on warpgroups (wgmma), after FlashAttention-3: 16-bit caches in NHD and HND, on 9.0 alone.

Grid, items, copies and softmax are those of ../kernel.py. A thread block has 128 rows, 64 for each of two warpgroups,
and goes through tiles of 128 keys (64 with 256 dims) in two stages. The products read their operands from shared memory
and run asynchronously: S = Q K^T of a tile and O += P V of the one before start together, and the second one runs while
the threads compute the softmax of the first.

Shared memory is cut into panels of 64 dims, as descriptors require: see shape.py. Before the barrier, a fence makes
what threads have copied visible to the products (the asynchronous proxy).
"""

from __future__ import annotations

from ....device.intrinsics.warpgroup import GROUP
from ....device.source import KernelSource
from ...config import TensorConfig
from ..kernel import kernel_of
from .loop import make_attend_tiles
from .shape import WgmmaShape


def make_prefill_wgmma(config: TensorConfig) -> KernelSource:
    """The kernel of all rows of all sequences, which attend to the keys that they see."""
    shape = WgmmaShape(config)
    return kernel_of(config, shape, make_attend_tiles(config, shape), GROUP, is_specific=True)
