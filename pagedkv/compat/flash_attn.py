"""FlashAttention's calls on a KV cache: ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func``.

Change ``from flash_attn import ...`` to ``from pagedkv.compat.flash_attn import ...``. The signatures are those of
FlashAttention 2; what FlashAttention 3 adds is taken by its names. A positional call of FlashAttention 3 cannot be told
from one of FlashAttention 2, whose order of arguments differs: give all that follows `v` by name.
"""

from __future__ import annotations

from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from ..arrays import between_graphs
from ..calls import AttentionArguments
from ..memory.arguments import as_int
from ..operations.attention import attend, prefill_attention
from ..operations.caches import write_kv
from ..operations.rotary import apply_rotary
from ..validation import require
from ..validation.attention import attention_call
from .arguments import as_int32, contiguous_rows, in_words, number
from .names import missing_names
from .ragged import as_blocks, behind_padding

FP8_NAMES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
_WORDS = {
    **{"block_tables": "block_table", "scale": "softmax_scale", "window": "window_size", "window_right": "window_size"},
    **{"k_scale": "k_descale", "v_scale": "v_descale", "query_starts": "cu_seqlens_q", "leftpad": "cache_leftpad"},
}
_WORDS_OF_CACHES = {
    **_WORDS,
    **{
        "seq_lens": "cache_seqlens",
        "cos": "rotary_cos",
        "sin": "rotary_sin",
        "positions": "positions from cache_seqlens on",
    },
    **{"interleaved": "rotary_interleaved", "slots": "block_table or cache_batch_idx"},
}
_LOOKED_INTO = ("alibi_slopes", "k_descale", "v_descale")
_WORDS_OF_RAGGED = {**_WORDS, "seq_lens": "cu_seqlens_k or seqused_k"}


