"""Planning of kernels "v1" and "v2", decode attention for layout vllm: which of them, launched how.

Nothing here reads an array, so that a plan serves all calls like its own.
"""

from __future__ import annotations

import math

import numpy as np

from ...calls import AttentionCall
from ...compiler.compile import Capability
from ...kernels.paged.attention import make_v1, make_v2, shared_bytes, static_shared_bytes
from ...kernels.paged.config import PARTITION_SIZE, AttentionConfig
from ...kernels.paged.reduction import ReductionConfig, make_v2_reduce
from ...layouts import VECTOR_BYTES
from ..device import FIRST_WITH_FP8, LARGEST_GRID_X, LARGEST_GRID_Y, Device
from .check import lens_of, with_check, workspaces_of_check
from .plan import (
    FLOAT_BYTES,
    Launch,
    Plan,
    Workspaces,
    arrays_of,
    compile_for,
    max_seq_len_of,
    out_strides,
    scale_pointers,
    scale_strides,
)

LONGEST_V1 = 8192  # tokens, by vLLM's rule
MANY_ROWS = 512  # query heads of the batch; by that rule, more of them are enough work for v1


def plan(device: Device, call: AttentionCall) -> Plan:
    """Plan a call in layout vllm with at least one sequence, and compile kernels that are new.

    Raises
    ------
    ValueError
        Kernel "v1" is asked for and the logits of the longest sequence exceed the device's shared memory; or as
        `workspaces`.
    """
    needed = workspaces(call, capability=device.capability)
    config = attention_config(call, capability=device.capability)
    max_seq_len = max_seq_len_of(call)
    if choose(call.kernel, max_seq_len, call.q.shape[0] * call.q.shape[1]) == "v1":
        launches: tuple[Launch, ...] = (_v1(device, call, config, max_seq_len),)
    else:
        launches = _v2(device, call, config, max_seq_len)
    return Plan(with_check(device, call, *launches), needed, arrays_of(call))


def workspaces(call: AttentionCall, *, capability: Capability) -> Workspaces:
    """The workspaces in which a call keeps partial results and bad entries.

    Raises
    ------
    ValueError
        More thread blocks than a grid has.
    """
    (num_seqs, num_heads, head_dim), max_seq_len = call.q.shape, max_seq_len_of(call)
    num_rows, needed = num_seqs * num_heads, workspaces_of_check(call)
    if num_rows > LARGEST_GRID_X:
        raise ValueError(f"num_seqs * num_heads must be below 2**31 on a device, got {num_rows}")
    if choose(call.kernel, max_seq_len, num_rows) == "v1":
        return needed
    nbytes = num_rows * math.prod(_grid_of_partitions(call, max_seq_len)) * FLOAT_BYTES
    return (("tmp_out", nbytes * head_dim), ("exp_sums", nbytes), ("max_logits", nbytes), *needed)


def attention_config(call: AttentionCall, *, capability: Capability) -> AttentionConfig:
    """The config of v1 or v2 for a call on a device of this compute capability."""
    spec, itemsize = call.spec, call.k_cache.itemsize
    inner = (spec.block_size * VECTOR_BYTES, VECTOR_BYTES, spec.block_size * itemsize)
    return AttentionConfig(
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        q_kind=call.q.dtype.name,
        kv_kind=spec.kind,
        packed=(*call.k_cache.strides[2:4], call.v_cache.strides[2]) == inner,
        hardware_fp8=spec.kind == "fp8_e4m3" and capability >= FIRST_WITH_FP8,
        score_mod=call.options.score_mod,
    )


def choose(kernel: str, max_seq_len: int, num_rows: int) -> str:
    """The kernel for num_rows = num_seqs * num_heads and up to `max_seq_len` tokens; "auto" follows vLLM's rule."""
    if kernel != "auto":
        return kernel
    is_short = max_seq_len <= LONGEST_V1
    return "v1" if is_short and (max_seq_len <= PARTITION_SIZE or num_rows > MANY_ROWS) else "v2"


def _v1(device: Device, call: AttentionCall, config: AttentionConfig, max_seq_len: int) -> Launch:
    chunk, limit = config.chunk_size, device.max_shared_bytes
    num_tokens = min(max_seq_len, call.options.visible.most_units(chunk, max_seq_len) * chunk)
    dynamic = shared_bytes(config, num_tokens)
    if dynamic + static_shared_bytes(config) > limit:
        raise ValueError(
            f'kernel "v1" keeps the logits of {max_seq_len} tokens (max_blocks * block_size, or max_seq_len rounded up '
            f"to a power of two) in shared memory, and {limit} bytes have no room for {dynamic}: "
            'give a lower max_seq_len, or use kernel "v2"'
        )
    num_rows = call.q.shape[0] * call.q.shape[1]
    return Launch(
        compile_for(device, make_v1, config),
        (num_rows, 1, 1),
        ("out", "lse", "", "", *_inputs(call)),
        _scalars(call, max_seq_len, out_strides(call)),
        dynamic,
    )


def _v2(device: Device, call: AttentionCall, config: AttentionConfig, max_seq_len: int) -> tuple[Launch, ...]:
    num_seqs, num_heads, head_dim = call.q.shape
    num_rows, of_partitions = num_seqs * num_heads, _grid_of_partitions(call, max_seq_len)
    most = math.prod(of_partitions)
    tmp_strides = (num_heads * most * head_dim * FLOAT_BYTES, most * head_dim * FLOAT_BYTES)
    partitions = Launch(
        compile_for(device, make_v2, config),
        (num_rows, *of_partitions),
        ("tmp_out", "", "exp_sums", "max_logits", *_inputs(call)),
        _scalars(call, max_seq_len, tmp_strides),
        shared_bytes(config, PARTITION_SIZE),
    )
    reduction = Launch(
        compile_for(device, make_v2_reduce, ReductionConfig(head_dim, config.q_kind)),
        (num_rows, 1, 1),
        ("out", "lse", "tmp_out", "exp_sums", "max_logits", lens_of(call), "sinks"),
        (num_heads, max_seq_len, *call.options.visible.scalars, most, *out_strides(call)),
    )
    return partitions, reduction


def _grid_of_partitions(call: AttentionCall, max_seq_len: int) -> tuple[int, int]:
    """Thread blocks of v2 in y and z; the last ones in z may have no partition."""
    needed = call.options.visible.most_units(PARTITION_SIZE, max_seq_len)
    return min(needed, LARGEST_GRID_Y), -(-needed // LARGEST_GRID_Y)


def _inputs(call: AttentionCall) -> tuple[str, ...]:
    """The names of what v1 and v2 read, in the order of their parameters."""
    return "q", "k_cache", "v_cache", "block_tables", lens_of(call), "alibi_slopes", "sinks", *scale_pointers(call)


def _scalars(call: AttentionCall, max_seq_len: int, out_strides: tuple[int, ...]) -> tuple[int | float, ...]:
    num_heads, spec, options = call.q.shape[1], call.spec, call.options
    return (
        *(num_heads, num_heads // spec.num_kv_heads, max_seq_len, *options.visible.scalars, *scale_strides(call)),
        call.block_tables.strides[0] // call.block_tables.itemsize,
        *(*call.q.strides[:2], *out_strides),
        *(*call.k_cache.strides[:4], *call.v_cache.strides[:3]),
        *(float(options.scale), float(options.softcap or 0.0)),
        *(1.0 if isinstance(x, np.ndarray) else float(x) for x in (call.k_scale, call.v_scale)),
    )
