"""How many thread blocks of kernel split have work in a cell, and how many waves of them there are."""

from __future__ import annotations

from ...cuda.device import FIRST_WITH_FP8
from ...kernels.split.config import SplitConfig
from ...kernels.split.kernel import make_split
from ..report import Row
from .workloads import Cell


def work_of(cell: Cell, capability: tuple[int, int], num_multiprocessors: int) -> Row:
    """*blocks* and *waves* of a cell.

    A wave is as many thread blocks as all multiprocessors hold at once, by the number that the kernel is compiled for.
    While a last wave that is nearly empty runs, most of the GPU has nothing to do: where waves are few, look there for
    the bandwidth that is missing.
    """
    config = config_of(cell, capability)
    num_splits = sum(-(-length // config.split_size(length, cell.num_kv_heads)) for length in cell.seq_lens)
    blocks = num_splits * cell.num_kv_heads * config.num_tiles
    return {"blocks": blocks, "waves": blocks / (num_multiprocessors * make_split(config).min_blocks)}


def config_of(cell: Cell, capability: tuple[int, int]) -> SplitConfig:
    """What the kernel is compiled for in a cell."""
    return SplitConfig(
        head_dim=cell.head_dim,
        group_size=cell.group_size,
        block_size=cell.block_size,
        q_kind=cell.dtype,
        kv_kind=cell.kv_dtype or cell.dtype,
        hardware_fp8=cell.kv_dtype != "fp8_e4m3" or capability >= FIRST_WITH_FP8,
        architecture=capability[0],
    )
