"""Planning of prefill attention: which kernel, compiled for what, launched how.

The grid follows from the rows of q and the number of sequences, never from query_starts: those of a device are not read
on the host.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from ...arrays import Array
from ...calls import AttentionCall
from ...kernels.device.bad_entries import NUM_BYTES
from ...kernels.device.elements import ELEMENT_BITS
from ...kernels.prefill import tensor_cores
from ...kernels.prefill.check import CheckConfig, make_check_batch
from ...kernels.prefill.config import MOST_DIMS, CoresConfig, TensorConfig
from ...kernels.prefill.cuda_cores import kernel as cuda_cores
from ...kernels.prefill.cuda_cores.kernel import make_prefill_on_cuda_cores
from ...kernels.prefill.cuda_cores.shape import CoresShape
from ...kernels.prefill.items import num_tiles
from ...kernels.prefill.tensor_cores import make_prefill
from ...kernels.prefill.tile import TileShape
from ...kernels.prefill.wgmma.kernel import make_prefill_wgmma
from ...kernels.prefill.wgmma.shape import WgmmaShape, takes
from ...layouts import FP8_KINDS
from ..compiler.compile import Capability, CompiledKernel, compile_for
from ..compiler.occupancy import shared_kib
from ..device import FIRST_WITH_FP8, LARGEST_GRID_X, REPORT, Device
from .plan import NO_WINDOW, WGMMA, Launch, Plan, bits_of, cache_strides, is_modified, is_wide, max_seq_len_of, run

CHECKED_LENS = "checked_lens"  # the workspace that has the lengths of a checked call


def prefill_attention(device: Device, call: AttentionCall, out: Array, lse: Array | None) -> Plan:
    """Run the call, of at least one row and one sequence, on a device, into `out` and `lse`.

    Parameters
    ----------
    device : Device
    call : AttentionCall
        Of prefill_attention.
    out : (num_tokens, num_heads, head_dim) array of q's dtype
        Rows that no sequence has stay as they are.
    lse : (num_tokens, num_heads) float32 array, C-contiguous, or None

    Returns
    -------
    Plan
        What has been launched.
    """
    launches = plan(device, call, out)
    run(device, launches, call, out, lse)
    return launches


def plan(device: Device, call: AttentionCall, out: Array) -> Plan:
    """What a call launches, from its shapes, strides, dtypes and options alone; compiles the kernel if need be.

    Raises
    ------
    ValueError
        More rows, or thread blocks, than a grid has.
    """
    spec, (num_tokens, num_heads, _) = call.spec, call.q.shape
    num_seqs, group_size = len(call.seq_lens), num_heads // spec.num_kv_heads
    launch = _on_tensor_cores if suits_tensor_cores(call) else _on_cuda_cores
    kernel, rows, shared_bytes, strides = launch(device, call, out)
    num_blocks = num_tiles(num_tokens, num_seqs, group_size, rows) * spec.num_kv_heads
    if max(num_blocks, num_tokens * group_size) > LARGEST_GRID_X:
        raise ValueError(
            "num_tokens * num_heads / num_kv_heads must be below 2**31 on a device, and so must the thread blocks, "
            f"got {num_tokens * group_size} and {num_blocks}: give the sequences to several calls"
        )
    options = call.options
    scalars = (
        *(num_seqs, num_tokens, spec.num_kv_heads, num_heads, max_seq_len_of(call)),
        *(options.window or NO_WINDOW, int(options.causal), *strides),
        *(bits_of(options.scale), bits_of(options.softcap or 0.0)),
        *(bits_of(1.0 if isinstance(x, np.ndarray) else x) for x in (call.k_scale, call.v_scale)),
    )
    lengths = CHECKED_LENS if call.checked else "seq_lens"
    pointers = (
        *("out", "lse", "q", "k_cache", "v_cache", "block_tables", lengths, "query_starts"),
        *("alibi_slopes", "sinks", "k_scale", "v_scale"),
    )
    attention = Launch(kernel, (num_blocks, 1, 1), pointers, scalars, shared_bytes)
    if not call.checked:
        return Plan((attention,), ())
    return Plan((_check(device, call), attention), ((REPORT, NUM_BYTES), (CHECKED_LENS, 4 * num_seqs)))


def _check(device: Device, call: AttentionCall) -> Launch:
    """Of the kernel that looks at tables, lengths and query starts, and records what it refuses."""
    spec = call.spec
    sizes = (call.q.shape[0], spec.num_blocks, max_seq_len_of(call), spec.block_size, call.block_tables.strides[0])
    kernel = compile_for(device, make_check_batch, CheckConfig())
    return Launch(
        kernel, (len(call.seq_lens), 1, 1), (CHECKED_LENS, "block_tables", "seq_lens", "query_starts", REPORT), sizes
    )


class _Kernel(NamedTuple):
    """A kernel for a call: query rows and dynamic shared memory of a thread block, and the strides that it takes."""

    compiled: CompiledKernel
    rows: int
    shared_bytes: int
    strides: tuple[int, ...]


def _on_tensor_cores(device: Device, call: AttentionCall, out: Array) -> _Kernel:
    config = tensor_config(call, capability=device.capability)
    strides = (*_strides(call, out), *cache_strides(call, call.k_cache), *cache_strides(call, call.v_cache))
    if uses_wgmma(config, capability=device.capability):
        kernel, shape = compile_for(device, make_prefill_wgmma, config), WgmmaShape(config)
        return _Kernel(kernel, shape.rows, shape.nbytes, strides)
    kernel = compile_for(device, make_prefill, config)
    return _Kernel(kernel, TileShape(config).rows, tensor_cores.dynamic_bytes(config), strides)


def _on_cuda_cores(device: Device, call: AttentionCall, out: Array) -> _Kernel:
    config = cores_config(call, capability=device.capability)
    caches = (call.k_cache, call.v_cache)
    if call.spec.layout == "vllm":
        of_caches = [(x.strides[0], x.strides[3], *x.strides[1:3]) for x in caches]
    else:
        of_caches = [(*cache_strides(call, x), 0) for x in caches]
    strides = (call.spec.block_size, *_strides(call, out), *of_caches[0], *of_caches[1])
    kernel = compile_for(device, make_prefill_on_cuda_cores, config)
    return _Kernel(kernel, CoresShape(config).rows, cuda_cores.dynamic_bytes(config), strides)


def _strides(call: AttentionCall, out: Array) -> tuple[int, ...]:
    return (call.block_tables.strides[0], *call.q.strides[:2], *out.strides[:2])


def tensor_config(call: AttentionCall, *, capability: Capability) -> TensorConfig:
    """What the kernel on tensor cores is compiled for in a call on a device of this compute capability."""
    spec = call.spec
    return TensorConfig(
        head_dim=spec.head_dim,
        group_size=call.q.shape[1] // spec.num_kv_heads,
        block_size=spec.block_size,
        q_kind=call.q.dtype.name,
        kv_kind=spec.kind,
        modified=is_modified(call),
        wide=any(is_wide(call, cache, ELEMENT_BITS[spec.kind]) for cache in (call.k_cache, call.v_cache)),
        hardware_fp8=spec.kind != "fp8_e4m3" or capability >= FIRST_WITH_FP8,
        shared_kib=shared_kib(capability),
        score_mod=call.options.score_mod,
    )


def cores_config(call: AttentionCall, *, capability: Capability) -> CoresConfig:
    """What the kernel on CUDA cores is compiled for in a call on a device of this compute capability."""
    spec = call.spec
    return CoresConfig(
        head_dim=spec.head_dim,
        q_kind=call.q.dtype.name,
        kv_kind=spec.kind,
        is_vllm=spec.layout == "vllm",
        hardware_fp8=spec.kind != "fp8_e4m3" or capability >= FIRST_WITH_FP8,
        score_mod=call.options.score_mod,
    )


def uses_wgmma(config: TensorConfig, *, capability: Capability) -> bool:
    """True where the kernel on warpgroups takes a config: on 9.0, if the environment asks for it."""
    return os.environ.get(WGMMA) == "1" and capability == (9, 0) and takes(config)


def suits_tensor_cores(call: AttentionCall) -> bool:
    """True where elements of q and of the cache are operands of tensor cores, in rows that registers have room for."""
    spec, q_kind = call.spec, call.q.dtype.name
    is_operand = q_kind != "float32" and (spec.kind == q_kind or spec.kind in FP8_KINDS)
    return is_operand and spec.layout != "vllm" and spec.head_dim <= MOST_DIMS
