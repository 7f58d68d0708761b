"""The public attention operations: decode, prefill, and merging partial results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import between_graphs
from ..backends import backend_of, gpu_backend
from ..calls import AttentionArguments
from ..layouts import FLOAT32
from ..typing import Backend, Kernel, KvDtype, Layout
from ..validation.attention import attention_call
from ..validation.merge import merge_call


@between_graphs
def decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    max_seq_len: int | None = None,
    scale: float | None = None,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    alibi_slopes: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    score_mod: Callable[..., Any] | None = None,
    kernel: Kernel = "auto",
    backend: Backend = "auto",
    out: Any = None,
    return_lse: bool = False,
    check: bool | None = None,
) -> Any:
    """Compute attention of one new token per sequence over its paged keys and values.

    Query head h of sequence i attends to the first ``seq_lens[i]`` tokens of the sequence, the query's own being
    the last of them, through KV head ``h // (num_heads / num_kv_heads)``. All arithmetic is float32 whatever the
    dtype. A logit is ``scale * q . k``, then softcap, then ALiBi, then score_mod, then masks.

    Parameters
    ----------
    q : (num_seqs, num_heads, head_dim) array
        float32, float16 or bfloat16; num_heads is a multiple of num_kv_heads, head_dim a multiple of 8 from 8 to 512.
    k_cache, v_cache : array
        The blocks, shaped as `layout` says; of q's dtype, or any of the three when q is float32, or uint8 for fp8, or
        int8. Any outer strides; the arrays are never copied.
    block_tables : (num_seqs, max_blocks) int32 array
        Logical block j of sequence i is physical block ``block_tables[i, j]``. Entries at or past
        ``ceil(seq_lens[i] / block_size)`` may hold anything.
    seq_lens : (num_seqs,) int32 array
        Tokens of each sequence, from 0 to max_blocks * block_size. A sequence of length 0 gives zeros and LSE -inf.
    max_seq_len : int, optional
        A bound that no length exceeds; by default, and at most, the tables' capacity max_blocks * block_size. CUDA
        kernels are launched for that many tokens, rounded up to a power of two of at least 256. With wide tables, or in
        a CUDA graph, a bound saves idle thread blocks, workspaces, and shared memory of v1. It changes no bit of a
        kernel's result.
    scale : float, optional
        Factor of ``q . k``; finite; ``1 / sqrt(head_dim)`` if None.
    layout : {"NHD", "HND", "vllm"}
        NHD is (num_blocks, block_size, num_kv_heads, head_dim), HND is (num_blocks, num_kv_heads, block_size,
        head_dim), both for K and V; vllm has K (num_blocks, num_kv_heads, head_dim / x, block_size, x) with
        x = 16 / itemsize and V (num_blocks, num_kv_heads, head_dim, block_size).
    kv_dtype : {None, "fp8_e4m3", "fp8_e5m2", "int8"}
        The format of caches in 8 bits: fp8 of uint8 ones, or int8.
    k_scale, v_scale : float or (num_kv_heads,) float32 array, optional
        For fp8 caches: positive and finite, ``value = code * scale``; 1.0 if None.
    k_scales, v_scales : array, optional
        For int8 caches, which need both: the float32 scale of each row as `write_kv` stores it, ``value = code *
        scale``; (num_blocks, block_size, num_kv_heads) in NHD and (num_blocks, num_kv_heads, block_size) in HND and
        vllm, with any positive strides.
    alibi_slopes : (num_heads,) float32 array, optional
        Takes ``slope * abs(q_pos - k_pos)`` away from a logit.
    window : int, optional
        At least 1: only the last `window` keys count, the query's own among them.
    softcap : float, optional
        Positive and finite: a logit x becomes ``softcap * tanh(x / softcap)``.
    sinks : (num_heads,) float32 array, optional
        The logit of one more term in the denominator and in the LSE, a term that has no value.
    score_mod : callable, optional
        ``score_mod(score, q_pos, k_pos, head, seq) -> score``: a function of a float32 score and four int32, which the
        backend compiles. It may use ``math``, and numbers and arrays that it closes over. Returning -inf masks a key.
    kernel : {"auto", "v1", "v2", "split"}
        The CUDA kernel: v1 or v2 for layout vllm, split for NHD and HND. The CPU ignores it.
    backend : {"auto", "cpu", "cuda", "emulator"} or EmulatorDevice
        "auto" follows the arrays. An `emulator.EmulatorDevice` decides what is checked and counted.
    out : (num_seqs, num_heads, head_dim) array, optional
        Where to write the result: of q's dtype, writable, overlapping no input, no element twice.
    return_lse : bool
        Also return the LSE.
    check : bool, optional
        Whether kernels check the values of device arrays; those of host arrays are always checked.

    Returns
    -------
    out : (num_seqs, num_heads, head_dim) array
        In q's dtype and framework; the very object given as `out`, if one was.
    lse : (num_seqs, num_heads) float32 array
        Only with ``return_lse=True``: natural log of the sum of exponentials of the scaled, masked logits.

    Raises
    ------
    TypeError
        An argument is not an array, or has the wrong dtype or type.
    ValueError
        A shape, layout, stride, alignment, device or option is wrong; a length is below 0, beyond the table's capacity
        or beyond max_seq_len.
    IndexError
        An entry in the used part of a table is outside 0..num_blocks-1.
    BackendUnavailableError
        The backend that the arrays or the caller ask for is not available.
    MemoryError
        The GPU has no room for a workspace; `release_workspaces`, a lower max_seq_len or narrower block_tables help.

    Notes
    -----
    After any exception `out` is unchanged; after an interrupt (Ctrl-C) it is unchanged or complete. Tables, lengths and
    the arrays of options on the host are copied before they are checked, since another thread may write to them.

    On a device, a length beyond max_seq_len rounded up, or beyond the table, counts as 0, and its row is zeros. With
    ``check=True`` it is recorded, and the row of a sequence with a block id out of range becomes zeros.

    The bits of a sequence's result do not depend on the other sequences of the batch, on where its blocks lie, on the
    block size, on NHD or HND, on the number of threads, or on how the calling thread rounds or treats denormals.
    On a GPU they depend on num_kv_heads, so sharding KV heads (tensor parallelism) changes the last bits. CUDA calls in
    layout vllm are the exception: v1 and v2 round differently, also from block size to block size, and "auto" chooses
    between them by the number of sequences and by max_seq_len; a kernel chosen by name keeps its bits.

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
    arguments = AttentionArguments(
        q, k_cache, v_cache, block_tables, seq_lens,
        max_seq_len=max_seq_len, scale=scale, layout=layout, kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale,
        k_scales=k_scales, v_scales=v_scales, alibi_slopes=alibi_slopes, window=window, softcap=softcap, sinks=sinks,
        score_mod=score_mod, kernel=kernel, backend=backend, out=out, return_lse=return_lse, check=check,
    )  # fmt: skip
    return attend(arguments)


