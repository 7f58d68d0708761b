"""The CPU as a backend. numba is imported by the first attention call: the other operations do with NumPy.

An infinity in a result is a value like any other: it comes back without a warning, as from a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arithmetic import with_default_float_env
from ..arrays import Array
from ..calls import AttentionCall, WriteCall
from ..compiling.compile_thread import made_once
from . import blocks, merge, rotary

if TYPE_CHECKING:
    from .attention.prepared import Prepared

gather_kv = with_default_float_env(blocks.gather_kv)
copy_blocks, swap_blocks = blocks.copy_blocks, blocks.swap_blocks
merge_states = with_default_float_env(merge.merge_states)
apply_rotary = with_default_float_env(rotary.apply_rotary)
_write_rounded = with_default_float_env(blocks.write_kv)


def write_kv(call: WriteCall) -> None:
    """Run a call of write_kv."""
    (blocks.write_kv if blocks.moves_bits(call) else _write_rounded)(call)


@made_once(most=1)
def _attention() -> Any:
    from .attention import prepared

    return prepared


@with_default_float_env
def attention(call: AttentionCall, out: Array, lse: Array | None) -> None:
    """Run a call of decode_attention or prefill_attention."""
    _attention().attend(call, out, lse)


@with_default_float_env
def prepare(call: AttentionCall) -> Prepared:
    """What a call launches, for it and for others like it."""
    return _attention().prepare(call)


@with_default_float_env
def run(prepared: Prepared, q: Array, k_cache: Array, v_cache: Array, out: Array, lse: Array) -> None:
    """Run what was prepared, for other q and caches that are alike."""
    prepared.run(q, k_cache, v_cache, out, lse)