@between_graphs
@in_words(_WORDS_OF_CACHES, ("q", "k_cache", "v_cache", "k", "v", *_LOOKED_INTO))
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    scheduler_metadata: Any = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    **refused: Any,
) -> Any:
    """Append k and v to a cache, if given, and compute attention of q over it.

    Parameters
    ----------
    q : (batch_size, seqlen, num_heads, head_dim) tensor
        The last `seqlen` tokens of each sequence.
    k_cache, v_cache : tensor
        (num_blocks, block_size, num_kv_heads, head_dim) with a block table, for any block size; otherwise
        (batch_size_cache, seqlen_cache, num_kv_heads, head_dim). Of q's dtype, or fp8.
    k, v : (batch_size, seqlen_new, num_kv_heads, head_dim) tensor, optional
        Written to the cache behind `cache_seqlens` tokens.
    rotary_cos, rotary_sin : (max_positions, rotary_dim / 2) tensor, optional
        With k: k is rotated from position `cache_seqlens` on, and so is q if the call is causal or has a window;
        otherwise all of q is rotated as at position `cache_seqlens`.
    cache_seqlens : int or (batch_size,) int32 tensor, optional
        Tokens in the cache; all of it if None.
    cache_batch_idx : (batch_size,) int32 tensor, optional
        The row of the cache of each sequence; not with a block table.
    cache_leftpad : (batch_size,) int32 tensor, optional
        The first token of each sequence that is no padding.
    block_table, page_table : (batch_size, max_blocks) int32 tensor, optional
        The same, by the names of FlashAttention 2 and 3.
    softmax_scale : float, optional
        ``1 / sqrt(head_dim)`` if None.
    causal : bool
        Row i sees no key behind ``i + seqlen_k - seqlen``.
    window_size : (int, int)
        Keys to the left and to the right of a row that it sees besides its own; -1: all.
    softcap : float
        0 for none.
    rotary_interleaved : bool
        Dims 2i and 2i + 1 are a pair, not i and i + rotary_dim / 2.
    alibi_slopes : (num_heads,) or (batch_size, num_heads) float32 tensor, optional
    num_splits, scheduler_metadata, pack_gqa, sm_margin
        Hints for FlashAttention's kernels, on which no result depends.
    return_softmax_lse : bool
        Also return the LSE.
    k_descale, v_descale : tensor, optional
        FlashAttention 3's scales of fp8 caches: one for each KV head, the same for all sequences.
    **refused
        What else FlashAttention 3 has, refused by name unless it has its default.

    Returns
    -------
    out : (batch_size, seqlen, num_heads, head_dim) tensor
    softmax_lse : (batch_size, num_heads, seqlen) float32 tensor
        Only with ``return_softmax_lse=True``.

    Raises
    ------
    TypeError, ValueError, IndexError
        As of `pagedkv.prefill_attention` and `pagedkv.write_kv`, and for arguments that do not go together.

    Notes
    -----
    On a GPU lengths are not read: a sequence with fewer keys than query tokens gives zeros there.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat.flash_attn import flash_attn_with_kvcache
    >>> k_cache = v_cache = torch.zeros(4, 16, 2, 64)
    >>> q, k = torch.ones(1, 1, 8, 64), torch.ones(1, 1, 2, 64)
    >>> tables, lens = torch.tensor([[3, 1]]).int(), torch.tensor([20]).int()
    >>> flash_attn_with_kvcache(q, k_cache, v_cache.clone(), k, k, cache_seqlens=lens, block_table=tables).shape
    torch.Size([1, 1, 8, 64])
    """
    _refuse(refused)
    _require_no_grad(q, k_cache, v_cache, k, v)
    require.boolean("return_softmax_lse", return_softmax_lse)
    if page_table is not None:
        if block_table is not None:
            raise ValueError("block_table and page_table are two names of one argument: give one of them")
        block_table = page_table
    if q.dim() != 4 or k_cache.dim() != 4:
        raise ValueError(
            "q must have shape (batch_size, seqlen, num_heads, head_dim) and k_cache (num_blocks, block_size, "
            f"num_kv_heads, head_dim), got {tuple(q.shape)} and {tuple(k_cache.shape)}"
        )
    batch_size, seqlen, num_heads, head_dim = q.shape
    tables = _tables(block_table, cache_batch_idx, batch_size, k_cache)
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens must say where k goes, got None")
        cache_seqlens = tables.shape[1] * k_cache.shape[1]
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        cache_seqlens = as_int("cache_seqlens", cache_seqlens, maximum=2**31 - 1)
        cache_seqlens = torch.full((batch_size,), cache_seqlens, dtype=torch.int32, device=q.device)
    lens = as_int32("cache_seqlens", cache_seqlens, (batch_size,))
    if cache_leftpad is not None:
        cache_leftpad = as_int32("cache_leftpad", cache_leftpad, (batch_size,))
    options = _options(causal, window_size, softcap, alibi_slopes, softmax_scale)
    stored = _stored(k_cache, v_cache, k_descale, v_descale, batch_size)
    k_cache, v_cache = stored.pop("caches")
    write = None
    if k is not None:
        if v is None or (rotary_cos is None) != (rotary_sin is None):
            raise ValueError("k needs v, and rotary_cos needs rotary_sin")
        if k.dim() != 4 or k.shape[:1] != q.shape[:1] or k.shape != v.shape:
            raise ValueError(
                f"k and v must have shape ({batch_size}, seqlen_new, num_kv_heads, head_dim), "
                f"got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        slots, positions = _new_slots(k, tables, lens, k_cache.shape[1])
        rotation = {}
        if rotary_cos is not None:
            rotation = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": rotary_interleaved}
            sees_all = not causal and options["window"] is options["window_right"] is None
            q = _rotated(q, lens, 0 if sees_all else 1, rotation)
            rotation["positions"] = positions
        flat_k, flat_v = (contiguous_rows(x.flatten(0, 1)) for x in (k, v))
        write = partial(write_kv, flat_k, flat_v, k_cache, v_cache, slots, **rotation, **stored)
        lens = lens + k.shape[1]
    elif v is not None or rotary_cos is not None or rotary_sin is not None:
        raise ValueError("v, rotary_cos and rotary_sin need k")

    rows = contiguous_rows(q.flatten(0, 1))
    is_decode = seqlen == 1 and cache_leftpad is None and (alibi_slopes is None or alibi_slopes.dim() == 1)
    if is_decode:
        del options["causal"], options["window_right"]  # there is no later key
        arguments = AttentionArguments(rows, k_cache, v_cache, tables, lens, **options, **stored, return_lse=True)
    else:
        tables, lens, options["leftpad"] = _behind_padding(
            tables, lens, seqlen, len(rows), k_cache.shape[1], cache_leftpad, "cache_seqlens"
        )
        starts = torch.arange(batch_size + 1, dtype=torch.int32, device=q.device) * seqlen
        arguments = AttentionArguments(
            rows, k_cache, v_cache, tables, lens, starts, ragged=True, **options, **stored, return_lse=True
        )
    if write is not None:
        attention_call(arguments)  # nothing may be written if it is refused
        write()
    out, lse = attend(arguments)
    out = out.view(batch_size, seqlen, num_heads, head_dim)
    return (out, lse.view(batch_size, seqlen, num_heads).transpose(1, 2).contiguous()) if return_softmax_lse else out


@between_graphs
@in_words(_WORDS_OF_RAGGED, ("q", "k", "v", *_LOOKED_INTO))
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    seqused_k: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    **refused: Any,
) -> Any:
    """Compute attention of ragged queries over ragged keys, or over paged ones with a block table.

    Parameters
    ----------
    q : (total_q, num_heads, head_dim) tensor
    k, v : (total_k, num_kv_heads, head_dim) tensor
        With a block table (num_blocks, block_size, num_kv_heads, head_dim).
    cu_seqlens_q, cu_seqlens_k : (batch_size + 1,) int32 tensor
        Where each sequence begins in q and in k; with a block table the differences of `cu_seqlens_k` are lengths.
    max_seqlen_q, max_seqlen_k, deterministic, num_splits, pack_gqa, sm_margin
        No result depends on them.
    dropout_p : float
        0: there is no dropout.
    softmax_scale, causal, window_size, softcap, alibi_slopes, block_table, k_descale, v_descale
        As in `flash_attn_with_kvcache`.
    return_attn_probs : bool
        Also return the LSE and None, for there is no dropout whose pattern the original gives there.
    seqused_k : (batch_size,) int32 tensor, optional
        FlashAttention 3's: how many keys of each sequence count.
    **refused
        What else FlashAttention 3 has, refused by name unless it has its default.

    Returns
    -------
    out : (total_q, num_heads, head_dim) tensor
    softmax_lse : (num_heads, total_q) float32 tensor
        Only with ``return_attn_probs=True``, followed by None.

    Raises
    ------
    TypeError, ValueError, IndexError
        As of `pagedkv.prefill_attention`, and for arguments that do not go together.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat.flash_attn import flash_attn_varlen_func
    >>> q, k, starts = torch.ones(7, 8, 64), torch.ones(7, 2, 64), torch.tensor([0, 5, 7]).int()
    >>> flash_attn_varlen_func(q, k, k, starts, starts, 5, 5, causal=True).shape
    torch.Size([7, 8, 64])
    """
    _refuse(refused)
    _require_no_grad(q, k, v)
    require.boolean("return_attn_probs", return_attn_probs)
    if not isinstance(dropout_p, (int, float)) or dropout_p:
        raise ValueError(f"dropout_p must be 0.0, got {dropout_p}: pagedkv has no dropout")
    options = _options(causal, window_size, softcap, alibi_slopes, softmax_scale)
    cu_seqlens_q = as_int32("cu_seqlens_q", cu_seqlens_q, (None,))
    batch_size, name = len(cu_seqlens_q) - 1, "cu_seqlens_k" if seqused_k is None else "seqused_k"
    if batch_size < 0:
        raise ValueError("cu_seqlens_q must have shape (batch_size + 1,), got (0,)")
    if seqused_k is not None:
        seqused_k = as_int32("seqused_k", seqused_k, (batch_size,))
    if cu_seqlens_k is not None or block_table is None or seqused_k is None:
        cu_seqlens_k = as_int32("cu_seqlens_k", cu_seqlens_k, (batch_size + 1,))
    if q.dim() != 3 or (block_table is not None and k.dim() != 4):
        raise ValueError(
            "q must have shape (total_q, num_heads, head_dim), and with a block_table k (num_blocks, block_size, "
            f"num_kv_heads, head_dim), got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    stored = _stored(k, v, k_descale, v_descale, batch_size)
    q, k, v = map(contiguous_rows, (q, *stored.pop("caches")))
    if block_table is None:
        k, v, tables, lens = as_blocks(k, v, cu_seqlens_k, seqused_k, "cu_seqlens_k")
    else:
        tables = as_int32("block_table", block_table, (batch_size, None))
        lens = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    tables, lens, options["leftpad"] = _behind_padding(
        tables, lens, cu_seqlens_q.diff(), len(q), k.shape[1], None, name
    )
    out, lse = prefill_attention(q, k, v, tables, lens, cu_seqlens_q, **options, **stored, return_lse=True)
    return (out, lse.t().contiguous(), None) if return_attn_probs else out


_DEFAULTS: dict[str, Any] = {"attention_chunk": 0, "max_seqlen_q": None, "seqused_q": None}
_REASONS = {
    "qv": "pagedkv has no second query for a latent V (MLA)",
    "q_descale": "q is of a float dtype here, and needs no scale",
    "cu_seqlens_q": "call flash_attn_varlen_func with ragged queries",
    "cu_seqlens_k_new": "k and v have the same number of tokens for each sequence here",
    "max_seqlen_q": "it belongs to ragged queries: call flash_attn_varlen_func",
    "rotary_seqlens": "positions follow from cache_seqlens here",
    "attention_chunk": "chunks are no window of pagedkv",
    "seqused_q": "give the rows that are used as q",
}


def _refuse(arguments: dict[str, Any]) -> None:
    """Raise for options of FlashAttention 3 that pagedkv lacks, unless they have their defaults."""
    for name, value in arguments.items():
        if name not in _REASONS:
            raise TypeError(f"there is no argument {name}, neither in FlashAttention 2 nor in FlashAttention 3")
        if value is not None and (isinstance(value, torch.Tensor) or value != _DEFAULTS.get(name)):
            raise ValueError(f"{name} must not be given: {_REASONS[name]}")


def _require_no_grad(*tensors: Any) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise NotImplementedError("pagedkv computes no gradients: call it under torch.no_grad()")


def _options(causal: bool, window_size: Any, softcap: float, alibi_slopes: Any, scale: float | None) -> dict[str, Any]:
    """Convert options to those of pagedkv.prefill_attention."""
    require.boolean("causal", causal)
    try:
        left, right = map(index, window_size)
    except (TypeError, ValueError) as error:
        raise TypeError(f"window_size must be two ints, got {window_size!r}") from error
    return {
        "causal": causal,
        "window": left + 1 if left >= 0 else None,
        "window_right": right if right >= 0 and not causal else None,
        "softcap": None if softcap is None else number("softcap", softcap) or None,
        "alibi_slopes": None if alibi_slopes is None else contiguous_rows(alibi_slopes),
        "scale": None if scale is None else number("softmax_scale", scale),
    }


def _stored(k_cache: Any, v_cache: Any, k_descale: Any, v_descale: Any, batch_size: int) -> dict[str, Any]:
    """How the caches are stored, and `caches`, of fp8 as their bytes."""
    kv_dtype = FP8_NAMES.get(k_cache.dtype)
    if kv_dtype is None:
        if k_descale is not None or v_descale is not None:
            raise ValueError(f"k_descale and v_descale are for caches of fp8, got caches of {k_cache.dtype}")
        return {"caches": (k_cache, v_cache)}
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache must have dtype {k_cache.dtype}, that of k_cache, got {v_cache.dtype}")
    return {
        "caches": (k_cache.view(torch.uint8), v_cache.view(torch.uint8)),
        "kv_dtype": kv_dtype,
        "k_scale": _scale("k_descale", k_descale, batch_size),
        "v_scale": _scale("v_descale", v_descale, batch_size),
    }


def _scale(name: str, descale: Any, batch_size: int) -> Any:
    """Read the scale of each KV head from (batch_size, num_kv_heads) equal rows."""
    if descale is None or not batch_size:
        return None
    if descale.dim() == 1:
        return contiguous_rows(descale)
    if descale.dim() != 2 or len(descale) != batch_size:
        raise ValueError(f"{name} must have shape ({batch_size}, num_kv_heads), got {tuple(descale.shape)}")
    # A row that is repeated by expand() is seen without reading it, also on a GPU.
    if descale.stride(0) != 0 and bool((descale != descale[:1]).any()):
        raise ValueError(f"{name} must be the same for all sequences, which share blocks of one cache")
    return descale[0].contiguous()


def _tables(block_table: Any, cache_batch_idx: Any, batch_size: int, k_cache: Any) -> Any:
    """The block table; a contiguous cache is one whose sequences have one block each."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx is for contiguous caches: give it or block_table")
        return as_int32("block_table", block_table, (batch_size, None))
    rows = len(k_cache)
    if cache_batch_idx is None:
        if rows < batch_size:
            raise ValueError(f"k_cache must have a row for each of {batch_size} sequences, got {rows}")
        return torch.arange(batch_size, dtype=torch.int32, device=k_cache.device)[:, None]
    cache_batch_idx = as_int32("cache_batch_idx", cache_batch_idx, (batch_size,))
    if not cache_batch_idx.is_cuda and bool(((cache_batch_idx < 0) | (cache_batch_idx >= rows)).any()):
        raise IndexError(f"cache_batch_idx must be rows of k_cache in 0..{rows - 1}, got {cache_batch_idx.tolist()}")
    return cache_batch_idx[:, None]


def _behind_padding(
    tables: Any, lens: Any, query_lens: Any, num_tokens: int, block_size: int, leftpad: Any, name: str
) -> tuple[Any, Any, Any]:
    """Tables, lengths and padding, of sequences with fewer keys than queries as `behind_padding` says."""
    if lens.is_cuda or bool((lens >= query_lens).all()):
        return tables, lens, leftpad
    if leftpad is not None and bool(((leftpad < 0) | (leftpad > lens)).any()):
        raise ValueError(f"cache_leftpad must be in 0..cache_seqlens, got {leftpad.tolist()} for {lens.tolist()} keys")
    query_lens = torch.as_tensor(query_lens, dtype=torch.int32).broadcast_to(lens.shape)
    arrays = tables.numpy(), lens.numpy(), query_lens.numpy()
    tables, lens, padding = behind_padding(*arrays, num_tokens, block_size, name)
    return tables, lens, padding if leftpad is None else padding + leftpad.numpy()


def _new_slots(k: Any, tables: Any, lens: Any, block_size: int) -> tuple[Any, Any]:
    """The slots and positions of k, which follows the tokens of the cache."""
    num_new, room = k.shape[1], tables.shape[1] * block_size
    if not lens.is_cuda and bool(((lens < 0) | (lens > room - num_new)).any()):
        raise ValueError(
            f"cache_seqlens must be at least 0, and leave room for {num_new} new tokens of {room}, the tokens of a row "
            f"of block_table or of the cache, got {lens.tolist()}"
        )
    positions = lens[:, None] + torch.arange(num_new, dtype=torch.int32, device=lens.device)
    blocks = tables.gather(1, (positions // block_size).long())
    if not lens.is_cuda and bool((blocks < 0).any()):  # write_kv skips a token whose slot is negative
        raise IndexError(f"block_table must hold a block for each new token, got {blocks.tolist()}")
    return (blocks.long() * block_size + positions % block_size).reshape(-1), positions.reshape(-1)


def _rotated(q: Any, lens: Any, step: int, rotation: dict[str, Any]) -> Any:
    """q at positions from lens on, `step` apart."""
    steps = torch.arange(q.shape[1], dtype=torch.int32, device=lens.device)
    positions = (lens[:, None] + steps * step).flatten()
    rows, _ = apply_rotary(contiguous_rows(q.flatten(0, 1)), None, positions=positions, **rotation)
    return rows.view(q.shape)


if not TYPE_CHECKING:
    __getattr__ = missing_names(
        __name__,
        "flash_attn_varlen_func also takes a batch of equal lengths, q.flatten(0, 1) and so on with starts, "
        "and q, k and v as tensors of their own",
    )
