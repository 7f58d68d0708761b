"""The dense float64 oracle: paged attention as its formula, one sequence at a time.

Nothing here is fast, paged or clever, so that it can be checked by eye: the keys
and values of a sequence are gathered into dense arrays, and attention over them is
q k^T, the options in their documented order, a softmax, and times v.
Backends are tested against it and never import it. It reads NumPy arrays only,
checks nothing, and computes in float64 whatever the inputs are. Arguments that change
no result are left out: max_seq_len, kernel, backend, check and out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .typing import KvDtype, Layout

Array = np.ndarray[Any, Any]
Scale = float | Array | None
ScoreMod = Callable[[float, int, int, int, int], float]

FP8_DTYPES = {"fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2)}


def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float | None = None,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    alibi_slopes: Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
    round_to: Any = None,
) -> Any:
    """Attention of one new token per sequence over its paged keys and values.

    Parameters
    ----------
    q : (num_seqs, num_heads, head_dim) array
    k_cache, v_cache : arrays of `layout`; uint8 codes for fp8, int8 codes for int8
    block_tables : (num_seqs, max_blocks) integer array
    seq_lens : (num_seqs,) integer array
    scale : float, default 1 / sqrt(head_dim)
    layout : "NHD", "HND" or "vllm"
    kv_dtype : "fp8_e4m3", "fp8_e5m2", "int8" or None
    k_scale, v_scale : float or (num_kv_heads,) array, default 1.0; fp8 value = code * scale
    k_scales, v_scales : (num_blocks, block_size, num_kv_heads) float32 array in NHD, with the last two axes swapped in
        HND and vllm; int8 value = code * scale of its row
    alibi_slopes, sinks : (num_heads,) array
    window, softcap : number
    score_mod : function (score, q_pos, k_pos, head, seq) -> score of Python numbers
    return_lse : bool
    round_to : dtype, optional
        Compute with float32 sums instead, and round scores, probabilities and output
        to this dtype: the dense attention of that dtype that the error bound refers to.

    Returns
    -------
    out : (num_seqs, num_heads, head_dim) float64 array
    lse : (num_seqs, num_heads) float64 array, with `return_lse`

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv import reference
    >>> k_cache, v_cache = np.zeros((2, 4, 4, 1, 8), np.float32)  # N = 4, P = 4, Hkv = 1, D = 8
    >>> v_cache[...] = np.arange(16).reshape(4, 4, 1, 1)  # each slot holds its number
    >>> q, block_tables = np.ones((1, 2, 8), np.float32), np.array([[2, 0]], np.int32)
    >>> out = reference.decode_attention(q, k_cache, v_cache, block_tables, np.array([3], np.int32))
    >>> out[0, 0, 0].round(6)  # the mean of slots 8, 9 and 10, as all keys are equal
    np.float64(9.0)
    """
    return prefill_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        np.arange(len(q) + 1),
        scale=scale,
        layout=layout,
        kv_dtype=kv_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        k_scales=k_scales,
        v_scales=v_scales,
        alibi_slopes=alibi_slopes,
        window=window,
        softcap=softcap,
        sinks=sinks,
        score_mod=score_mod,
        return_lse=return_lse,
        round_to=round_to,
    )


@np.errstate(all="ignore")
def prefill_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_starts: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    alibi_slopes: Array | None = None,
    window: int | None = None,
    window_right: int | None = None,
    leftpad: Array | None = None,
    mask: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
    round_to: Any = None,
) -> Any:
    """Attention of each sequence's last query_len tokens over its paged keys and values.

    Parameters
    ----------
    q : (num_tokens, num_heads, head_dim) array
        Rows query_starts[i] to query_starts[i + 1] are the last tokens of sequence i.
    query_starts : (num_seqs + 1,) integer array
    causal : bool
    alibi_slopes : (num_heads,) or (num_seqs, num_heads) array
    window_right : int
        Keep only keys up to position + window_right.
    leftpad : (num_seqs,) integer array
        The first key of each sequence that is seen.
    mask : 1-D array of bool, or of uint8 for bits
        For each sequence its (query_len, seq_len) booleans, flattened; as bits, each sequence begins with a byte
        (``np.packbits(..., bitorder="little")``).
    others : as in `decode_attention`

    Returns
    -------
    out : (num_tokens, num_heads, head_dim) float64 array
        Rows past query_starts[-1], which no operation writes, are NaN.
    lse : (num_tokens, num_heads) float64 array, with `return_lse`

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv import reference
    >>> k_cache, v_cache = np.zeros((2, 4, 4, 1, 8), np.float32)  # N = 4, P = 4, Hkv = 1, D = 8
    >>> v_cache[...] = np.arange(16).reshape(4, 4, 1, 1)  # each slot holds its number
    >>> q, block_tables = np.ones((3, 2, 8), np.float32), np.array([[2, 0]], np.int32)
    >>> seq_lens, query_starts = np.array([3], np.int32), np.array([0, 3], np.int32)
    >>> out = reference.prefill_attention(q, k_cache, v_cache, block_tables, seq_lens, query_starts)
    >>> out[:, 0, 0].round(6)  # means of the values so far, as all keys are equal
    array([8. , 8.5, 9. ])
    """
    num_tokens, num_heads, head_dim = q.shape
    out = np.full((num_tokens, num_heads, head_dim), np.nan)
    lse = np.full((num_tokens, num_heads), np.nan)
    slopes = None if alibi_slopes is None else np.broadcast_to(alibi_slopes, (len(seq_lens), num_heads))
    rest = mask  # the masks of the sequences to come
    for seq, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(int(query_starts[seq]), int(query_starts[seq + 1]))
        if seq_len == 0:  # decode only: an empty sequence has a row, and no sink either
            out[rows], lse[rows] = 0.0, -np.inf
            continue
        padding = 0 if leftpad is None else int(leftpad[seq])
        visible = _visible(rows.stop - rows.start, seq_len, causal, window, window_right, padding)
        seen = visible.any(axis=0)
        first = int(seen.argmax()) if seen.any() else seq_len
        block_table = block_tables[seq].copy()
        block_table[: first // _block_size(k_cache, layout)] = 0  # before the first key that is seen it may be anything
        k, v = gather_kv(
            k_cache,
            v_cache,
            block_table,
            seq_len,
            layout=layout,
            kv_dtype=kv_dtype,
            k_scale=k_scale,
            v_scale=v_scale,
            k_scales=k_scales,
            v_scales=v_scales,
        )
        if rest is not None:
            own, rest = _mask_of(rest, visible.shape)
            visible &= own
        out[rows], lse[rows] = _attend(
            q[rows],
            k,
            v,
            seq,
            visible,
            scale=1.0 / np.sqrt(head_dim) if scale is None else float(scale),
            alibi_slopes=None if slopes is None else slopes[seq],
            softcap=softcap,
            sinks=sinks,
            score_mod=score_mod,
            round_to=round_to,
        )
    return (out, lse) if return_lse else out


def _visible(
    num_rows: int, seq_len: int, causal: bool, window: int | None, window_right: int | None, padding: int
) -> Array:
    """Which keys each of the last num_rows tokens sees by its position, (num_rows, seq_len) bool."""
    q_pos, k_pos = np.arange(seq_len - num_rows, seq_len)[:, None], np.arange(seq_len)
    visible = np.broadcast_to(k_pos >= padding, (num_rows, seq_len)).copy()
    if causal:
        visible &= k_pos <= q_pos
    if window is not None:
        visible &= k_pos > q_pos - window
    if window_right is not None:
        visible &= k_pos <= q_pos + window_right
    return visible


def _mask_of(mask: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    """The mask of the next sequence, and what follows it."""
    size = shape[0] * shape[1]
    if mask.dtype == bool:
        return mask[:size].reshape(shape), mask[size:]
    num_bytes = -(-size // 8)
    bits = np.unpackbits(mask[:num_bytes], count=size, bitorder="little")
    return bits.astype(bool).reshape(shape), mask[num_bytes:]


def _attend(
    q: Array,
    k: Array,
    v: Array,
    seq: int,
    visible: Array,
    *,
    scale: float,
    alibi_slopes: Array | None,
    softcap: float | None,
    sinks: Array | None,
    score_mod: ScoreMod | None,
    round_to: Any,
) -> tuple[Array, Array]:
    """Attention of the last rows q (n, Hq, D) of a sequence over those of its k, v (L, Hkv, D) that each sees."""
    dtype: Any = np.float64 if round_to is None else np.float32

    def rounded(x: Array) -> Array:
        return x if round_to is None else x.astype(round_to).astype(dtype)

    num_rows, num_heads, _ = q.shape
    seq_len, num_kv_heads, _ = k.shape
    q_pos = np.arange(seq_len - num_rows, seq_len)[:, None]
    k_pos = np.arange(seq_len)

    # Keys that no row sees are dropped, not multiplied by 0: 0 * NaN is NaN.
    seen = np.flatnonzero(visible.any(axis=0))
    k_pos, visible = k_pos[seen], visible[:, seen]
    q, k, v = q.astype(dtype), k[seen].astype(dtype, copy=False), v[seen].astype(dtype, copy=False)

    out, lse = np.empty(q.shape), np.empty((num_rows, num_heads))
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = rounded(dtype(scale) * (q[:, head] @ k[:, kv_head].T))
        if softcap is not None:
            scores = dtype(softcap) * np.tanh(scores / dtype(softcap))
        if alibi_slopes is not None:
            scores = scores - dtype(alibi_slopes[head]) * abs(k_pos - q_pos).astype(dtype)
        if score_mod is not None:
            rows, keys = np.nonzero(visible)  # only for visible keys, since each score is a call
            seen_scores = scores[rows, keys].astype(object)
            scores[rows, keys] = np.frompyfunc(score_mod, 5, 1)(seen_scores, q_pos[rows, 0], k_pos[keys], head, seq)
        scores = np.where(visible, scores, -np.inf).astype(dtype)

        sink = dtype(-np.inf if sinks is None else sinks[head])
        top = np.maximum(scores.max(axis=1, initial=-np.inf), sink)
        shift = np.where(top == -np.inf, 0, top)  # without visible keys, every term is exp(-inf) = 0
        terms = np.exp(scores - shift[:, None])
        total = terms.sum(axis=1) + np.exp(sink - shift)
        probabilities = rounded(terms / np.where(total == 0, 1, total)[:, None])
        out[:, head] = rounded(probabilities @ v[:, kv_head])
        lse[:, head] = shift + np.log(total)
    return out, lse


@np.errstate(all="ignore")
def merge_states(outs: Sequence[Array] | Array, lses: Sequence[Array] | Array) -> tuple[Array, Array]:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    Parameters
    ----------
    outs : n arrays (..., num_heads, head_dim)
    lses : n arrays (..., num_heads)

    Returns
    -------
    out : (..., num_heads, head_dim) float64 array
    lse : (..., num_heads) float64 array

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv import reference
    >>> outs, lses = np.array([[[1.0]], [[3.0]]]), np.zeros((2, 1))
    >>> out, lse = reference.merge_states(outs, lses)
    >>> out
    array([[2.]])
    """
    lse = np.stack([np.asarray(x).astype(np.float64) for x in lses])
    out = np.stack([np.asarray(x).astype(np.float64) for x in outs])
    out = np.where(lse[..., None] == -np.inf, 0, out)  # attention over no keys has no output
    top = lse.max(axis=0)
    shift = np.where(top == -np.inf, 0, top)
    weights = np.exp(lse - shift)
    total = weights.sum(axis=0)
    merged = (weights[..., None] * out).sum(axis=0) / np.where(total == 0, 1, total)[..., None]
    return merged, shift + np.log(total)


