"""The public operations on queries and their results: check, choose a backend, call it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import merge_validation, validation
from .arrays import Array
from .checks import FLOAT32
from .errors import BackendUnavailableError
from .validation import per_head

if TYPE_CHECKING:
    from .cuda.plans.attention import Plan


def _results(q: Any, call: validation.AttentionCall, out: Any, return_lse: bool) -> tuple[Any, Array, Array | None]:
    """What the operation returns, and what kernels write: the result, and the LSE if there is to be one."""
    result = call.out
    if result is None:
        remedy = "give the memory of the result as out="
        out, result = call.side.new_array("out", q, call.q.shape, call.q.dtype, remedy)
    if not return_lse:
        return out, result, None
    remedy = "convert q to one of them to have the LSE"
    lse, lse_result = call.side.new_array("lse", q, call.q.shape[:2], FLOAT32, remedy)
    return (out, lse), result, lse_result


def _decode(call: validation.AttentionCall, out: Array, lse: Array | None) -> Plan | None:
    """Run a checked decode call, and say what was launched on a device, if anything.

    The module of its kernel, and numba with it, is imported when it is first needed.
    """
    if call.side.backend == "cpu":
        from .cpu.decode import decode_attention as decode

        q, k_cache, v_cache, tables, seq_lens, _, _, spec, k_scale, v_scale, options, *_ = call
        scales = per_head(k_scale, spec.num_kv_heads), per_head(v_scale, spec.num_kv_heads)
        # An infinity in a result is a value like any other: it comes back without a warning, as from a device.
        with np.errstate(over="ignore", invalid="ignore"):
            decode(q, k_cache, v_cache, tables, seq_lens, out, lse, spec, *scales, options)
        return None
    from .cuda.plans.attention import decode_attention as launch

    with call.side.device() as device:
        return launch(device, call, out, lse)


def _prefill(call: validation.AttentionCall, out: Array, lse: Array | None) -> None:
    """Run a checked prefill call on the CPU."""
    from .cpu.prefill import prefill_attention as prefill

    q, k_cache, v_cache, tables, seq_lens, starts, _, spec, k_scale, v_scale, options, *_ = call
    scales = per_head(k_scale, spec.num_kv_heads), per_head(v_scale, spec.num_kv_heads)
    assert starts is not None
    with np.errstate(over="ignore", invalid="ignore"):
        prefill(q, k_cache, v_cache, tables, seq_lens, starts, out, lse, spec, *scales, options)


def decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    layout: str = "NHD",
    kv_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    alibi_slopes: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    score_mod: Callable[..., Any] | None = None,
    kernel: str = "auto",
    backend: str = "auto",
    out: Any = None,
    return_lse: bool = False,
    check: bool | None = None,
) -> Any:
    """Attention of one new token per sequence over its paged keys and values.

    Query head h of sequence i attends to the first ``seq_lens[i]`` tokens of the sequence, the query's own being
    the last of them, through KV head ``h // (num_heads / num_kv_heads)``. All arithmetic is float32 whatever the
    dtype. A logit is ``scale * q . k``, then softcap, then ALiBi, then score_mod, then masks.

    Parameters
    ----------
    q : (num_seqs, num_heads, head_dim) array
        float32, float16 or bfloat16; num_heads is a multiple of num_kv_heads, head_dim a multiple of 8 from 8 to 512.
    k_cache, v_cache : array
        The blocks, shaped as `layout` says; of q's dtype, or any of the three when q is float32, or uint8 for fp8.
        Any outer strides. Never copied.
    block_tables : (num_seqs, max_blocks) int32 array
        Logical block j of sequence i is physical block ``block_tables[i, j]``. Entries at or past
        ``ceil(seq_lens[i] / block_size)`` may hold anything.
    seq_lens : (num_seqs,) int32 array
        Tokens of each sequence, from 0 to max_blocks * block_size. A sequence of length 0 gives zeros and LSE -inf.
    scale : float, optional
        Factor of ``q . k``; finite; ``1 / sqrt(head_dim)`` if None.
    layout : {"NHD", "HND", "vllm"}
        NHD is (num_blocks, block_size, num_kv_heads, head_dim), HND is (num_blocks, num_kv_heads, block_size,
        head_dim), both for K and V; vllm has K (num_blocks, num_kv_heads, head_dim / x, block_size, x) with
        x = 16 / itemsize and V (num_blocks, num_kv_heads, head_dim, block_size).
    kv_dtype : {None, "fp8_e4m3", "fp8_e5m2"}
        What the bytes of uint8 caches are.
    k_scale, v_scale : float or (num_kv_heads,) float32 array, optional
        For fp8 caches: positive and finite, ``value = code * scale``; 1.0 if None.
    alibi_slopes : (num_heads,) float32 array, optional
        Adds ``slope * (k_pos - q_pos)`` to a logit.
    window : int, optional
        At least 1: only the last `window` keys count, the query's own among them.
    softcap : float, optional
        Positive and finite: a logit x becomes ``softcap * tanh(x / softcap)``.
    sinks : (num_heads,) float32 array, optional
        The logit of one more term in the denominator and in the LSE, which has no value.
    score_mod : callable, optional
        ``score_mod(score, q_pos, k_pos, head, seq) -> score``, a function (def or lambda) of a float32 score and
        int32 positions, using ``math``, and numbers and arrays it closes over; the backend compiles it. -inf masks a
        key.
    kernel : {"auto", "v1", "v2", "split"}
        Which CUDA kernel: v1 and v2 for layout vllm, split for NHD and HND. The CPU backend checks it and ignores it.
    backend : {"auto", "cpu", "cuda", "emulator"}
        "auto" follows the arrays.
    out : (num_seqs, num_heads, head_dim) array, optional
        Where to write the result: of q's dtype, writable, overlapping no input, no element twice.
    return_lse : bool
        Also return the LSE.
    check : bool, optional
        Whether values in device arrays are checked; those of host arrays always are.

    Returns
    -------
    out : (num_seqs, num_heads, head_dim) array
        In q's dtype and framework; the very object given as `out`, if one was.
    lse : (num_seqs, num_heads) float32 array
        Only with ``return_lse=True``: natural log of the sum of exponentials of the scaled, masked logits.

    Raises
    ------
    TypeError
        Something is not an array, or has a wrong dtype or type.
    ValueError
        A wrong shape, layout, stride, alignment, side (host or device) or option; a length below 0 or beyond
        the table's capacity.
    IndexError
        An entry in the used part of a table is outside 0..num_blocks-1.
    BackendUnavailableError
        The backend that the arrays or the caller ask for is not here.

    Notes
    -----
    After any exception nothing has been written. The bits of a sequence's result do not depend on the other
    sequences of the batch, on where its blocks lie, on the block size, on NHD or HND, or on the number of threads.
    CUDA calls in layout vllm are the exception: v1 and v2 round differently, also from block size to block size, and
    "auto" chooses by the number of sequences and the width of the table; a kernel that is named keeps its bits.

    References
    ----------
    .. [1] Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
    .. [2] Dao et al., "Flash-Decoding for long-context inference", 2023.
    .. [3] Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import numpy as np
    >>> import pagedkv
    >>> k_cache = v_cache = np.ones((4, 16, 2, 64), np.float32)
    >>> q = np.ones((1, 8, 64), np.float32)
    >>> block_tables, seq_lens = np.array([[3, 1]], np.int32), np.array([20], np.int32)
    >>> pagedkv.decode_attention(q, k_cache, v_cache, block_tables, seq_lens).shape
    (1, 8, 64)
    """
    arguments = (q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, sinks, k_scale, v_scale, out)
    options = (scale, layout, kv_dtype, window, softcap, score_mod, kernel, backend, check)
    # There are plans to repeat once a call has run on a device.
    plans = sys.modules.get("pagedkv.cuda.plan_cache") if type(q) is not np.ndarray else None
    repeated = None if plans is None else plans.repeat(arguments, options, return_lse)
    if repeated is not None:
        return repeated
    call = validation.attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        None,
        ragged=False,
        causal=True,
        scale=scale,
        layout=layout,
        kv_dtype=kv_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        window=window,
        softcap=softcap,
        sinks=sinks,
        score_mod=score_mod,
        kernel=kernel,
        backend=backend,
        out=out,
        return_lse=return_lse,
        check=check,
    )
    returned, result, lse = _results(q, call, out, return_lse)
    if len(call.q):
        launched = _decode(call, result, lse)
        if launched and call.side.backend == "cuda":
            from .cuda.plan_cache import remember

            remember(arguments, options, return_lse, call, result, launched)
    return returned


def prefill_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    query_starts: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    layout: str = "NHD",
    kv_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    alibi_slopes: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    score_mod: Callable[..., Any] | None = None,
    kernel: str = "auto",
    backend: str = "auto",
    out: Any = None,
    return_lse: bool = False,
    check: bool | None = None,
) -> Any:
    """Attention of ragged runs of query tokens, each run the last tokens of its sequence.

    Row r of sequence i, ``q[query_starts[i] + r]``, sits at position ``seq_lens[i] - query_len[i] + r`` where
    ``query_len[i] = query_starts[i + 1] - query_starts[i]``. Whole prompts, chunked prefill, verification of
    speculated tokens and mixed batches are all this one call.

    Parameters
    ----------
    q : (num_tokens, num_heads, head_dim) array
        float32, float16 or bfloat16. Rows at and past ``query_starts[-1]`` are padding: not read, and not written
        in the result.
    k_cache, v_cache, block_tables, seq_lens
        As in :func:`~pagedkv.decode_attention`; seq_lens count the query tokens, whose keys and values are in the
        cache already.
    query_starts : (num_seqs + 1,) int32 array
        Begins with 0, never decreases, ends at or before num_tokens; no query_len exceeds its seq_len.
    causal : bool
        Keep only keys at or before the query. ALiBi is positive for later keys when False.
    scale, layout, kv_dtype, k_scale, v_scale, alibi_slopes, window, softcap, sinks, score_mod, kernel, backend
        As in :func:`~pagedkv.decode_attention`. `window` keeps keys after ``position - window``.
    out : (num_tokens, num_heads, head_dim) array, optional
        Where to write the result: of q's dtype, writable, overlapping no input, no element twice.
    return_lse, check
        As in :func:`~pagedkv.decode_attention`.

    Returns
    -------
    out : (num_tokens, num_heads, head_dim) array
        In q's dtype and framework; the very object given as `out`, if one was.
    lse : (num_tokens, num_heads) float32 array
        Only with ``return_lse=True``: natural log of the sum of exponentials of the scaled, masked logits.

    Raises
    ------
    TypeError, ValueError, IndexError, BackendUnavailableError
        As in :func:`~pagedkv.decode_attention`; ValueError for wrong query_starts as well.

    Notes
    -----
    After any exception nothing has been written. A row whose every key is masked gives zeros and LSE -inf (or the
    sink's logit). A NaN or Inf in V at a used position may reach any query row of the same sequence and KV head;
    in K only the rows that attend to it.

    References
    ----------
    .. [1] Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
    .. [2] Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022.
    .. [3] Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    call = validation.attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query_starts,
        ragged=True,
        causal=causal,
        scale=scale,
        layout=layout,
        kv_dtype=kv_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        window=window,
        softcap=softcap,
        sinks=sinks,
        score_mod=score_mod,
        kernel=kernel,
        backend=backend,
        out=out,
        return_lse=return_lse,
        check=check,
    )
    if call.side.backend != "cpu":
        remedy = "" if call.side.on_host else "copy all arrays to the host, as torch's cpu() and cupy.asnumpy do, and "
        raise BackendUnavailableError(
            f"this version of pagedkv has no prefill kernel for the {call.side.backend} backend; "
            f'{remedy}use backend "cpu"'
        )
    returned, result, lse = _results(q, call, out, return_lse)
    if len(call.q) and len(call.seq_lens):
        _prefill(call, result, lse)
    return returned