@between_graphs
def prefill_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    query_starts: Any,
    *,
    max_seq_len: int | None = None,
    causal: bool = True,
    exact: bool = False,
    scale: float | None = None,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    alibi_slopes: Any = None,
    window: int | None = None,
    window_right: int | None = None,
    leftpad: Any = None,
    mask: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    score_mod: Callable[..., Any] | None = None,
    kernel: Kernel = "auto",
    backend: Backend = "auto",
    out: Any = None,
    return_lse: bool = False,
    check: bool | None = None,
) -> Any:
    """Compute attention of the last tokens of each sequence over its paged keys and values, in one ragged batch.

    Row r of sequence i, ``q[query_starts[i] + r]``, sits at position ``seq_lens[i] - query_len[i] + r`` where
    ``query_len[i] = query_starts[i + 1] - query_starts[i]``. This one call serves whole prompts, chunked prefill,
    verification of speculated tokens, and batches that mix them with decode steps.

    Parameters
    ----------
    q : (num_tokens, num_heads, head_dim) array
        float32, float16 or bfloat16. Rows at and past ``query_starts[-1]`` are padding: not read, and not written
        in the result.
    k_cache, v_cache, block_tables, seq_lens
        As in :func:`~pagedkv.decode_attention`; seq_lens count the query tokens, whose keys and values are in the
        cache already.
    max_seq_len : int, optional
        A bound that no length exceeds. On a device, a longer length counts as out of range: see Notes.
    query_starts : (num_seqs + 1,) int32 array
        Begins with 0, never decreases, ends at or before num_tokens; no query_len exceeds its seq_len.
    causal : bool
        Keep only keys at or before the query.
    exact : bool
        Give a row the same bits however many query tokens its sequence has, also where CUDA would otherwise split the
        keys: see Notes. On the CPU this always holds.
    scale, layout, kv_dtype, k_scale, v_scale, k_scales, v_scales, softcap, sinks, score_mod, kernel, backend
        As in :func:`~pagedkv.decode_attention`.
    alibi_slopes : (num_heads,) or (num_seqs, num_heads) float32 array, optional
        Slopes for all sequences, or for each.
    window : int, optional
        At least 1: keep only keys after ``position - window``.
    window_right : int, optional
        At least 0, with ``causal=False``: keep only keys up to ``position + window_right``.
    leftpad : (num_seqs,) int32 array, optional
        From 0 to the sequence's length: the first ``leftpad[i]`` tokens of sequence i are padding, which no query
        sees. They count as positions.
    mask : (n,) bool or uint8 array, optional
        Which keys each row may see, on top of the other options: the (query_len, seq_len) booleans of every sequence,
        row by row, one sequence after another. As uint8 they are bits, the lowest of a byte first, and each sequence
        begins with a new byte (``np.packbits(..., bitorder="little")`` of each). A mask is data of the call: another
        one compiles nothing. Use it for trees of draft tokens, or for spans of tokens that see each other.
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
        As in :func:`~pagedkv.decode_attention`; ValueError also for wrong query_starts.
    MemoryError
        The GPU has no room for a workspace; see :func:`~pagedkv.decode_attention`. ``exact=True`` needs none.

    Notes
    -----
    After any exception `out` is unchanged; after an interrupt (Ctrl-C) it is unchanged or complete. If all keys of a
    row are masked, it gets zeros and LSE -inf (or the sink's logit). A NaN or Inf in V at a used position may reach any
    query row of the same sequence and KV head; in K it reaches only rows that attend to it.

    On a device, a length beyond max_seq_len rounded up as in decode_attention, beyond the table, or below its query_len
    counts as 0, and its rows are zeros. If query_starts decrease or are out of range, rows may hold anything or stay
    unchanged. With ``check=True`` both are recorded, and the rows of a sequence with a block id out of range become
    zeros.

    The bits of a row depend only on the keys that it sees, so a prompt gets the same bits as a whole and in any chunks.
    On a device they differ from those of decode_attention. There, in NHD and HND, with 16-bit queries over caches of
    their dtype or fp8 and up to 256 dims, the keys of sequences with ``query_len * num_heads / num_kv_heads <= 32`` and
    more than 512 tokens are split over thread blocks: rows may then differ in the last bits from the same rows in a
    longer chunk, or in one that ends earlier. With ``exact=True`` no keys are split.

    References
    ----------
    .. [1] Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
    .. [2] Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022.
    .. [3] Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import numpy as np
    >>> import pagedkv
    >>> k_cache = v_cache = np.ones((4, 16, 2, 64), np.float32)
    >>> q = np.ones((5, 8, 64), np.float32)  # the last 3 tokens of sequence 0, and both of sequence 1
    >>> block_tables, seq_lens = np.array([[3, 1], [0, 0]], np.int32), np.array([20, 2], np.int32)
    >>> query_starts = np.array([0, 3, 5], np.int32)
    >>> pagedkv.prefill_attention(q, k_cache, v_cache, block_tables, seq_lens, query_starts).shape
    (5, 8, 64)
    """
    arguments = AttentionArguments(
        q, k_cache, v_cache, block_tables, seq_lens, query_starts, ragged=True, causal=causal, exact=exact,
        max_seq_len=max_seq_len, scale=scale, layout=layout, kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale,
        k_scales=k_scales, v_scales=v_scales, alibi_slopes=alibi_slopes, window=window, window_right=window_right,
        leftpad=leftpad, mask=mask, softcap=softcap, sinks=sinks, score_mod=score_mod, kernel=kernel, backend=backend,
        out=out, return_lse=return_lse, check=check,
    )  # fmt: skip
    return attend(arguments)


