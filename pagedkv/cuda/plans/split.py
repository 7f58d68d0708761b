"""Planning of kernel "split": decode attention for NHD and HND in one launch.

The units of a launch follow from the keys that a row may see, within the bound on lengths, which is the capacity of the
block tables if nothing better is known. They never follow from lengths: the host does not read those of a device. The
grid has a thread block for each unit, or, where thread blocks take several in turn, as many as the device runs at once.
"""

from __future__ import annotations

import numpy as np

from ...calls import AttentionCall
from ...compiler.compile import Capability
from ...kernels.split.config import SplitConfig
from ...kernels.split.kernel import dynamic_bytes, is_persistent, make_split
from ..device import FIRST_WITH_FP8, LARGEST_GRID_X, Device
from .check import lens_of, with_check, workspaces_of_check
from .plan import (
    FLOAT_BYTES,
    Launch,
    Plan,
    Workspaces,
    arrays_of,
    bits_of,
    cache_strides,
    compile_for,
    is_modified,
    is_wide,
    max_seq_len_of,
    out_strides,
    scale_pointers,
    scale_strides,
)


def plan(device: Device, call: AttentionCall) -> Plan:
    """Plan a call in layout NHD or HND with at least one sequence, and compile the kernel if it is a new one.

    Raises
    ------
    ValueError
        As `workspaces`.
    """
    spec, options = call.spec, call.options
    config = split_config(call, capability=device.capability)
    needed = workspaces(call, capability=device.capability)
    most_splits, num_columns = _most_splits(call, config), _num_columns(call, config)
    kernel, shared_bytes = compile_for(device, make_split, config), dynamic_bytes(config)
    grid = (num_columns, most_splits, 1)
    if is_persistent(config):
        grid = (min(num_columns * most_splits, device.blocks_at_once(kernel, shared_bytes)), 1, 1)
    launch = Launch(
        kernel,
        grid,
        (
            *("out", "lse", "split_sums", "split_states", "split_counters"),
            *("q", "k_cache", "v_cache", "block_tables", lens_of(call)),
            *("alibi_slopes", "sinks", *scale_pointers(call)),
        ),
        (
            *(spec.num_kv_heads, call.q.shape[1], max_seq_len_of(call), most_splits, num_columns),
            *(*options.visible.scalars, *scale_strides(call)),
            *(call.block_tables.strides[0], *call.q.strides[:2], *out_strides(call)),
            *(*cache_strides(call, call.k_cache), *cache_strides(call, call.v_cache)),
            *(bits_of(options.scale), bits_of(options.softcap or 0.0)),
            *(bits_of(1.0 if isinstance(x, np.ndarray) else x) for x in (call.k_scale, call.v_scale)),
        ),
        shared_bytes,
    )
    return Plan(with_check(device, call, launch), needed, arrays_of(call))


def workspaces(call: AttentionCall, *, capability: Capability) -> Workspaces:
    """The workspaces in which the kernel keeps partial results, and counts the splits of a grid column.

    Raises
    ------
    ValueError
        More thread blocks than a grid has.
    """
    config = split_config(call, capability=capability)
    num_columns, most_splits = _num_columns(call, config), _most_splits(call, config)
    if num_columns * most_splits > LARGEST_GRID_X:
        raise ValueError(
            f"num_seqs * num_kv_heads, times the number of thread blocks that share a KV head and that of splits of a "
            f"sequence, must be below 2**31 on a device, got {num_columns * most_splits}"
        )
    num_seqs, num_heads, head_dim = call.q.shape
    num_partials = num_seqs * num_heads * most_splits if most_splits > 1 else 1
    return (
        ("split_sums", num_partials * head_dim * FLOAT_BYTES),
        ("split_states", num_partials * 2 * FLOAT_BYTES),
        ("split_counters", num_columns * 4),
        *workspaces_of_check(call),
    )


def _num_columns(call: AttentionCall, config: SplitConfig) -> int:
    return call.q.shape[0] * call.spec.num_kv_heads * config.num_tiles


def _most_splits(call: AttentionCall, config: SplitConfig) -> int:
    return config.most_splits(call.options.visible.most_keys(max_seq_len_of(call)), call.spec.num_kv_heads)


def split_config(call: AttentionCall, *, capability: Capability) -> SplitConfig:
    """The config of the kernel for a call on a device of this compute capability."""
    spec = call.spec
    return SplitConfig(
        head_dim=spec.head_dim,
        group_size=call.q.shape[1] // spec.num_kv_heads,
        block_size=spec.block_size,
        q_kind=call.q.dtype.name,
        kv_kind=spec.kind,
        modified=is_modified(call),
        wide=any(is_wide(call, cache) for cache in (call.k_cache, call.v_cache)),
        hardware_fp8=spec.kind != "fp8_e4m3" or capability >= FIRST_WITH_FP8,
        architecture=capability[0],
        score_mod=call.options.score_mod,
    )
