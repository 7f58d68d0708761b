"""Steps as functions of arrays, and their arguments."""

import numpy as np
from numba import njit

from pagedkv.cpu.attention.steps.code import STEP, TILE
from pagedkv.cpu.attention.steps.step_order import TilePass


def stepper(function):
    """A step as a function of arrays, integers and passes."""

    @njit
    def call(arguments):
        function(*arguments)

    def number(x):
        if isinstance(x, TilePass):
            return TilePass(*map(number, x))
        return x.ctypes.data if isinstance(x, np.ndarray) else x

    def run(*arguments):
        call(tuple(map(number, arguments)))

    return run


def rows_at(rows):
    """The addresses of the rows of a tile; those past the end repeat the last one."""
    return (rows.ctypes.data + np.minimum(np.arange(TILE), len(rows) - 1) * rows.strides[0]).astype(np.int64)


def grouped(q, group_rows):
    """Queries (rows, places) as (groups, places / 4, R, 4)."""
    return np.ascontiguousarray(q.reshape(-1, group_rows, q.shape[1] // 4, 4).transpose(0, 2, 1, 3))


def pass_over(rows, num_groups, *, next_rows=None, run_steps=1):
    """A pass over rows (tokens, KV heads, dims), with `num_groups` groups for each KV head."""
    following = rows if next_rows is None else next_rows
    tile = np.full((2 * STEP, rows.shape[2]), np.nan, np.float32)
    return TilePass(
        rows=rows_at(rows),
        offset=0,
        head_stride=rows.strides[1],
        next_rows=rows_at(following),
        next_offset=0,
        next_head_stride=following.strides[1],
        count=len(rows),
        num_heads=rows.shape[1],
        num_groups=num_groups,
        head_dim=rows.shape[2],
        run_steps=run_steps,
        tile=tile,
        tile_rows=rows_at(tile),
        key_factors=0,
        row_factors=0,
    )
