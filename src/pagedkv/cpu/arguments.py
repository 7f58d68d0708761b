"""What both attention kernels take of a call: arrays as they are compiled for, addresses and numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float32, int32, int64, types

from ..arrays import Array
from ..calls import AttentionCall, per_head
from .steps.order import is_shuffled, order, places
from .steps.shapes import LANES
from .tiles import cache_strides

NO_WINDOW = 2**62
NO_HEADS = np.empty(0, np.float32)


class Caches(NamedTuple):
    """The addresses of K and V and their Strides, as plain tuples: numba takes a microsecond to unbox a NamedTuple."""

    k: int
    v: int
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    block_size: int


class LogitOptions(NamedTuple):
    """What happens to a logit and which keys stay; a score_mod is compiled into the kernel instead."""

    causal: bool
    window: int  # NO_WINDOW for none
    softcap: np.float32  # 0 for none
    slopes: int  # the address of the ALiBi slopes, 0 for none


class Arguments(NamedTuple):
    """The first arguments of both kernels."""

    q: npt.NDArray[np.float32]  # (rows, num_heads, places), times the scale and k_scale, as keys are widened
    tables: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    query_starts: npt.NDArray[np.int64]  # (num_seqs + 1,) the first row of q of each sequence, and the end
    caches: Caches
    options: LogitOptions
    sinks: npt.NDArray[np.float32]  # (num_heads,), or empty
    v_scale: npt.NDArray[np.float32]  # (num_kv_heads,)
    places: npt.NDArray[np.int64]  # (head_dim,) the place of each dim in a widened row


_STRIDES = types.UniTuple(int64, 4)
# The numba types of `counter`, `num_items` and Arguments, with which the parameters of both kernels begin.
FIRST_TYPES = (
    *(int64, int64),
    *(float32[:, :, ::1], int32[:, ::1], int32[::1], int64[::1]),
    types.NamedTuple([int64, int64, _STRIDES, _STRIDES, int64], Caches),
    types.NamedTuple([boolean, int64, float32, int64], LogitOptions),
    *(float32[::1], float32[::1], types.Array(int64, 1, "C", readonly=True)),
)


def make_arguments(
    call: AttentionCall, q: Array, query_starts: npt.NDArray[np.int64]
) -> tuple[Arguments, tuple[Array, ...]]:
    """The arguments of a call for some of its rows of q, and the arrays that must outlive the addresses among them."""
    spec, options, k_cache, v_cache = call.spec, call.options, call.k_cache, call.v_cache
    k_scale, v_scale = per_head(call.k_scale, spec.num_kv_heads), per_head(call.v_scale, spec.num_kv_heads)
    factor = (options.scale * k_scale).repeat(q.shape[1] // spec.num_kv_heads)
    k_strides, v_strides = cache_strides(k_cache, spec.layout), cache_strides(v_cache, spec.layout)
    slopes = _heads(options.alibi_slopes)
    arguments = Arguments(
        _in_places(q.astype(np.float32, order="C") * factor[:, None], spec.kind),
        call.block_tables,
        call.seq_lens,
        query_starts,
        Caches(k_cache.ctypes.data, v_cache.ctypes.data, tuple(k_strides), tuple(v_strides), spec.block_size),
        LogitOptions(
            options.causal,
            NO_WINDOW if options.window is None else options.window,
            np.float32(options.softcap or 0),
            slopes.ctypes.data if slopes.size else 0,
        ),
        _heads(options.sinks),
        v_scale,
        places(spec.kind, q.shape[2]),
    )
    return arguments, (k_cache, v_cache, slopes)


def _in_places(q: npt.NDArray[np.float32], kind: str) -> npt.NDArray[np.float32]:
    """Rows with their dims in the places of a widened row, and zeros behind them up to a whole vector."""
    head_dim = q.shape[2]
    if is_shuffled(kind):
        q = np.take(q, order(kind, head_dim), axis=2, mode="clip")  # several times as fast as an index
    padding = -head_dim % LANES
    return np.pad(q, ((0, 0), (0, 0), (0, padding))) if padding else q


def new_result(q: Array) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Room for the rows of the result, in places, and for their LSEs: those of rows without keys."""
    rows, num_heads, head_dim = q.shape
    width = -(-head_dim // LANES) * LANES
    return np.zeros((rows, num_heads, width), np.float32), np.full((rows, num_heads), -np.inf, np.float32)


def from_places(rows: npt.NDArray[np.float32], kind: str, head_dim: int) -> npt.NDArray[np.float32]:
    """Rows with their dims in order again."""
    if is_shuffled(kind):
        return np.take(rows, places(kind, head_dim), axis=2, mode="clip")
    return rows[:, :, :head_dim]


def _heads(array: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    return NO_HEADS if array is None else array
