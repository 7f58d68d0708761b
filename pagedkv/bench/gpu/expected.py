"""What is to be expected of kernel split in a cell: thread blocks with work, waves of them, and a share by a model."""

from __future__ import annotations

from ...cuda.device import FIRST_WITH_FP8
from ...kernels.split.config import SplitConfig
from ...kernels.split.kernel import make_split
from ..report import Row
from ..waves import NUM_SMS, Model
from .workloads import Cell


def work_of(cell: Cell, capability: tuple[int, int], num_multiprocessors: int) -> Row:
    """*thread blocks*, *waves* and *expected share* of a cell.

    A wave is as many thread blocks as all multiprocessors hold at once, by the number that the kernel is compiled for.
    While a last wave that is nearly empty runs, most of the GPU has nothing to do: where waves are few, look there for
    the bandwidth that is missing.
    """
    config = config_of(cell, capability)
    num_splits = sum(-(-length // config.split_size(length, cell.num_kv_heads)) for length in cell.seq_lens)
    thread_blocks = num_splits * cell.num_kv_heads * config.num_tiles
    waves = thread_blocks / (num_multiprocessors * make_split(config).min_blocks)
    share = _expected_share(cell, config, num_multiprocessors)
    return {"thread blocks": thread_blocks, "waves": waves, "expected share": share}


def _expected_share(cell: Cell, config: SplitConfig, num_multiprocessors: int) -> float | None:
    """What the model says, which is one of an H100, of equal lengths, and of query heads that a thread block takes."""
    if num_multiprocessors != NUM_SMS or cell.is_ragged or config.num_tiles > 1 or not config.on_tensor_cores:
        return None
    return Model(config, cell.num_kv_heads, len(cell.seq_lens), cell.seq_lens[0]).share


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