@np.errstate(all="ignore")
def apply_rotary(
    q: Array, k: Array | None, cos: Array, sin: Array, positions: Array, *, interleaved: bool = False
) -> tuple[Array, Array | None]:
    """Queries and keys with pairs of their dims rotated by the angles of their positions.

    Parameters
    ----------
    q : (num_tokens, num_heads, head_dim) array
    k : (num_tokens, num_kv_heads, head_dim) array or None
    cos, sin : (max_positions, rotary_dim / 2) array
    positions : (num_tokens,) integer array
    interleaved : bool
        Pairs are dims (2i, 2i + 1), not (i, i + rotary_dim / 2).

    Returns
    -------
    q, k : float64 arrays of the same shapes; None where k is None

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv import reference
    >>> q = np.arange(4.0).reshape(1, 1, 4)
    >>> cos, sin = np.zeros((1, 2)), np.ones((1, 2))  # a quarter turn: (a, b) becomes (-b, a)
    >>> reference.apply_rotary(q, None, cos, sin, np.array([0]))[0]
    array([[[-2., -3.,  0.,  1.]]])
    """
    half = cos.shape[1]

    def rotated(x: Array) -> Array:
        result = x.astype(np.float64)
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
            c, s = (table[positions, i].astype(np.float64)[:, None] for table in (cos, sin))
            result[..., first], result[..., second] = a * c - b * s, b * c + a * s
        return result

    return rotated(q), None if k is None else rotated(k)


