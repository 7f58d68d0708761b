"""The CPU as a backend. The first attention call imports numba; the other operations need only NumPy.

An infinity in a result is a value like any other: NumPy does not warn about it, as a device would not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arithmetic import with_default_float_env
from ..arrays import Array
from ..calls import AttentionCall, Caches, WriteCall
from ..kernel_cache.compile_thread import made_once
from . import blocks, merge, rotary

if TYPE_CHECKING:
    from .attention.plan import AttentionPlan

gather_kv = with_default_float_env(blocks.gather_kv)
copy_blocks, swap_blocks = blocks.copy_blocks, blocks.swap_blocks
merge_states = with_default_float_env(merge.merge_states)
apply_rotary = with_default_float_env(rotary.apply_rotary)
_write_rounded = with_default_float_env(blocks.write_kv)


def write_kv(call: WriteCall) -> None:
    """Run a call of write_kv."""
    (blocks.write_kv if blocks.moves_bits(call) else _write_rounded)(call)


@made_once(most=1)
def _load_attention() -> Any:
    """The module that plans and runs attention; importing it imports numba."""
    from .attention import plan

    return plan


@with_default_float_env
def plan(call: AttentionCall) -> AttentionPlan:
    """Plan a call of decode_attention or prefill_attention, and others like it."""
    made: AttentionPlan = _load_attention().plan_attention(call)
    return made


@with_default_float_env
def run(plan: AttentionPlan, q: Array, caches: Caches, out: Array, lse: Array | None, *, is_given: bool) -> None:
    """Run a plan with q and caches that are like those it was made for."""
    plan.run(q, caches, out, lse, is_given)
