"""What a call launches, which follows from shapes, strides, dtypes and options alone; a run adds its addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...buckets import bucket
from ...calls import CACHES
from ...compiler.compile import CompiledKernel, compile_kernel

if TYPE_CHECKING:
    from ...arrays import Array
    from ...calls import AttentionCall, Caches, GatherCall, WriteCall
    from ...kernels.device.source import KernelSource
    from ..device import Device

    _Call = AttentionCall | WriteCall | GatherCall

Workspaces = tuple[tuple[str, int], ...]

LONGEST = 2**31 - 1  # lengths are int32
FLOAT_BYTES = 4


def compile_for(device: Device, make: Callable[[Any], KernelSource], config: Any) -> CompiledKernel:
    """Compile a kernel for a device's compute capability, with line info if the device wants it."""
    return compile_kernel(make, config, device.capability, lineinfo=device.lineinfo)


def max_seq_len_of(call: AttentionCall) -> int:
    """The longest sequence that a plan allows: the call's bound, rounded up within the capacity of the tables.

    Kernels compare lengths with it, so calls whose bounds are in one bucket share a plan.
    """
    return min(bucket(call.max_seq_len), call.block_tables.shape[1] * call.spec.block_size, LONGEST)


def cache_strides(call: _Call, cache: Array) -> tuple[int, int, int]:
    """The block, token and head stride of a cache in bytes, 0 for an axis of one element."""
    block, token, head = (0 if n == 1 else stride for n, stride in zip(cache.shape[:3], cache.strides[:3], strict=True))
    return (block, token, head) if call.spec.layout == "NHD" else (block, head, token)


def scale_strides(call: _Call) -> tuple[int, ...]:
    """The strides of the scales of rows, of K and then of V; zeros where rows have none."""
    if call.k_scales is None or call.v_scales is None:
        return (0,) * 6
    return *cache_strides(call, call.k_scales), *cache_strides(call, call.v_scales)


def scale_pointers(call: AttentionCall) -> tuple[str, str]:
    """The names of the arrays that a kernel has scales from: those of rows, or of KV heads."""
    return ("k_scale", "v_scale") if call.k_scales is None else ("k_scales", "v_scales")


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
    """The launches of a call, in order, and what they share.

    Attributes
    ----------
    launches : tuple of Launch
    workspaces : tuple of (str, int)
        Names and bytes.
    arrays : dict of str to array
        Tables, lengths and arrays of options by name: all but what each run brings.
    """

    launches: tuple[Launch, ...]
    workspaces: Workspaces
    arrays: dict[str, Array] = field(compare=False)


def arrays_of(call: AttentionCall) -> dict[str, Array]:
    """The arrays of a call by name, without q, caches and results."""
    options = call.options
    given = {
        **{"block_tables": call.block_tables, "seq_lens": call.seq_lens, "query_starts": call.query_starts},
        **{"alibi_slopes": options.alibi_slopes, "sinks": options.sinks},
        **{"leftpad": options.visible.leftpad, "mask": options.mask},
        **{"k_scale": call.k_scale, "v_scale": call.v_scale},
    }
    return {name: x for name, x in given.items() if isinstance(x, np.ndarray)}


def out_strides(call: AttentionCall) -> tuple[int, int]:
    """Bytes between rows and between heads of the result, which is C-contiguous unless the caller gives it."""
    if call.out is not None:
        of_row, of_head, _ = call.out.strides
        return of_row, of_head
    _, num_heads, head_dim = call.q.shape
    return num_heads * head_dim * call.q.itemsize, head_dim * call.q.itemsize


def run_plan(device: Device, plan: Plan, q: Array, caches: Caches, out: Array, lse: Array | None) -> None:
    """Launch a plan with q, caches and results like those that it was made for."""
    arrays = {"out": out, "lse": lse, "q": q, **dict(zip(CACHES, caches, strict=False)), **plan.arrays}
    addresses = {name: device.address(name, x) for name, x in arrays.items() if x is not None}
    addresses |= {name: device.scratch(name, nbytes) for name, nbytes in plan.workspaces}
    for x in plan.launches:
        device.launch(x.kernel, x.grid, [*(addresses.get(name, 0) for name in x.pointers), *x.scalars], x.shared_bytes)
