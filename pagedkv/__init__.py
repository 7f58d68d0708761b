"""Paged KV cache and paged attention for Python.

Importing it imports NumPy and ml_dtypes alone; numba comes with the first attention call, numba-cuda with the first
one on a device or in the emulator. `reference`, `emulator` and `trace` are imported when they are looked up.
"""

import typing as _typing

from .cache import PagedKVCache
from .cpu.threads import get_num_threads, set_num_threads
from .errors import BackendUnavailableError, CapacityError, OutOfBlocksError
from .memory import BlockPool, SequenceTable
from .memory.sizing import kv_bytes
from .operations.attention import decode_attention, merge_states, prefill_attention
from .operations.bad_entries import raise_if_failed
from .operations.caches import copy_blocks, gather_kv, swap_blocks, write_kv
from .operations.plan import AttentionPlan, plan_decode, plan_prefill
from .operations.rotary import apply_rotary
from .operations.warmup import warmup
from .operations.workspaces import release_workspaces, reserve_workspaces, workspace_bytes
from .scheduling import Scheduler

__version__ = "0.1.0"

__all__ = [
    "AttentionPlan",
    "BackendUnavailableError",
    "BlockPool",
    "CapacityError",
    "OutOfBlocksError",
    "PagedKVCache",
    "Scheduler",
    "SequenceTable",
    "apply_rotary",
    "copy_blocks",
    "decode_attention",
    "gather_kv",
    "get_num_threads",
    "kv_bytes",
    "merge_states",
    "plan_decode",
    "plan_prefill",
    "prefill_attention",
    "raise_if_failed",
    "release_workspaces",
    "reserve_workspaces",
    "set_num_threads",
    "swap_blocks",
    "warmup",
    "workspace_bytes",
    "write_kv",
]

if _typing.TYPE_CHECKING:
    from . import emulator as emulator
    from . import reference as reference
    from . import trace as trace
else:

    def __getattr__(name):
        if name in ("emulator", "reference", "trace"):
            from importlib import import_module

            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
