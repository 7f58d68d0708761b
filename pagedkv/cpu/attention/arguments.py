"""The arguments of both attention kernels: arrays, addresses and numbers of the types that they are compiled for."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32, int32, int64, types

from ...arrays import Array, address_of
from ...calls import AttentionCall, Caches, mask_starts, per_head
from ...layouts import FLOAT_DTYPES
from ...visible import Visible
from .steps.code import ELEMENT_BYTES
from .steps.query_rows import Q_KINDS
from .steps.widen import dim_places
from .tiles import cache_strides, scale_strides

_KIND_OF_DTYPE = {dtype: Q_KINDS.index(dtype.name) for dtype in FLOAT_DTYPES}
NO_HEADS = np.empty(0, np.float32)
# About how many times as long a call takes with a tanh for each logit, or with rows that lie dim by dim.
SOFTCAP, VLLM = 4, 7


class Inputs(NamedTuple):
    """The addresses of q, K, V and the scales of rows, and how their elements lie in memory.

    Strides are plain tuples, since numba takes a microsecond to unbox a NamedTuple.
    """

    q: int
    k: int
    v: int
    q_strides: tuple[int, ...]  # bytes from a row to the next, and from a head to the next
    q_kind: int  # the index in Q_KINDS of its dtype, which is that of the result
    k_strides: tuple[int, ...]  # Strides
    v_strides: tuple[int, ...]
    block_size: int
    # Of rows that have scales of their own; 0 otherwise.
    k_scales: int = 0
    v_scales: int = 0
    k_scale_strides: tuple[int, ...] = (0, 0, 0)  # bytes from a block, a head and a token to the next one
    v_scale_strides: tuple[int, ...] = (0, 0, 0)

    def at(self, q: Array, caches: Caches) -> Inputs:
        """The same of other arrays that are alike."""
        k, v, *scales = map(address_of, caches)
        inputs = self._replace(q=address_of(q), k=k, v=v)
        return inputs._replace(k_scales=scales[0], v_scales=scales[1]) if scales else inputs


class LogitOptions(NamedTuple):
    """How logits are changed and masked; a score_mod is not here but compiled into the kernel."""

    visible: tuple[int, ...]  # the scalars of Visible
    softcap: np.float32  # 0 for none
    slopes: int  # the address of the ALiBi slopes, 0 for none
    slopes_stride: int  # from those of a sequence to those of the next: 0 where all share them
    leftpad: int  # the address of the int32 padding of each sequence, 0 for none
    mask: int  # the address of the mask, 0 for none
    mask_starts: int  # the address of the int64 byte with which each sequence begins in it
    mask_shift: int  # log2 of the keys that a byte of it holds


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
    types.NamedTuple(
        [
            *[int64] * 3,
            types.UniTuple(int64, 2),
            int64,
            _STRIDES,
            _STRIDES,
            *[int64] * 3,
            *[types.UniTuple(int64, 3)] * 2,
        ],
        Inputs,
    ),
    *(int32[:, ::1], int32[::1], int64[::1]),
    types.NamedTuple([types.UniTuple(int64, len(Visible().scalars)), float32, *[int64] * 6], LogitOptions),
    *(float32[::1], float32[::1], float32[::1], types.Array(int64, 1, "C", readonly=True)),
)


def row_bytes_of(call: AttentionCall) -> int:
    """Bytes of a row of a cache."""
    return call.spec.head_dim * ELEMENT_BYTES[call.spec.kind]


def make_inputs(call: AttentionCall) -> Inputs:
    """The inputs of a call, whose arrays must outlive their addresses."""
    layout = call.spec.layout
    k, v = (tuple(cache_strides(x.strides, layout)) for x in (call.k_cache, call.v_cache))
    inputs = Inputs(
        address_of(call.q),
        address_of(call.k_cache),
        address_of(call.v_cache),
        call.q.strides[:2],
        _KIND_OF_DTYPE[call.q.dtype],
        k,
        v,
        call.spec.block_size,
    )
    if call.k_scales is None or call.v_scales is None:
        return inputs
    return inputs._replace(
        k_scales=address_of(call.k_scales),
        v_scales=address_of(call.v_scales),
        k_scale_strides=scale_strides(call.k_scales.strides, layout),
        v_scale_strides=scale_strides(call.v_scales.strides, layout),
    )


def make_arguments(call: AttentionCall, query_starts: npt.NDArray[np.int64]) -> tuple[Arguments, tuple[Array, ...]]:
    """The arguments of a call, and the arrays whose addresses are among them, which must outlive them."""
    spec, options, num_heads = call.spec, call.options, call.q.shape[1]
    if isinstance(call.k_scale, np.ndarray):
        factors = (options.scale * call.k_scale).repeat(num_heads // spec.num_kv_heads)
    else:
        factors = np.full(num_heads, np.float32(options.scale) * np.float32(call.k_scale), np.float32)
    slopes, leftpad, mask = options.alibi_slopes, options.visible.leftpad, options.mask
    starts = None
    if mask is not None:
        assert call.query_starts is not None
        starts = mask_starts(mask, call.query_starts, call.seq_lens)
    arguments = Arguments(
        call.block_tables,
        call.seq_lens,
        query_starts,
        LogitOptions(
            visible=options.visible.scalars,
            softcap=np.float32(options.softcap or 0),
            slopes=_address(slopes),
            slopes_stride=0 if slopes is None or slopes.ndim == 1 else slopes.shape[1],
            leftpad=_address(leftpad),
            mask=_address(mask),
            mask_starts=_address(starts),
            mask_shift=0 if mask is None or mask.dtype == np.bool_ else 3,
        ),
        factors,
        NO_HEADS if options.sinks is None else options.sinks,
        per_head(call.v_scale, spec.num_kv_heads),
        dim_places(spec.kind, spec.head_dim),
    )
    return arguments, tuple(x for x in (slopes, leftpad, mask, starts) if x is not None)


def _address(x: Array | None) -> int:
    return 0 if x is None else address_of(x)


def estimate_of(call: AttentionCall, base_ns: float) -> float:
    """About how many nanoseconds one thread takes, by those that it takes without options in NHD and HND."""
    if call.options.score_mod is not None:
        return math.inf  # it may be anything
    return base_ns * (SOFTCAP if call.options.softcap else 1) * (VLLM if call.spec.layout == "vllm" else 1)
