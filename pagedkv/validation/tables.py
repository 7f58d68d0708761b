"""What the rotary embedding requires of cos, sin and positions, for every operation that rotates."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays import Array
from ..layouts import FLOAT32
from . import require

NAMES = ("cos", "sin", "positions")
_POSITIONS = (np.dtype(np.int32), np.dtype(np.int64))
_TABLE = "(max_positions, rotary_dim / 2)"


def require_shapes(views: Mapping[str, Array], num_tokens: int, head_dim: int) -> None:
    """Raise ValueError unless the tables and the positions among the views suit tokens and heads of these sizes."""
    cos = views["cos"]
    require.ndim("cos", cos, _TABLE, 2)
    if not 1 <= cos.shape[1] <= head_dim // 2:
        raise ValueError(
            f"cos must have one column for each pair of dims, from 1 to head_dim / 2 = {head_dim // 2}, "
            f"got {cos.shape[1]}; of a table that has them twice, pass the first half"
        )
    require.shape("sin", views["sin"], _TABLE, cos.shape)
    require.shape("positions", views["positions"], "(num_tokens,)", (num_tokens,))


def require_dtypes(views: Mapping[str, Array], rotated: str) -> None:
    """Raise TypeError unless cos, sin and positions suit the dtype of the array called `rotated`."""
    cos, dtype = views["cos"], views[rotated].dtype
    if cos.dtype not in (FLOAT32, dtype):
        other = "" if dtype == FLOAT32 else f" or {dtype}, that of {rotated}"
        raise TypeError(f"cos must have dtype float32{other}, got {cos.dtype}")
    require.dtype("sin", views["sin"], cos.dtype, ", that of cos")
    if views["positions"].dtype not in _POSITIONS:
        raise TypeError(f"positions must have dtype int32 or int64, got {views['positions'].dtype}")
