"""The CUDA kernels as a backend: on GPUs, or on another device that launches them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..arrays import Array, address_of, current_streams
from ..calls import AttentionCall, Caches, CopyCall, GatherCall, MergeCall, RotaryCall, SwapCall, WriteCall
from ..placement import Placement
from . import bad_entries, driver
from .device import Device
from .plans import attention, blocks, merge, rotary
from .plans.cache import PlanCache
from .plans.gpu_plan import GpuPlan
from .plans.plan import run_plan


class KernelBackend:
    """The operations, on a device that launches kernels.

    Parameters
    ----------
    device_of : callable
        From the placement of a call to the device that launches its kernels, for the length of a ``with`` statement.
    """

    def __init__(self, device_of: Callable[[Placement], AbstractContextManager[Device]]) -> None:
        self._device_of = device_of

    def plan(self, call: AttentionCall) -> Any:
        with self._device_of(call.placement) as device:
            return call.placement._replace(beside=None), attention.plan(device, call)

    def run(self, plan: Any, q: Array, caches: Caches, out: Array, lse: Array | None, *, is_given: bool) -> None:
        placement, made = plan
        with self._device_of(placement) as device:
            run_plan(device, made, q, caches, out, lse)

    def write_kv(self, call: WriteCall) -> None:
        if len(call.slots):
            with self._device_of(call.placement) as device:
                blocks.write_kv(device, call)

    def gather_kv(self, call: GatherCall, k: Array, v: Array) -> None:
        if call.seq_len:
            with self._device_of(call.placement) as device:
                blocks.gather_kv(device, call, k, v)

    def copy_blocks(self, call: CopyCall) -> None:
        if len(call.pairs):
            with self._device_of(call.placement) as device:
                blocks.copy_blocks(device, call)

    def swap_blocks(self, call: SwapCall) -> None:
        if len(call.pairs):
            with self._device_of(call.placement) as device:
                blocks.swap_blocks(device, call)

    def merge_states(self, call: MergeCall, out: Array, lse: Array) -> None:
        if lse.size:
            with self._device_of(call.placement) as device:
                merge.merge_states(device, call, out, lse)

    def apply_rotary(self, call: RotaryCall, q_out: Array, k_out: Array | None) -> None:
        if call.q.size or (call.k is not None and call.k.size):
            with self._device_of(call.placement) as device:
                rotary.apply_rotary(device, call, q_out, k_out)


class GpuBackend(KernelBackend):
    """The operations on GPUs.

    Attributes
    ----------
    plans : PlanCache
        The plans of attention calls.
    """

    def __init__(self) -> None:
        super().__init__(driver.device_of)
        self.plans = PlanCache()

    def plan(self, call: AttentionCall) -> GpuPlan:
        with driver.device_of(call.placement) as device:
            made = GpuPlan(attention.plan(device, call), call)
        self.plans.add(call.arguments, made)
        return made

    def run(self, plan: GpuPlan, q: Array, caches: Caches, out: Array, lse: Array | None, *, is_given: bool) -> None:
        brought = [*map(address_of, (q, *caches))]
        addresses = [*brought, *plan.addresses[len(brought) : -1], address_of(out)]
        plan.run(plan.stream, [*addresses, 0 if lse is None else address_of(lse)])

    def raise_if_failed(self) -> None:
        """Wait for the GPUs, and raise the first bad entry that a kernel has skipped; see `pagedkv.raise_if_failed`."""
        driver.refuse_capture(current_streams(), "raise_if_failed waits for the GPU: call it after the replay")
        bad_entries.raise_if_failed(driver.cuda_devices())

    def workspace_bytes(self) -> int:
        """What `pagedkv.workspace_bytes` returns."""
        return sum(device.num_bytes for device in driver.cuda_devices())

    def reserve_workspaces(self, calls: Sequence[AttentionCall]) -> int:
        """Make the workspaces of calls, all on one stream, and return how many bytes that has added."""
        needed: dict[str, int] = {}
        with driver.device_of(calls[0].placement) as device:
            for call in calls:
                needed.update(attention.workspaces(call, capability=device.capability))
            return device.reserve(needed)

    def release_workspaces(self) -> int:
        """Wait for the GPUs, and free what no graph uses; see `pagedkv.release_workspaces`."""
        driver.refuse_capture(current_streams(), "release_workspaces waits for the GPU: call it after the capture")
        return sum(device.release() for device in driver.cuda_devices())