def merge_states(outs: Any, lses: Any, *, backend: str = "auto") -> tuple[Any, Any]:
    """Merge partial attentions of the same queries over disjoint sets of keys.

    Parameters
    ----------
    outs : list of (rows, num_heads, head_dim) arrays, or one stacked (num_states, rows, num_heads, head_dim) array
        The partial outputs; float32, float16 or bfloat16, all of one dtype; at least one.
    lses : list of (rows, num_heads) float32 arrays, or one stacked (num_states, rows, num_heads) array
        Their LSEs (natural log). Where a state's LSE is -inf it has no keys, and its output may hold anything.
    backend : {"auto", "cpu", "cuda", "emulator"}
        "auto" follows the arrays.

    Returns
    -------
    out : (rows, num_heads, head_dim) array
        The attention over all keys, in the dtype and framework of `outs`; 0 where no state has a key.
    lse : (rows, num_heads) float32 array
        The LSE over all keys; -inf where no state has one.

    Raises
    ------
    TypeError
        Something is not an array, or has a wrong dtype.
    ValueError
        A wrong shape, stride, alignment or side; no state at all; not as many LSEs as outputs.
    BackendUnavailableError
        The backend that the arrays or the caller ask for is not here.

    Notes
    -----
    Sums are float32: another order of the states changes the result by rounding only.

    References
    ----------
    .. [1] Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    .. [2] Dao et al., "Flash-Decoding for long-context inference", 2023.
    """
    states, state_lses, side = merge_validation.merge(outs, lses, backend=backend)
    like = outs[0] if isinstance(outs, (list, tuple)) else outs
    remedy = "convert outs to one of them"
    out, result = side.new_array("out", like, states[0].shape, states[0].dtype, remedy)
    lse, lse_result = side.new_array("lse", like, states[0].shape[:2], FLOAT32, remedy)
    if side.backend == "cpu":
        from .cpu.merge import merge_states as merge

        merge(states, state_lses, result, lse_result)
    elif lse_result.size:
        from .cuda.plans.merge import merge_states as launch

        with side.device() as device:
            launch(device, states, state_lses, result, lse_result)
    return out, lse