@np.errstate(all="ignore")
def gather_kv(
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_len: int,
    *,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
) -> tuple[Array, Array]:
    """Dense keys and values of one sequence, 8 bits widened.

    Parameters
    ----------
    block_table : (max_blocks,) integer array
    seq_len : int
    others : as in `decode_attention`

    Returns
    -------
    k, v : (seq_len, num_kv_heads, head_dim) float64 arrays

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv import reference
    >>> k_cache, v_cache = np.zeros((2, 4, 4, 1, 8), np.float32)  # N = 4, P = 4, Hkv = 1, D = 8
    >>> k_cache[...] = np.arange(16).reshape(4, 4, 1, 1)  # each slot holds its number
    >>> k, v = reference.gather_kv(k_cache, v_cache, np.array([2, 0], np.int32), 6)
    >>> k[:, 0, 0]
    array([ 8.,  9., 10., 11.,  0.,  1.])
    """
    position = np.arange(seq_len)
    block_size = _block_size(k_cache, layout)
    block, offset = block_table[position // block_size], position % block_size
    if layout == "NHD":
        k, v = k_cache[block, offset], v_cache[block, offset]
    elif layout == "HND":
        k, v = k_cache[block, :, offset], v_cache[block, :, offset]
    else:
        k, v = k_cache[block, :, :, offset], v_cache[block, :, :, offset]
        k = k.reshape(v.shape)  # (L, Hkv, D / x, x)
    if k_scales is not None and v_scales is not None:
        rows: Any = (block, offset) if layout == "NHD" else (block, slice(None), offset)
        k_scale, v_scale = k_scales[rows], v_scales[rows]  # (L, Hkv)
    return _widened(k, kv_dtype, k_scale), _widened(v, kv_dtype, v_scale)


@np.errstate(all="ignore")
def write_kv(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    *,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    positions: Array | None = None,
    interleaved: bool = False,
) -> None:
    """Write the keys and values of tokens into their slots, skipping negative ones; with tables, rotate the keys.

    Parameters
    ----------
    k, v : (num_tokens, num_kv_heads, head_dim) array
    k_cache, v_cache : arrays of `layout`, written
    slots : (num_tokens,) integer array
    cos, sin, positions, interleaved : as in `apply_rotary`; rotated keys are rounded to k's dtype first
    others : as in `decode_attention`

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv import reference
    >>> k_cache, v_cache = np.zeros((2, 4, 4, 1, 8), np.float32)  # N = 4, P = 4, Hkv = 1, D = 8
    >>> k = v = np.ones((2, 1, 8), np.float32)
    >>> reference.write_kv(k, v, k_cache, v_cache, np.array([7, 8]))
    >>> np.argwhere(k_cache[:, :, 0, 0])  # block and offset of each token
    array([[1, 3],
           [2, 0]])
    """
    if cos is not None and sin is not None and positions is not None:
        at = np.where(slots < 0, 0, positions)  # those of skipped tokens may be anything
        k = apply_rotary(k, None, cos, sin, at, interleaved=interleaved)[0].astype(k.dtype)
    k, k_rows = _narrowed(k, k_cache.dtype, kv_dtype, k_scale)
    v, v_rows = _narrowed(v, v_cache.dtype, kv_dtype, v_scale)
    block_size = _block_size(k_cache, layout)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        if k_scales is not None and v_scales is not None:
            row = (block, offset) if layout == "NHD" else (block, slice(None), offset)
            k_scales[row], v_scales[row] = k_rows[token], v_rows[token]
        if layout == "NHD":
            k_cache[block, offset], v_cache[block, offset] = k[token], v[token]
        elif layout == "HND":
            k_cache[block, :, offset], v_cache[block, :, offset] = k[token], v[token]
        else:
            k_cache[block, :, :, offset] = k[token].reshape(k_cache.shape[1], k_cache.shape[2], k_cache.shape[4])
            v_cache[block, :, :, offset] = v[token]


def _block_size(k_cache: Array, layout: Layout) -> int:
    return k_cache.shape[{"NHD": 1, "HND": 2, "vllm": 3}[layout]]


def _widened(x: Array, kv_dtype: KvDtype | None, scale: Scale) -> Array:
    if kv_dtype is None:
        return x.astype(np.float64)
    codes = x if kv_dtype == "int8" else x.view(FP8_DTYPES[kv_dtype])
    return codes.astype(np.float64) * _per_head(scale).astype(np.float64)


def _narrowed(x: Array, dtype: np.dtype[Any], kv_dtype: KvDtype | None, scale: Scale) -> tuple[Array, Array]:
    """The elements of x (T, Hkv, D), and the scales of its rows (T, Hkv), which only int8 stores."""
    if kv_dtype is None:
        return x.astype(dtype), np.ones(x.shape[:2], np.float32)
    if kv_dtype == "int8":  # in float32, as in every backend
        x = x.astype(np.float32)
        scales = abs(x).max(axis=2, initial=0) / np.float32(127)
        scales[~np.isfinite(scales)] = np.nan
        codes = np.clip(np.rint(x / scales[..., None]), -127, 127)
        return np.where(scales[..., None] > 0, codes, 0).astype(np.int8), scales
    fp8 = FP8_DTYPES[kv_dtype]
    largest = float(ml_dtypes.finfo(fp8).max)
    # The division is a float32 one, as it is in every backend; NaN passes through clip.
    scaled = x.astype(np.float32) / _per_head(scale)
    return np.clip(scaled, -largest, largest).astype(fp8).view(np.uint8), np.ones(x.shape[:2], np.float32)


def _per_head(scale: Scale) -> Array:
    """The scale as float32, of all heads, of each or of each row, shaped to multiply (..., num_kv_heads, head_dim)."""
    return np.asarray(1.0 if scale is None else scale, np.float32)[..., None]
