"""Validated calls: a record for each operation, with valid arguments and defaults filled in.

Arrays on the host are views, those on a device shadows (see arrays/shadow.py). Of tables, lengths, slots, pairs and
arrays of options on the host, the call has its own C-contiguous copies; on the CPU, a table has only its used columns.
`checked` says whether kernels check values before they use them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .arrays import Array
from .layouts import CacheSpec
from .placement import Placement
from .typing import Kernel, KvDtype, Layout
from .visible import Visible

# One number for all KV heads, or a (num_kv_heads,) float32 array.
Scale = npt.NDArray[np.float32] | float
# The arrays of a layer: K and V, and if rows have scales of their own, those of K and of V.
Caches = tuple[Array, ...]
CACHES = ("k_cache", "v_cache", "k_scales", "v_scales")


def caches_of(k_cache: Any, v_cache: Any, k_scales: Any, v_scales: Any) -> tuple[Any, ...]:
    """The arrays of a layer, by `CACHES`."""
    return (k_cache, v_cache) if k_scales is v_scales is None else (k_cache, v_cache, k_scales, v_scales)


def per_head(scale: Scale, num_kv_heads: int) -> npt.NDArray[np.float32]:
    """Spread a scale of a call on the host over the KV heads, as a (num_kv_heads,) float32 array."""
    return scale if isinstance(scale, np.ndarray) else np.full(num_kv_heads, scale, np.float32)


def mask_starts(mask: Array, query_starts: Array, seq_lens: Array) -> npt.NDArray[np.int64]:
    """The byte of a mask at which each sequence begins, and the end of the mask: (num_seqs + 1,)."""
    sizes = np.diff(query_starts.astype(np.int64)) * seq_lens
    if mask.dtype != np.bool_:
        sizes = -(-sizes // 8)
    return np.concatenate(([0], np.cumsum(sizes)))


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options of attention: how a kernel changes logits, and which keys it keeps.

    Attributes
    ----------
    scale : float
        Factor of ``q . k``; finite.
    visible : Visible
        Which keys the rows see by their positions.
    softcap : float or None
        ``softcap * tanh(logit / softcap)``; positive and finite.
    alibi_slopes : (num_heads,) or (num_seqs, num_heads) float32 array or None
        Slopes of the linear biases, for all sequences or for each.
    sinks : (num_heads,) float32 array or None
        Logits of the attention sinks.
    mask : (n,) bool or uint8 array or None
        Which keys the rows see besides, as `prefill_attention` takes it.
    score_mod : callable or None
        ``score_mod(score, q_pos, k_pos, head, seq) -> score``.
    """

    scale: float
    visible: Visible
    softcap: float | None
    alibi_slopes: npt.NDArray[np.float32] | None
    sinks: npt.NDArray[np.float32] | None
    mask: Array | None
    score_mod: Callable[..., Any] | None


class AttentionArguments(NamedTuple):
    """The arguments of decode_attention, or of prefill_attention if `ragged`, as the caller gave them."""

    q: Any
    k_cache: Any
    v_cache: Any
    block_tables: Any
    seq_lens: Any
    query_starts: Any = None
    max_seq_len: int | None = None
    causal: bool = True
    exact: bool = False
    scale: float | None = None
    layout: Layout = "NHD"
    kv_dtype: KvDtype | None = None
    k_scale: Any = None
    v_scale: Any = None
    k_scales: Any = None
    v_scales: Any = None
    alibi_slopes: Any = None
    window: int | None = None
    window_right: int | None = None
    leftpad: Any = None
    mask: Any = None
    softcap: float | None = None
    sinks: Any = None
    score_mod: Callable[..., Any] | None = None
    kernel: Kernel = "auto"
    backend: Any = "auto"
    out: Any = None
    return_lse: bool = False
    check: bool | None = None
    ragged: bool = False


class AttentionCall(NamedTuple):
    """A call of prefill_attention, or of decode_attention, which has no query_starts.

    `arguments` are those of the caller; a device finds the plan of a repeated call by them. `max_seq_len` is the
    capacity of the tables, or the caller's bound if that is lower.
    """

    arguments: AttentionArguments
    placement: Placement
    q: Array
    k_cache: Array
    v_cache: Array
    block_tables: Array
    seq_lens: Array
    max_seq_len: int
    query_starts: Array | None
    out: Array | None
    spec: CacheSpec
    k_scale: Scale
    v_scale: Scale
    k_scales: Array | None
    v_scales: Array | None
    options: AttentionOptions
    kernel: str
    exact: bool
    checked: bool

    @property
    def caches(self) -> Caches:
        return caches_of(self.k_cache, self.v_cache, self.k_scales, self.v_scales)

    @property
    def has_rows(self) -> bool:
        return len(self.q) > 0 and len(self.seq_lens) > 0


class Rotation(NamedTuple):
    """How write_kv rotates k: the tables, and the position of each token."""

    cos: Array
    sin: Array
    positions: Array
    interleaved: bool


class WriteCall(NamedTuple):
    """A call of write_kv."""

    placement: Placement
    k: Array
    v: Array
    k_cache: Array
    v_cache: Array
    slots: Array
    spec: CacheSpec
    k_scale: Scale
    v_scale: Scale
    k_scales: Array | None
    v_scales: Array | None
    checked: bool
    rotation: Rotation | None

    @property
    def caches(self) -> Caches:
        return caches_of(self.k_cache, self.v_cache, self.k_scales, self.v_scales)


class GatherCall(NamedTuple):
    """A call of gather_kv."""

    placement: Placement
    k_cache: Array
    v_cache: Array
    block_table: Array
    seq_len: int
    spec: CacheSpec
    k_scale: Scale
    v_scale: Scale
    k_scales: Array | None
    v_scales: Array | None
    checked: bool

    @property
    def caches(self) -> Caches:
        return caches_of(self.k_cache, self.v_cache, self.k_scales, self.v_scales)


class CopyCall(NamedTuple):
    """A call of copy_blocks, with the arrays of all layers."""

    placement: Placement
    caches: list[Array]
    pairs: Array
    checked: bool


class SwapCall(NamedTuple):
    """A call of swap_blocks, with a (source, destination) pair for each cache; either may be on a device."""

    placement: Placement
    copies: list[tuple[Array, Array]]
    pairs: Array
    checked: bool


class MergeCall(NamedTuple):
    """A call of merge_states, with the output and the LSE of each state."""

    placement: Placement
    outs: list[Array]
    lses: list[Array]


class RotaryCall(NamedTuple):
    """A call of apply_rotary; `out` is where the caller wants the results, with None for k if there is no k."""

    placement: Placement
    q: Array
    k: Array | None
    cos: Array
    sin: Array
    positions: Array
    out: tuple[Array, Array | None] | None
    interleaved: bool
    checked: bool
