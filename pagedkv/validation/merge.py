"""Validation of merge_states, in the order of attention.py."""

from __future__ import annotations

from typing import Any

from ..arrays import Array
from ..calls import MergeCall
from ..layouts import FLOAT32
from ..placement import place
from . import require


def merge_call(outs: Any, lses: Any, *, backend: object) -> MergeCall:
    """Validate the arguments of merge_states, and make the call."""
    named = [*_states("outs", outs), *_states("lses", lses)]
    placement, arrays = place(backend, named)
    views = dict(zip((name for name, _ in named), arrays, strict=True))
    out_list, lse_list = _unstack("outs", outs, views), _unstack("lses", lses, views)
    if len(out_list) != len(lse_list) or not out_list:
        raise ValueError(
            f"outs and lses must hold the same number of states, at least 1, got {len(out_list)} and {len(lse_list)}"
        )
    for name, x in out_list:
        require.ndim(name, x, "(rows, num_heads, head_dim)", 3)
    shape = out_list[0][1].shape
    for name, x in out_list:
        require.shape(name, x, "(rows, num_heads, head_dim)", shape)
    for name, x in lse_list:
        require.shape(name, x, "(rows, num_heads)", shape[:2])
    for name, x in out_list:
        require.float_dtype(name, x)
        require.dtype(name, x, out_list[0][1].dtype, f", that of {out_list[0][0]}")
    for name, x in lse_list:
        require.dtype(name, x, FLOAT32)
    for name, x in (*out_list, *lse_list):
        require.strides(name, x)
    for name, x in out_list:
        require.row_alignment(name, x, placement)
    return MergeCall(placement, [x for _, x in out_list], [x for _, x in lse_list])


def _states(name: str, states: Any) -> list[tuple[str, Any]]:
    return (
        [(f"{name}[{i}]", x) for i, x in enumerate(states)] if isinstance(states, (list, tuple)) else [(name, states)]
    )


def _unstack(name: str, states: Any, views: dict[str, Array]) -> list[tuple[str, Array]]:
    if isinstance(states, (list, tuple)):
        return [(f"{name}[{i}]", views[f"{name}[{i}]"]) for i in range(len(states))]
    if not views[name].ndim:
        raise ValueError(f"{name} must be a list of states or stacked along the first axis, got shape ()")
    return [(f"{name}[{i}]", x) for i, x in enumerate(views[name])]
