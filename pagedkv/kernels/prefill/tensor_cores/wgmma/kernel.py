"""Prefill attention on warpgroups (wgmma), after FlashAttention-3: 16-bit caches in NHD and HND, on 9.0 alone.

Grid, items and softmax are those of ../kernel.py. A thread block has 128 rows, 64 for each of two warpgroups, and goes
through tiles of 128 keys (64 with 256 dims or options). The products read their operands from shared memory and run
asynchronously: S = Q K^T of a tile and O += P V of the one before start together, and the second one runs while the
threads compute the softmax of the first. With three stages warpgroups take turns: the products of one run while the
other one computes exponentials (in_turns.py). Where only two have room they go in step (in_step.py).

Shared memory is cut into panels of 64 dims, as descriptors require: see shape.py. Before they arrive at a barrier,
threads fence what they have copied, so that products (the asynchronous proxy) see it.
"""

from __future__ import annotations

from ....device.intrinsics.warpgroup import GROUP
from ....device.source import KernelSource
from ...config import TensorConfig
from ..kernel import kernel_of
from .in_step import make_attend_in_step
from .in_turns import make_attend_in_turns
from .shape import WgmmaShape


def make_prefill_wgmma(config: TensorConfig) -> KernelSource:
    """The kernel of all rows of all sequences, which attend to the keys that they see."""
    shape = WgmmaShape(config)
    make = make_attend_in_turns if shape.stages == 3 else make_attend_in_step
    return kernel_of(config, shape, make(config, shape), GROUP, is_specific=True)
