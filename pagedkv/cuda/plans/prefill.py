"""Planning of prefill attention: which kernel, compiled for what, launched how.

Grids follow from the rows of q, the number of sequences and the bound on lengths, never from query_starts and lengths:
the host does not read those of a device. So a call on tensor cores launches two kernels, the one of many rows and the
one that splits the keys of few, and each takes its own sequences. It skips a kernel only if shapes, the bound,
the keys that rows may see or `exact` leave it no sequence. Kernels that leave states are followed by one that merges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...calls import AttentionCall
from ...compiler.compile import Capability
from ...compiler.occupancy import shared_kib
from ...kernels.device.sizes import ELEMENT_BITS
from ...kernels.device.source import KernelSource
from ...kernels.prefill.config import (
    ENOUGH_BLOCKS,
    FEW_KV_HEADS,
    FEW_ROWS,
    MOST_DIMS,
    MOST_STATES,
    PART,
    STRETCH,
    CoresConfig,
    TensorConfig,
)
from ...kernels.prefill.cuda_cores import kernel as cuda_cores
from ...kernels.prefill.cuda_cores.kernel import make_prefill_on_cuda_cores
from ...kernels.prefill.cuda_cores.shape import CoresShape
from ...kernels.prefill.items import num_tiles
from ...kernels.prefill.tensor_cores.kernel import make_prefill
from ...kernels.prefill.tensor_cores.parts import kernel as split
from ...kernels.prefill.tensor_cores.parts.kernel import make_prefill_split
from ...kernels.prefill.tensor_cores.parts.merge import make_prefill_merge
from ...kernels.prefill.tensor_cores.parts.shape import MOST_PARTS, PartShape
from ...kernels.prefill.tensor_cores.stretches.kernel import make_prefill_stretches, make_prefill_stretches_wgmma
from ...kernels.prefill.tensor_cores.stretches.merge import (
    make_prefill_stretches_merge,
    make_prefill_stretches_wgmma_merge,
)
from ...kernels.prefill.tensor_cores.stretches.states import state_bytes
from ...kernels.prefill.tensor_cores.tile import TileShape
from ...kernels.prefill.tensor_cores.wgmma.kernel import make_prefill_wgmma
from ...kernels.prefill.tensor_cores.wgmma.shape import WgmmaShape, takes
from ...layouts import KV_DTYPES
from ...visible import Visible
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

_STATES, _COUNTER = ("prefill_sums", "prefill_states"), "prefill_items"


def plan(device: Device, call: AttentionCall) -> Plan:
    """Plan a call with at least one row and one sequence, and compile kernels that are new.

    Rows that belong to no sequence stay as they are.

    Raises
    ------
    ValueError
        As `workspaces`.
    """
    kernels = _kernels(call, device.capability)
    needed = _workspaces(call, kernels, device.capability)  # before anything is compiled
    launches = [_launch(device, call, kernel) for kernel in kernels]
    return Plan(with_check(device, call, *launches), needed, arrays_of(call))


def workspaces(call: AttentionCall, *, capability: Capability) -> Workspaces:
    """The workspaces in which a call keeps partial results, and a check what it has found.

    Raises
    ------
    ValueError
        More rows, or thread blocks, than a grid has.
    """
    return _workspaces(call, _kernels(call, capability), capability)


def _workspaces(call: AttentionCall, kernels: list[_Kernel], capability: Capability) -> Workspaces:
    num_rows, num_blocks = call.q.shape[0] * group_size_of(call), max(kernel.grid[0] for kernel in kernels)
    if max(num_blocks, num_rows) > LARGEST_GRID_X:
        raise ValueError(
            "num_tokens * num_heads / num_kv_heads must be below 2**31 on a device, and so must the thread blocks, "
            f"got {num_rows} and {num_blocks}: give the sequences to several calls"
        )
    needed = workspaces_of_check(call)
    if not suits_tensor_cores(call):
        return needed
    config = tensor_config(call, capability=capability)
    if uses_wgmma(config, capability):
        needed = ((_COUNTER, 4), *needed)
    if shares_keys(call, config):
        shape = shape_of(config, capability)
        num_states = most_states(_grid(call, shape.rows)[0], most_stretches(call, shape))
        needed = (("prefill_stretches", num_states * state_bytes(shape)), *needed)
    if not splits_keys(call, config):
        return needed
    num_states = min(_rows_of(call)) * call.spec.num_kv_heads * most_parts(call.options.visible, max_seq_len_of(call))
    sizes = (FLOAT_BYTES * num_states * config.head_dim, FLOAT_BYTES * num_states * 2)
    return (*zip(_STATES, sizes, strict=True), *needed)


class _Kernel(NamedTuple):
    """A kernel for a call, with the arguments that not all kernels take."""

    make: Callable[[Any], KernelSource]
    config: Any
    grid: tuple[int, int, int]
    shared_bytes: int
    scalars: tuple[int, ...]  # strides come last
    pointers: tuple[str, ...] = ()
    is_persistent: bool = False  # thread blocks take items in turn, in a grid of as many as run at once


def _launch(device: Device, call: AttentionCall, kernel: _Kernel) -> Launch:
    options, (num_tokens, num_heads, _) = call.options, call.q.shape
    pointers = (
        *("out", "lse", "q", "k_cache", "v_cache", "block_tables"),
        *(lens_of(call), "query_starts"),
        *("alibi_slopes", "sinks", *scale_pointers(call)),
        *kernel.pointers,
    )
    scalars = (
        *(len(call.seq_lens), num_tokens, call.spec.num_kv_heads, num_heads, max_seq_len_of(call)),
        *(*options.visible.scalars, *scale_strides(call), *kernel.scalars),
        *(bits_of(options.scale), bits_of(options.softcap or 0.0)),
        *(bits_of(1.0 if isinstance(x, np.ndarray) else x) for x in (call.k_scale, call.v_scale)),
    )
    compiled, grid = compile_for(device, kernel.make, kernel.config), kernel.grid
    if kernel.is_persistent:
        grid = (min(grid[0], device.blocks_at_once(compiled, kernel.shared_bytes)), 1, 1)
    return Launch(compiled, grid, pointers, scalars, kernel.shared_bytes)


def _kernels(call: AttentionCall, capability: Capability) -> list[_Kernel]:
    if suits_tensor_cores(call):
        return _on_tensor_cores(call, capability)
    return [_on_cuda_cores(call, capability)]


def _on_tensor_cores(call: AttentionCall, capability: Capability) -> list[_Kernel]:
    config = tensor_config(call, capability=capability)
    strides = (*_strides(call), *cache_strides(call, call.k_cache), *cache_strides(call, call.v_cache))
    few_rows, on_warpgroups = FEW_ROWS if splits_keys(call, config) else 0, uses_wgmma(config, capability)
    # Warpgroups give other bits to few keys, and bits must not depend on the rest of the batch: so a call of few rows
    # alone costs one launch more there, whose thread blocks find nothing to do if all sequences are long.
    all_are_few = call.q.shape[0] * config.group_size <= FEW_ROWS and not on_warpgroups
    kernels = []
    if not (few_rows and all_are_few):
        many_rows = _in_stretches if shares_keys(call, config) else _many_rows
        kernels += many_rows(call, config, capability, few_rows, strides)
    if few_rows:
        kernels += _split(call, config, 0 if all_are_few else PART + 1, strides)
    return kernels


def _many_rows(
    call: AttentionCall, config: TensorConfig, capability: Capability, few_rows: int, strides: tuple[int, ...]
) -> list[_Kernel]:
    """The kernel for sequences with many rows, or few keys."""
    shape, scalars = shape_of(config, capability), (few_rows, *strides)
    grid = _grid(call, shape.rows)
    if isinstance(shape, WgmmaShape):
        return [_Kernel(make_prefill_wgmma, config, grid, shape.nbytes, scalars, (_COUNTER,), is_persistent=True)]
    return [_Kernel(make_prefill, config, grid, shape.nbytes, scalars)]


def _in_stretches(
    call: AttentionCall, config: TensorConfig, capability: Capability, few_rows: int, strides: tuple[int, ...]
) -> list[_Kernel]:
    """As `_many_rows`, where thread blocks share the keys of rows, and the kernel that merges their states.

    With enough tiles of rows, each has one thread block, and one state of all its stretches.
    """
    shape = shape_of(config, capability)
    make, make_merge = make_prefill_stretches, make_prefill_stretches_merge
    if isinstance(shape, WgmmaShape):
        make, make_merge = make_prefill_stretches_wgmma, make_prefill_stretches_wgmma_merge
    tiles, _, _ = _grid(call, shape.rows)
    columns, states = columns_and_states(tiles, most_stretches(call, shape))
    scalars = (few_rows, STRETCH, states, *strides)
    merging = replace(config, wide=False, score_mod=None)  # the merge reads neither caches nor logits
    return [
        _Kernel(make, config, (tiles, columns, 1), shape.nbytes, scalars, ("prefill_stretches",)),
        _Kernel(make_merge, merging, (tiles, shape.row_tiles * shape.k_steps, 1), 0, scalars, ("prefill_stretches",)),
    ]


def columns_and_states(num_tiles: int, most: int) -> tuple[int, int]:
    """The thread blocks that share the keys of a tile, of `most` stretches, and the states that they leave."""
    columns = min(most, -(-ENOUGH_BLOCKS // num_tiles)) if num_tiles * most <= MOST_STATES else 1
    return columns, most if columns > 1 else 1


def most_states(num_tiles: int, most: int) -> int:
    """The most states of a call that has no more tiles, and stretches, than these."""
    return max(num_tiles, min(num_tiles * most, MOST_STATES))


def most_stretches(call: AttentionCall, shape: TileShape) -> int:
    """The most stretches of which the rows of a thread block see keys."""
    return call.options.visible.most_units(STRETCH, max_seq_len_of(call), shape.rows)


def _split(call: AttentionCall, config: TensorConfig, least_keys: int, strides: tuple[int, ...]) -> list[_Kernel]:
    """The kernels that split keys and merge states, for sequences with few rows and at least `least_keys` keys."""
    shape, (of_tokens, of_seqs) = PartShape(config), _rows_of(call)
    parts = most_parts(call.options.visible, max_seq_len_of(call))
    num_columns = len(call.seq_lens) * call.spec.num_kv_heads
    scalars = (least_keys, parts, int(of_tokens < of_seqs), *strides)
    grid = (num_columns * shape.tiles_of_sequence, -(-parts // shape.num_warps), 1)
    merging = replace(config, wide=False, score_mod=None)  # the merge reads neither caches nor logits
    return [
        _Kernel(make_prefill_split, config, grid, split.dynamic_bytes(config), scalars, _STATES),
        _Kernel(make_prefill_merge, merging, (num_columns * FEW_ROWS, 1, 1), 0, scalars, _STATES),
    ]


def most_parts(visible: Visible, max_seq_len: int) -> int:
    """The most parts that rows of a sequence see."""
    return min(visible.most_units(PART, max_seq_len, FEW_ROWS), MOST_PARTS)


def _rows_of(call: AttentionCall) -> tuple[int, int]:
    """Rows of a KV head that may have partial results: those of all tokens, and FEW_ROWS of each sequence."""
    return call.q.shape[0] * group_size_of(call), len(call.seq_lens) * FEW_ROWS


def _on_cuda_cores(call: AttentionCall, capability: Capability) -> _Kernel:
    config = cores_config(call, capability=capability)
    caches = (call.k_cache, call.v_cache)
    if call.spec.layout == "vllm":
        of_caches = [(x.strides[0], x.strides[3], *x.strides[1:3]) for x in caches]
    else:
        of_caches = [(*cache_strides(call, x), 0) for x in caches]
    slopes, mask = call.options.alibi_slopes, call.options.mask
    scalars = (
        *(call.spec.block_size, *_strides(call), *of_caches[0], *of_caches[1]),
        0 if slopes is None or slopes.ndim == 1 else slopes.strides[0] // FLOAT_BYTES,
        *(0 if mask is None else mask.size, 0 if mask is None or mask.dtype == np.bool_ else 3),
    )
    grid, nbytes = _grid(call, CoresShape(config).rows), cuda_cores.dynamic_bytes(config)
    return _Kernel(make_prefill_on_cuda_cores, config, grid, nbytes, scalars, ("leftpad", "mask"))


def _grid(call: AttentionCall, rows: int) -> tuple[int, int, int]:
    """The grid of a kernel whose thread blocks have `rows` rows."""
    tiles = num_tiles(call.q.shape[0], len(call.seq_lens), group_size_of(call), rows)
    return tiles * call.spec.num_kv_heads, 1, 1


def _strides(call: AttentionCall) -> tuple[int, ...]:
    return (call.block_tables.strides[0], *call.q.strides[:2], *out_strides(call))


def tensor_config(call: AttentionCall, *, capability: Capability) -> TensorConfig:
    """The config of the kernel on tensor cores for a call on a device of this compute capability."""
    spec = call.spec
    return TensorConfig(
        head_dim=spec.head_dim,
        group_size=group_size_of(call),
        block_size=spec.block_size,
        q_kind=call.q.dtype.name,
        kv_kind=spec.kind,
        modified=is_modified(call),
        wide=any(is_wide(call, cache, ELEMENT_BITS[spec.kind]) for cache in (call.k_cache, call.v_cache)),
        hardware_fp8=spec.kind != "fp8_e4m3" or capability >= FIRST_WITH_FP8,
        shared_kib=shared_kib(capability),
        architecture=capability[0],
        score_mod=call.options.score_mod,
    )


def cores_config(call: AttentionCall, *, capability: Capability) -> CoresConfig:
    """The config of the kernel on CUDA cores for a call on a device of this compute capability."""
    spec = call.spec
    return CoresConfig(
        head_dim=spec.head_dim,
        q_kind=call.q.dtype.name,
        kv_kind=spec.kind,
        is_vllm=spec.layout == "vllm",
        hardware_fp8=spec.kind != "fp8_e4m3" or capability >= FIRST_WITH_FP8,
        score_mod=call.options.score_mod,
    )


def uses_wgmma(config: TensorConfig, capability: Capability) -> bool:
    """Whether the kernel on warpgroups takes a config: on 9.0 alone, which has its instructions."""
    return capability == (9, 0) and takes(config)


def shape_of(config: TensorConfig, capability: Capability) -> TileShape:
    """The shape of the kernel of many rows."""
    return WgmmaShape(config) if uses_wgmma(config, capability) else TileShape(config)


def shares_keys(call: AttentionCall, config: TensorConfig) -> bool:
    """Whether thread blocks share the keys of rows: with few KV heads, if rows may see keys of several stretches.

    Before 9.0 the kernel would spill 808 bytes with 128 dims.
    """
    seen = call.options.visible.most_keys(max_seq_len_of(call))
    return config.architecture >= 9 and call.spec.num_kv_heads <= FEW_KV_HEADS and seen > STRETCH


def group_size_of(call: AttentionCall) -> int:
    """Query heads of a KV head."""
    return call.q.shape[1] // call.spec.num_kv_heads


def splits_keys(call: AttentionCall, config: TensorConfig) -> bool:
    """Whether some sequence may have few rows that see more keys than a warp takes, whatever the lengths are."""
    seen = call.options.visible.most_keys(max_seq_len_of(call))
    return config.can_split and not call.exact and config.group_size <= FEW_ROWS and seen > PART


def suits_tensor_cores(call: AttentionCall) -> bool:
    """Whether tensor cores multiply elements of q and of the cache, and have registers for their rows.

    CUDA cores take masks, padding and slopes of each sequence: on tensor cores these would cost all other calls
    registers.
    """
    spec, q_kind = call.spec, call.q.dtype.name
    is_operand = q_kind != "float32" and (spec.kind == q_kind or spec.kind in KV_DTYPES)
    options = call.options
    is_rare = options.visible.leftpad is not None or options.mask is not None
    is_rare |= options.alibi_slopes is not None and options.alibi_slopes.ndim == 2
    return is_operand and not is_rare and spec.layout != "vllm" and spec.head_dim <= MOST_DIMS
