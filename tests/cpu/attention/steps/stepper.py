"""Steps as functions of arrays, and their arguments."""

import numpy as np
from numba import njit

from pagedkv.cpu.attention.steps.code import STEP, TILE


def stepper(function):
    """A step as a function of arrays and integers."""

    @njit
    def call(arguments):
        function(*arguments)

    def run(*arguments):
        call(tuple(x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments))

    return run


def rows_at(rows):
    """The addresses of the rows of a tile; those past the end repeat the last one."""
    return (rows.ctypes.data + np.minimum(np.arange(TILE), len(rows) - 1) * rows.strides[0]).astype(np.int64)


def grouped(q, group_rows):
    """Queries (rows, places) as (groups, places / 4, R, 4)."""
    return np.ascontiguousarray(q.reshape(-1, group_rows, q.shape[1] // 4, 4).transpose(0, 2, 1, 3))


def swept(rows, num_groups, *, next_rows=None, run_steps=1):
    """The last arguments of a sweep over rows (tokens, KV heads, dims), with so many groups for each KV head."""
    following = rows if next_rows is None else next_rows
    tile = np.full((2 * STEP, rows.shape[2]), np.nan, np.float32)
    return (
        *(rows_at(rows), 0, rows.strides[1], rows_at(following), 0, following.strides[1]),
        *(len(rows), rows.shape[1], num_groups, rows.shape[2], run_steps, tile, rows_at(tile)),
    )