def attend(arguments: AttentionArguments) -> Any:
    """Run `decode_attention`, or `prefill_attention` if they are ragged, with these arguments."""
    if type(arguments.q) is not np.ndarray and (used := gpu_backend()) is not None:
        repeated = used.plans.repeat(arguments)
        if repeated is not None:
            return repeated
    call = attention_call(arguments)
    out, result = arguments.out, call.out
    if result is None:
        remedy = "give the memory of the result as out="
        out, result = call.placement.new_array("out", call.q.shape, call.q.dtype, remedy)
    lse = lses = None
    if arguments.return_lse:
        remedy = "convert q to one of them to have the LSE"
        lse, lses = call.placement.new_array("lse", call.q.shape[:2], FLOAT32, remedy)
    if call.has_rows:
        backend = backend_of(call.placement)
        plan = backend.plan(call)
        backend.run(plan, call.q, call.caches, result, lses, is_given=call.out is not None)
    return (out, lse) if arguments.return_lse else out


@between_graphs
def merge_states(outs: Any, lses: Any, *, backend: Backend = "auto") -> tuple[Any, Any]:
    """Merge the results of attention of the same queries over disjoint sets of keys.

    Parameters
    ----------
    outs : list of (rows, num_heads, head_dim) arrays, or one stacked (num_states, rows, num_heads, head_dim) array
        The partial outputs, at least one; float32, float16 or bfloat16, all of one dtype.
    lses : list of (rows, num_heads) float32 arrays, or one stacked (num_states, rows, num_heads) array
        Their LSEs (natural log). Where a state's LSE is -inf it has no keys, and its output may hold anything.
    backend : {"auto", "cpu", "cuda", "emulator"} or EmulatorDevice
        "auto" follows the arrays. An `emulator.EmulatorDevice` decides what is checked and counted.

    Returns
    -------
    out : (rows, num_heads, head_dim) array
        The attention over all keys, in the dtype and framework of `outs`; 0 where no state has a key.
    lse : (rows, num_heads) float32 array
        The LSE over all keys; -inf where no state has one.

    Raises
    ------
    TypeError
        An argument is not an array, or has the wrong dtype.
    ValueError
        A shape, stride, alignment or device is wrong; there is no state; the numbers of outputs and LSEs differ.
    BackendUnavailableError
        The backend that the arrays or the caller ask for is not available.

    Notes
    -----
    Sums are float32, so another order of the states changes the result by rounding only.

    References
    ----------
    .. [1] Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    .. [2] Dao et al., "Flash-Decoding for long-context inference", 2023.

    Examples
    --------
    Two states of one row and one head, whose keys weigh the same:

    >>> import numpy as np
    >>> import pagedkv
    >>> outs = np.array([1, 3], np.float32).reshape(2, 1, 1, 1).repeat(8, axis=3)
    >>> out, lse = pagedkv.merge_states(outs, np.zeros((2, 1, 1), np.float32))
    >>> out
    array([[[2., 2., 2., 2., 2., 2., 2., 2.]]], dtype=float32)
    """
    call = merge_call(outs, lses, backend=backend)
    shape, dtype, remedy = call.outs[0].shape, call.outs[0].dtype, "convert outs to one of them"
    out, result = call.placement.new_array("out", shape, dtype, remedy)
    lse, lse_result = call.placement.new_array("lse", shape[:2], FLOAT32, remedy)
    backend_of(call.placement).merge_states(call, result, lse_result)
    return out, lse
