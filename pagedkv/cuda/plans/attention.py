"""Planning of attention: whose kernels a call takes."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from . import paged, prefill, split

if TYPE_CHECKING:
    from ...calls import AttentionCall
    from ...compiler.compile import Capability
    from ..device import Device
    from .plan import Plan, Workspaces


def plan(device: Device, call: AttentionCall) -> Plan:
    """Plan a call with at least one row and one sequence, and compile kernels that are new.

    Raises
    ------
    ValueError
        Kernel "v1" is asked for and the logits of the longest sequence exceed the device's shared memory; or as
        `workspaces`.
    """
    made: Plan = _planner_of(call).plan(device, call)
    return made


def workspaces(call: AttentionCall, *, capability: Capability) -> Workspaces:
    """The workspaces in which a call keeps partial results, and a check what it has found.

    Raises
    ------
    ValueError
        More rows, or thread blocks, than a grid has.
    """
    needed: Workspaces = _planner_of(call).workspaces(call, capability=capability)
    return needed


def _planner_of(call: AttentionCall) -> ModuleType:
    if call.query_starts is not None:
        return prefill
    return paged if call.spec.layout == "vllm" else split
