"""The arguments of both attention kernels: arrays, addresses and numbers of the types that they are compiled for."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float32, int32, int64, types

from ...arrays import Array, address_of
from ...calls import AttentionCall, Form, per_head
from ...commit import Write, bits
from ...layouts import FLOAT_DTYPES
from .steps.code import ELEMENT_BYTES
from .steps.shapes import LANES
from .steps.widening.ends import Q_KINDS
from .steps.widening.order import places
from .tiles import cache_strides

NO_WINDOW = 2**62
_KIND_OF_DTYPE = {dtype: Q_KINDS.index(dtype.name) for dtype in FLOAT_DTYPES}
NO_HEADS = np.empty(0, np.float32)
# How many times as long a call may take with a tanh for each logit, or with rows that lie dim by dim.
SOFTCAP, VLLM = 4, 7


class Inputs(NamedTuple):
    """The addresses of q, K and V, and how their elements lie.

    Strides are plain tuples: numba takes a microsecond to unbox a NamedTuple.
    """

    q: int
    q_strides: tuple[int, ...]  # bytes from a row to the next, and from a head to the next
    q_kind: int  # the index in Q_KINDS of its dtype, which is that of the result
    k: int
    v: int
    k_strides: tuple[int, ...]  # Strides
    v_strides: tuple[int, ...]
    block_size: int


class LogitOptions(NamedTuple):
    """What happens to a logit and which keys stay; a score_mod is compiled into the kernel instead."""

    causal: bool
    window: int  # NO_WINDOW for none
    softcap: np.float32  # 0 for none
    slopes: int  # the address of the ALiBi slopes, 0 for none


class Arguments(NamedTuple):
    """What both kernels take after `Inputs`; calls that differ only in q, K and V share it."""

    tables: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    query_starts: npt.NDArray[np.int64]  # (num_seqs + 1,) the first row of q of each sequence, and the end
    options: LogitOptions
    factors: npt.NDArray[np.float32]  # (num_heads,) of q: the scale times k_scale
    sinks: npt.NDArray[np.float32]  # (num_heads,), or empty
    v_scale: npt.NDArray[np.float32]  # (num_kv_heads,)
    places: npt.NDArray[np.int64]  # (head_dim,) the place of each dim in a widened row


_STRIDES = types.UniTuple(int64, 4)
# The numba types of `counter`, `num_items`, Inputs and Arguments, with which the parameters of both kernels begin.
FIRST_TYPES = (
    *(int64, int64),
    types.NamedTuple([int64, types.UniTuple(int64, 2), int64, int64, int64, _STRIDES, _STRIDES, int64], Inputs),
    *(int32[:, ::1], int32[::1], int64[::1]),
    types.NamedTuple([boolean, int64, float32, int64], LogitOptions),
    *(float32[::1], float32[::1], float32[::1], types.Array(int64, 1, "C", readonly=True)),
)


class Plan(NamedTuple):
    """What follows from the form of a call; the kernels only read it."""

    row_bytes: int  # of a row of a cache
    row_floats: int  # of a row of partial sums
    k_strides: tuple[int, ...]  # Strides
    v_strides: tuple[int, ...]
    token_major: bool  # the heads of a token lie side by side, rather than the tokens of a head
    options: LogitOptions  # without slopes
    factors: npt.NDArray[np.float32] | None  # (num_heads,) of q; None if k_scale is an array
    v_scale: npt.NDArray[np.float32] | None  # (num_kv_heads,); None if it is an array of the call's
    places: npt.NDArray[np.int64]  # (head_dim,) the place of each dim


@lru_cache(maxsize=256)
def plan_of(form: Form) -> Plan:
    """The plan of all calls of a form."""
    spec, options, vllm = form.spec, form.options, form.spec.layout == "vllm"
    row_bytes = spec.head_dim * ELEMENT_BYTES[spec.kind]
    k, v = (cache_strides(x, spec.layout) for x in (form.k_strides, form.v_strides))
    return Plan(
        row_bytes,
        -(-spec.head_dim // LANES) * LANES,
        tuple(k),
        tuple(v),
        # In layout vllm the tile of a head is staged whole, for all of its steps.
        not vllm and k.token > k.head,
        LogitOptions(
            options.causal,
            NO_WINDOW if options.window is None else options.window,
            np.float32(options.softcap or 0),
            0,
        ),
        None
        if form.k_scale is None
        else np.full(form.q_shape[1], np.float32(options.scale) * np.float32(form.k_scale), np.float32),
        None if form.v_scale is None else per_head(form.v_scale, spec.num_kv_heads),
        places(spec.kind, spec.head_dim),
    )


def make_inputs(plan: Plan, block_size: int, q: Array, k_cache: Array, v_cache: Array) -> Inputs:
    """The addresses of q, K and V, which must outlive them."""
    return Inputs(
        address_of(q),
        q.strides[:2],
        _KIND_OF_DTYPE[q.dtype],
        address_of(k_cache),
        address_of(v_cache),
        plan.k_strides,
        plan.v_strides,
        block_size,
    )


def make_arguments(call: AttentionCall, query_starts: npt.NDArray[np.int64]) -> Arguments:
    """The arguments of a call, whose slopes must outlive their address."""
    spec, options = call.spec, call.options
    plan, slopes = plan_of(call.form), options.alibi_slopes
    factors = plan.factors
    if factors is None:
        k_scale = per_head(call.k_scale, spec.num_kv_heads)
        factors = (options.scale * k_scale).repeat(call.q.shape[1] // spec.num_kv_heads)
    return Arguments(
        call.block_tables,
        call.seq_lens,
        query_starts,
        plan.options if slopes is None else plan.options._replace(slopes=address_of(slopes)),
        factors,
        NO_HEADS if options.sinks is None else options.sinks,
        per_head(call.v_scale, spec.num_kv_heads) if plan.v_scale is None else plan.v_scale,
        plan.places,
    )


def estimate_of(call: AttentionCall, plain_ns: float) -> float:
    """About how many nanoseconds one thread takes; plain_ns is for NHD or HND without options."""
    return math.inf if call.options.score_mod is not None else slowed_down(call.form, plain_ns)  # it may be anything


def slowed_down(form: Form, plain_ns: float) -> float:
    """About how many nanoseconds one thread takes for calls of a form, without a score_mod."""
    return plain_ns * (SOFTCAP if form.options.softcap else 1) * (VLLM if form.spec.layout == "vllm" else 1)


def own_results(call: AttentionCall, out: Array, lse: Array | None, num_rows: int) -> tuple[Array, Array]:
    """Arrays of this call alone, to which a kernel may write a result even after an interrupt.

    They are `out`, unless the caller has given that, and `lse`, and new ones in their place.
    """
    result = out[:num_rows] if call.out is None else np.empty((num_rows, *out.shape[1:]), out.dtype)
    return result, np.empty((num_rows, out.shape[1]), np.float32) if lse is None else lse[:num_rows]


def result_writes(call: AttentionCall, out: Array, result: Array) -> list[Write]:
    """The writes that store a computed result: none if it is in `out` already."""
    return [] if call.out is None else [(bits(out[: len(result)]), ..., bits(result))]
