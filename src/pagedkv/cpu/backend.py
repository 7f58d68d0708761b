"""The CPU as a backend. numba is imported by the first attention call: the other operations do with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array
from ..calls import AttentionCall
from ..compile_thread import made_once
from .blocks import copy_blocks, gather_kv, swap_blocks, write_kv
from .merge import merge_states

__all__ = [
    "copy_blocks",
    "decode_attention",
    "gather_kv",
    "merge_states",
    "prefill_attention",
    "swap_blocks",
    "write_kv",
]


@made_once(most=1)
def _decode() -> Any:
    from . import decode

    return decode


@made_once(most=1)
def _prefill() -> Any:
    from . import prefill

    return prefill


def decode_attention(call: AttentionCall, out: Array, lse: Array | None) -> None:
    """Run a decode call."""
    # An infinity in a result is a value like any other: it comes back without a warning, as from a device.
    with np.errstate(over="ignore", invalid="ignore"):
        _decode().decode_attention(call, out, lse)


def prefill_attention(call: AttentionCall, out: Array, lse: Array | None) -> None:
    """Run a prefill call."""
    with np.errstate(over="ignore", invalid="ignore"):
        _prefill().prefill_attention(call, out, lse)
