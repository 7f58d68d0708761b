"""Compile the kernels of calls without a GPU; their arrays may be on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Array
from ..calls import AttentionCall, CopyCall, GatherCall, MergeCall, RotaryCall, WriteCall
from ..compiler.compile import Capability, CompiledKernel
from ..errors import BackendUnavailableError
from . import driver
from .plans import attention
from .plans.blocks import copy_blocks, gather_kv, write_kv
from .plans.merge import merge_states
from .plans.rotary import apply_rotary


class _CompilingDevice:
    """A Device that records kernels instead of launching them."""

    max_shared_bytes = 48 * 1024

    def __init__(self, capability: Capability) -> None:
        self.capability = capability
        self.lineinfo = driver.wants_lineinfo()
        self.kernels: list[CompiledKernel] = []

    def address(self, name: str, array: Array) -> int:
        return 0

    def scratch(self, name: str, nbytes: int) -> int:
        return 0

    def blocks_at_once(self, kernel: CompiledKernel, shared_bytes: int) -> int:
        return 1

    def launch(
        self, kernel: CompiledKernel, grid: tuple[int, int, int], args: Sequence[int | float], shared_bytes: int = 0
    ) -> None:
        if kernel not in self.kernels:
            self.kernels.append(kernel)


def compile_ahead(
    decodes: Sequence[AttentionCall],
    prefills: Sequence[AttentionCall],
    writes: Sequence[WriteCall],
    gather: GatherCall,
    copy: CopyCall,
    merge: MergeCall | None,
    rotary: RotaryCall | None,
    capabilities: Sequence[Capability] | None,
) -> list[str]:
    """Compile and link the kernels that calls like these launch.

    Parameters
    ----------
    decodes, prefills, writes, gather, copy, merge, rotary
        Valid calls with at least one token each, like those to come.
    capabilities : sequence of (int, int), or None
        Compute capabilities; None for those of the GPUs of this machine.

    Returns
    -------
    list of str
        Names of the kernels.

    Raises
    ------
    BackendUnavailableError
        There is no compiler; `capabilities` is None, and there is no GPU.
    """
    if capabilities is None:
        try:
            capabilities = sorted(set(driver.capabilities()))
        except BackendUnavailableError as error:
            raise BackendUnavailableError(
                f"give capabilities, [(9, 0)] for an H100, to compile for a GPU that is elsewhere: here {error}"
            ) from error
    names = []
    for capability in capabilities:
        device: Any = _CompilingDevice(capability)
        for call in (*decodes, *prefills):
            for launch in attention.plan(device, call).launches:
                device.launch(launch.kernel, launch.grid, ())
        for written in writes:
            write_kv(device, written)
        dense = np.zeros(writes[0].k.shape, gather.spec.format.dense)
        gather_kv(device, gather, dense, dense.copy())
        copy_blocks(device, copy)
        if merge is not None:
            out, lse = merge.outs[0].copy(), merge.lses[0].copy()
            merge_states(device, merge, out, lse)
        if rotary is not None:
            apply_rotary(device, rotary, rotary.q, rotary.k)
        for compiled in device.kernels:
            compiled.linked  # noqa: B018
            names.append(f"{compiled.name} for {capability[0]}.{capability[1]}")
    return names
