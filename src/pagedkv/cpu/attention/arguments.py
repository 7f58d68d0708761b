"""What both attention kernels take of a call: arrays as they are compiled for, addresses and numbers."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float32, int32, int64, types

from ...arrays import Array, address_of
from ...calls import AttentionCall, Form, per_head
from .steps.code import ELEMENT_BYTES
from .steps.order import is_shuffled, order, places
from .steps.shapes import LANES
from .tiles import cache_strides

NO_WINDOW = 2**62
NO_HEADS = np.empty(0, np.float32)
# Up to how many times as long a call takes that has a tanh for each logit, or caches whose rows lie dim by dim.
SOFTCAP, VLLM = 4, 7


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


class Plan(NamedTuple):
    """What follows from the form of a call; the kernels only read it."""

    row_bytes: int  # of a row of a cache
    k_strides: tuple[int, ...]  # Strides
    v_strides: tuple[int, ...]
    token_major: bool  # the heads of a token lie side by side, rather than the tokens of a head
    options: LogitOptions  # without slopes
    factor: np.float32 | None  # of q; None if k_scale is an array
    v_scale: npt.NDArray[np.float32] | None  # (num_kv_heads,); None if it is an array of the call's
    order: npt.NDArray[np.int64] | None  # (head_dim,) the dim at each place of a widened row; None if they are in order
    places: npt.NDArray[np.int64]  # (head_dim,) the place of each dim


@lru_cache(maxsize=256)
def plan_of(form: Form) -> Plan:
    """The plan of all calls of a form."""
    spec, options, vllm = form.spec, form.options, form.spec.layout == "vllm"
    row_bytes = spec.head_dim * ELEMENT_BYTES[spec.kind]
    k, v = (cache_strides(x, spec.layout) for x in (form.k_strides, form.v_strides))
    return Plan(
        row_bytes,
        tuple(k),
        tuple(v),
        # In layout vllm the tile of a head is staged whole, and has to last for all of its steps.
        not vllm and k.token > k.head,
        LogitOptions(
            options.causal,
            NO_WINDOW if options.window is None else options.window,
            np.float32(options.softcap or 0),
            0,
        ),
        None if form.k_scale is None else np.float32(options.scale) * np.float32(form.k_scale),
        None if form.v_scale is None else per_head(form.v_scale, spec.num_kv_heads),
        order(spec.kind, spec.head_dim) if is_shuffled(spec.kind) else None,
        places(spec.kind, spec.head_dim),
    )


def make_arguments(
    call: AttentionCall, q: Array, query_starts: npt.NDArray[np.int64]
) -> tuple[Arguments, tuple[Array, ...]]:
    """The arguments of a call for some of its rows of q, and the arrays that must outlive the addresses among them."""
    spec, options, k_cache, v_cache = call.spec, call.options, call.k_cache, call.v_cache
    plan, slopes = plan_of(call.form), _heads(options.alibi_slopes)
    factor: np.float32 | npt.NDArray[np.float32] | None = plan.factor
    if factor is None:
        k_scale = per_head(call.k_scale, spec.num_kv_heads)
        factor = (options.scale * k_scale).repeat(q.shape[1] // spec.num_kv_heads)[:, None]
    scaled = np.multiply(q, factor, dtype=np.float32, order="C")
    arguments = Arguments(
        _in_places(scaled, plan.order),
        call.block_tables,
        call.seq_lens,
        query_starts,
        Caches(address_of(k_cache), address_of(v_cache), plan.k_strides, plan.v_strides, spec.block_size),
        plan.options._replace(slopes=address_of(slopes)) if slopes.size else plan.options,
        _heads(options.sinks),
        per_head(call.v_scale, spec.num_kv_heads) if plan.v_scale is None else plan.v_scale,
        plan.places,
    )
    return arguments, (k_cache, v_cache, slopes)


def _in_places(q: npt.NDArray[np.float32], order: npt.NDArray[np.int64] | None) -> npt.NDArray[np.float32]:
    """Rows with their dims in the places of a widened row, and zeros behind them up to a whole vector."""
    if order is not None:
        q = np.take(q, order, axis=2, mode="clip")  # several times as fast as an index
    padding = -q.shape[2] % LANES
    return np.pad(q, ((0, 0), (0, 0), (0, padding))) if padding else q


def estimate_of(call: AttentionCall, plain_ns: float) -> float:
    """About how many nanoseconds one thread takes, from what it would take for rows of a layout without options."""
    if call.options.score_mod is not None:
        return math.inf  # it may be anything
    return plain_ns * (SOFTCAP if call.options.softcap else 1) * (VLLM if call.spec.layout == "vllm" else 1)


def new_result(q: Array) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Room for the rows of the result, in places, and for their LSEs: those of rows without keys."""
    rows, num_heads, head_dim = q.shape
    width = -(-head_dim // LANES) * LANES
    lse = np.empty((rows, num_heads), np.float32)
    lse.fill(-np.inf)
    return np.zeros((rows, num_heads, width), np.float32), lse


def from_places(rows: npt.NDArray[np.float32], plan: Plan) -> npt.NDArray[np.float32]:
    """Rows with their dims in order again."""
    if plan.order is None:
        return rows[:, :, : plan.places.size]
    return np.take(rows, plan.places, axis=2, mode="clip")


def _heads(array: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    return NO_HEADS if array is None else array
