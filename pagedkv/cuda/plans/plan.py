"""What a call launches, which follows from shapes, strides, dtypes and options alone; a call adds its addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...buckets import bucket
from ...compiler.compile import CompiledKernel, compile_kernel

if TYPE_CHECKING:
    from ...arrays import Array
    from ...calls import AttentionCall
    from ...kernels.device.source import KernelSource
    from ..device import Arguments, Device

Workspaces = tuple[tuple[str, int], ...]

NO_WINDOW = LONGEST = 2**31 - 1  # lengths are int32
FLOAT_BYTES = 4


def compile_for(device: Device, make: Callable[[Any], KernelSource], config: Any) -> CompiledKernel:
    """Compile a kernel for a device's compute capability, with line info if the device wants it."""
    return compile_kernel(make, config, device.capability, lineinfo=device.lineinfo)


def max_seq_len_of(call: AttentionCall) -> int:
    """The longest sequence that a plan allows: the call's bound, rounded up within the capacity of the tables.

    Kernels compare lengths with it, so calls whose bounds are in one bucket share a plan.
    """
    return min(bucket(call.max_seq_len), call.block_tables.shape[1] * call.spec.block_size, LONGEST)


def cache_strides(call: AttentionCall, cache: Array) -> tuple[int, int, int]:
    """The block, token and head stride of a cache in bytes, 0 for an axis of one element."""
    block, token, head = (0 if n == 1 else stride for n, stride in zip(cache.shape[:3], cache.strides[:3], strict=True))
    return (block, token, head) if call.spec.layout == "NHD" else (block, head, token)


def bits_of(number: float) -> int:
    """The bits of a float32; converting a float64 in the kernel would take registers."""
    return int(np.float32(number).view(np.uint32))


def is_modified(call: AttentionCall) -> bool:
    """Whether a softcap, ALiBi slopes or a `score_mod` changes logits."""
    options = call.options
    return bool(options.softcap or options.alibi_slopes is not None or options.score_mod)


def is_wide(call: AttentionCall, cache: Array, vector_bytes: int = 16) -> bool:
    """Whether offsets of rows, in vectors of at most so many bytes, exceed 32 bits or may be negative."""
    block, token, _ = cache_strides(call, cache)
    vector = min(vector_bytes, call.spec.head_dim * cache.itemsize & -(call.spec.head_dim * cache.itemsize))
    last = max(call.spec.num_blocks - 1, 0) * block + (call.spec.block_size - 1) * token
    return min(block, token) < 0 or last // vector >= 2**32


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a plan. Its arguments are the addresses of `pointers`, then `scalars`.

    Attributes
    ----------
    kernel : CompiledKernel
    grid : tuple of int
    pointers : tuple of str
        Names of arrays and workspaces; a name that the call does not have is a null pointer.
    scalars : tuple of int and float
    shared_bytes : int
        Dynamic shared memory of a block.
    """

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    pointers: tuple[str, ...]
    scalars: tuple[int | float, ...]
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of a call, in order, and the workspaces that they share as (name, bytes)."""

    launches: tuple[Launch, ...]
    workspaces: Workspaces


def arrays_of(call: AttentionCall) -> dict[str, Any]:
    """The arguments of a call that may be arrays, by name."""
    options = call.options
    return {
        **{"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache},
        **{"block_tables": call.block_tables, "seq_lens": call.seq_lens, "query_starts": call.query_starts},
        **{"alibi_slopes": options.alibi_slopes, "sinks": options.sinks},
        **{"leftpad": options.leftpad, "mask": options.mask},
        **{"k_scale": call.k_scale, "v_scale": call.v_scale},
    }


def run_plan(device: Device, plan: Plan, call: AttentionCall, out: Array, lse: Array | None) -> None:
    """Launch a plan with the addresses of a call's arrays."""
    for launch in launches_of(device, plan, call, out, lse):
        device.launch(*launch)


def launches_of(device: Device, plan: Plan, call: AttentionCall, out: Array, lse: Array | None) -> list[Arguments]:
    """The arguments of `Device.launch` for each launch of a plan, with the addresses of a call."""
    arrays = {"out": out, "lse": lse, **arrays_of(call)}
    addresses = {name: device.address(name, x) for name, x in arrays.items() if isinstance(x, np.ndarray)}
    for name, nbytes in plan.workspaces:
        addresses[name] = device.scratch(name, nbytes)
    launches: list[Arguments] = []
    for x in plan.launches:
        pointers = [addresses.get(name, 0) for name in x.pointers]
        launches.append((x.kernel, x.grid, [*pointers, *x.scalars], x.shared_bytes))
    return launches
