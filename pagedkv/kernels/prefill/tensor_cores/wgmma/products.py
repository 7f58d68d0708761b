"""Both matrix products of the kernel on warpgroups, straight from shared memory.

    S = Q K^T    A is Q, B is K: rows of both run along the dims
    O += P V     A is P, in the registers of S; B is V, whose rows run along the columns of O

A warp has 16 of its warpgroup's 64 rows, in the fragments of mma: a lane (g, t) has S of rows g and g + 8, keys 2t and
2t + 1 of each 8.
"""

from __future__ import annotations

from typing import Any

from ....device.intrinsics.warpgroup import (
    GROUP,
    UNIT,
    begin_product,
    begin_sum,
    descriptor,
    descriptor_bits,
    wait_for,
)
from ...config import TensorConfig
from .shape import WgmmaShape


def make_descriptors(shape: WgmmaShape) -> tuple[Any, Any]:
    """The device functions from a shared address to a descriptor: one for Q and tiles of K, one for tiles of V."""
    of_values = descriptor(descriptor_bits(shape.panel_bytes, GROUP))
    return descriptor(descriptor_bits(UNIT, GROUP)), of_values


def make_products(config: TensorConfig, shape: WgmmaShape) -> tuple[Any, Any]:
    """The device functions ``multiply_keys(s, q, k)`` and ``multiply_values(o, p, v)``, which start the products."""
    kind = "f16" if config.q_kind == "float16" else "bf16"
    multiply_keys = begin_product(kind, shape.keys, shape.q_steps, shape.key_steps)
    return multiply_keys, begin_sum(kind, config.head_dim, shape.value_steps)


def make_waits(config: TensorConfig, shape: WgmmaShape) -> tuple[Any, Any, Any]:
    """The device functions ``wait_keys(s)``, ``wait_keys_first(s)``, for all but the last one, ``wait_values(o)``."""
    return wait_for(shape.keys, 0), wait_for(shape.keys, 1), wait_for(config.head_dim, 0)
