"""What merging checks before it computes: arguments in, checked NumPy views out. The order is that of validation.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import checks
from .arrays import Array
from .checks import FLOAT32
from .placement import Side, place


class MergeCall(NamedTuple):
    """The checked arguments of merge_states."""

    outs: list[Array]
    lses: list[Array]
    side: Side


def merge(outs: Any, lses: Any, *, backend: object) -> MergeCall:
    """Check the arguments of merge_states: the states' outputs and LSEs as lists."""
    named = [*_states("outs", outs), *_states("lses", lses)]
    side, arrays = place(backend, named)
    views = dict(zip((name for name, _ in named), arrays, strict=True))
    out_list, lse_list = _unstack("outs", outs, views), _unstack("lses", lses, views)
    if len(out_list) != len(lse_list) or not out_list:
        raise ValueError(
            f"outs and lses must hold the same number of states, at least 1, got {len(out_list)} and {len(lse_list)}"
        )
    for name, x in out_list:
        checks.ndim(name, x, "(rows, num_heads, head_dim)", 3)
    shape = out_list[0][1].shape
    for name, x in out_list:
        checks.shape(name, x, "(rows, num_heads, head_dim)", shape)
    for name, x in lse_list:
        checks.shape(name, x, "(rows, num_heads)", shape[:2])
    for name, x in out_list:
        checks.float_dtype(name, x)
        checks.dtype(name, x, out_list[0][1].dtype, f", that of {out_list[0][0]}")
    for name, x in lse_list:
        checks.dtype(name, x, FLOAT32)
    for name, x in (*out_list, *lse_list):
        checks.strides(name, x)
    for name, x in out_list:
        checks.row_alignment(name, x, side)
    return MergeCall([x for _, x in out_list], [x for _, x in lse_list], side)


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
