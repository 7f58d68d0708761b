"""Validation of cos, sin and positions, for the operations that rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array
from ..layouts import FLOAT32
from . import require

NAMES = ("cos", "sin", "positions")
_POSITIONS = (np.dtype(np.int32), np.dtype(np.int64))
_TABLE = "(max_positions, rotary_dim / 2)"
_FIRST_HALVES = (
    "of tables that have each column twice, as those of transformers, pass cos[:, :{half}] and sin[:, :{half}]"
)
_EVERY_SECOND = "of tables that have each column twice, pass every second one, copied: cos[:, ::2] and sin[:, ::2]"


def require_shapes(views: Mapping[str, Array], num_tokens: int, head_dim: int) -> None:
    """Raise ValueError unless the shapes of cos, sin and positions match the tokens and heads."""
    cos = views["cos"]
    if cos.ndim == 3:
        raise ValueError(
            f"cos must have shape {_TABLE}, got {cos.shape}; what a model of transformers makes has a row for each "
            f"token, and each column twice: pass cos.flatten(0, 1)[:, :{cos.shape[2] // 2}], sin alike, and 0, 1, 2, "
            "... as positions, one for each token"
        )
    require.ndim("cos", cos, _TABLE, 2)
    if not 1 <= cos.shape[1] <= head_dim // 2:
        raise ValueError(
            f"cos must have one column for each pair of dims, from 1 to head_dim / 2 = {head_dim // 2}, "
            f"got {cos.shape[1]}; of a table that has them twice, pass the first half"
        )
    require.shape("sin", views["sin"], _TABLE, cos.shape)
    require.shape("positions", views["positions"], "(num_tokens,)", (num_tokens,))


def require_dtypes(views: Mapping[str, Array], rotated: str) -> None:
    """Raise TypeError unless the dtypes of cos, sin and positions go with that of the array called `rotated`."""
    cos, dtype = views["cos"], views[rotated].dtype
    if cos.dtype not in (FLOAT32, dtype):
        other = "" if dtype == FLOAT32 else f" or {dtype}, that of {rotated}"
        raise TypeError(f"cos must have dtype float32{other}, got {cos.dtype}")
    require.dtype("sin", views["sin"], cos.dtype, ", that of cos")
    if views["positions"].dtype not in _POSITIONS:
        raise TypeError(f"positions must have dtype int32 or int64, got {views['positions'].dtype}")


def require_rotary_dim(rotary_dim: Any, cos: Array, head_dim: int) -> None:
    """Raise unless the tables rotate `rotary_dim` dims, if the caller gives it; their shapes are valid."""
    if rotary_dim is None:
        return
    dim, columns = even_dim(rotary_dim, head_dim), cos.shape[1]
    if columns != dim // 2:
        remedy = f"; {_FIRST_HALVES.format(half=dim // 2)}" if columns == dim else ""
        raise ValueError(
            f"cos must have rotary_dim / 2 = {dim // 2} columns, one for each pair of dims, got {columns}{remedy}"
        )


def even_dim(rotary_dim: Any, head_dim: int) -> int:
    """Convert rotary_dim to an int, or raise."""
    dim = require.integer("rotary_dim", rotary_dim)
    if dim % 2 or not 2 <= dim <= head_dim:
        raise ValueError(f"rotary_dim must be even, from 2 to head_dim = {head_dim}, got {dim}")
    return dim


def require_columns_once(cos: Array, sin: Array, rotary_dim: Any) -> None:
    """Raise ValueError if tables on the host have each column twice and the caller gives no `rotary_dim`.

    Only a few rows are compared. A row without angles, as at position 0, proves nothing.
    """
    half, odd = divmod(cos.shape[1], 2)
    if odd or not len(cos) or rotary_dim is not None:
        return
    for what, other, first, second, remedy in (
        ("equal halves", half, slice(half), slice(half, None), _FIRST_HALVES.format(half=half)),
        ("equal neighbours", 1, slice(0, None, 2), slice(1, None, 2), _EVERY_SECOND),
    ):
        if sin[-1, 0] == sin[-1, other]:  # in most tables these angles differ
            rows = [min(1, len(cos) - 1), len(cos) // 2, -1]
            once, again = (np.stack([cos[rows, part], sin[rows, part]]) for part in (first, second))
            if np.array_equal(once, again) and (once[0] != 1).any():
                dim = 2 * cos.shape[1]
                raise ValueError(
                    f"cos and sin must have one column for each pair of dims, got {what}: {remedy}; or say "
                    f"rotary_dim={dim} if these are to rotate {dim} dims"
                )
