"""Compiling CUDA kernels before the first calls that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..calls import CACHES, AttentionArguments
from ..layouts import KvFormat, as_given, float_dtype
from ..typing import KvDtype, Layout
from ..validation import require
from ..validation.attention import attention_call
from ..validation.caches import copy_call, gather_call, write_call
from ..validation.merge import merge_call
from ..validation.rotary import rotary_call
from ..validation.tables import even_dim

_KERNELS = {"vllm": ("v1", "v2"), "NHD": ("split",), "HND": ("split",)}
# Kernel "split" is compiled with or without softcap and ALiBi; v1 and v2 decide when they run.
_SOFTCAPS = {"vllm": (None,), "NHD": (None, 1.0), "HND": (None, 1.0)}
# A prefill of this many tokens, in tables for this length, needs every kernel that other calls may need.
_PREFILL_TOKENS, _PREFILL_LENGTHS = 64, (4096, 2**20)


def warmup(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: Any,
    *,
    layout: Layout = "NHD",
    cache_dtype: Any = None,
    kv_dtype: KvDtype | None = None,
    token_dtype: Any = None,
    per_head_scales: bool = False,
    score_mod: Callable[..., Any] | None = None,
    kernels: Sequence[str] | None = None,
    num_states: int | None = None,
    prefill: bool = False,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    check: bool | None = None,
    capabilities: Sequence[tuple[int, int]] | None = None,
) -> list[str]:
    """Compile the kernels that CUDA calls with these shapes and options need, so that the first call starts at once.

    The calls are decode_attention, write_kv, gather_kv, copy_blocks and swap_blocks within a device; prefill_attention
    if `prefill`, merge_states if `num_states`, and apply_rotary and write_kv with tables if `rotary_dim` is given.
    Kernels are kept on disk (see ``PAGEDKV_CACHE_DIR``), so this can run without a GPU, while an image is built. Calls
    whose arrays are not contiguous or barely aligned, or whose caches are larger than 64 GiB (32 of fp8 for prefill),
    may need other kernels.

    Parameters
    ----------
    num_heads, num_kv_heads, head_dim, block_size : int
        Hq, Hkv, D and P.
    dtype : dtype-like
        The dtype of q: float32, float16 or bfloat16, as a name or a dtype of NumPy, CuPy or torch.
    layout : str
        "NHD", "HND" or "vllm".
    cache_dtype : dtype-like, optional
        The dtype of the caches; by default that of q.
    kv_dtype : str, optional
        "fp8_e4m3" or "fp8_e5m2", for caches in uint8, or "int8".
    token_dtype : dtype-like, optional
        The dtype of k and v in write_kv; by default that of the caches, or that of q for caches in 8 bits.
    per_head_scales : bool
        Whether k_scale and v_scale of fp8 caches are arrays rather than numbers.
    score_mod : callable, optional
        The very function that calls will pass; its kernels are not kept on disk.
    kernels : sequence of str, optional
        What calls will pass as `kernel`; by default all kernels of the layout.
    num_states : int, optional
        How many states merge_states will get, with outputs of q's dtype; by default its kernel is not compiled.
    prefill : bool
        Whether to compile the kernels of prefill_attention.
    rotary_dim : int, optional
        The rotary_dim of apply_rotary, for q and k of q's dtype, and of write_kv, for k of `token_dtype`, with float32
        tables; by default these kernels are not compiled.
    interleaved : bool
        As in apply_rotary.
    check : bool, optional
        As in the calls.
    capabilities : sequence of (int, int), optional
        Compute capabilities of the GPUs, ``[(9, 0)]`` for an H100. By default those of the GPUs of this machine.

    Returns
    -------
    list of str
        Names of the kernels.

    Raises
    ------
    TypeError, ValueError
        As from the calls; `capabilities` are not such pairs, or name one below (8, 0).
    BackendUnavailableError
        There is no compiler, or neither `capabilities` nor a GPU.

    Examples
    --------
    For an H100, on a machine without a GPU:

    >>> import pagedkv
    >>> names = pagedkv.warmup(4, 2, 64, 16, "float16", layout="vllm", kernels=["v1"], capabilities=[(9, 0)])
    >>> any(name.startswith("v1[") for name in names)
    True
    """
    q_dtype = float_dtype(dtype)
    kv_format = KvFormat.of(dtype if cache_dtype is None else cache_dtype, kv_dtype)
    token = (q_dtype if kv_format.coded else kv_format.stored) if token_dtype is None else float_dtype(token_dtype)
    if kernels is not None and (isinstance(kernels, str) or not isinstance(kernels, Sequence)):
        raise TypeError(f'kernels must be a sequence of names, such as ["v1"], got {kernels!r}')
    require.boolean("per_head_scales", per_head_scales)
    require.boolean("prefill", prefill)
    parts = kv_format.parts(layout, 2, block_size, num_kv_heads, head_dim)
    arrays = dict(zip(CACHES, as_given(layout, [np.zeros(*part) for part in parts]), strict=False))
    q, (k, v) = np.zeros((1, num_heads, head_dim), q_dtype), np.zeros((2, 1, num_kv_heads, head_dim), token)
    table, lengths, slots = np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.zeros(1, np.int64)
    scales = np.ones(num_kv_heads, np.float32) if per_head_scales else None
    caches: dict[str, Any] = {
        **arrays,
        **{"layout": layout, "kv_dtype": kv_dtype},
        **{"k_scale": scales, "v_scale": scales, "backend": "emulator"},
    }
    attention: Callable[..., AttentionArguments] = partial(
        AttentionArguments, score_mod=score_mod, check=check, **caches
    )
    decodes = [
        attention_call(attention(q=q, block_tables=table, seq_lens=lengths, kernel=kernel, softcap=softcap))
        for kernel in (_KERNELS[layout] if kernels is None else kernels)
        for softcap in _SOFTCAPS[layout]
    ]
    prompt = np.zeros((_PREFILL_TOKENS, *q.shape[1:]), q_dtype)
    ragged = partial(attention, q=prompt, seq_lens=lengths, query_starts=np.array([0, 1], np.int32), ragged=True)
    prefills = [
        attention_call(ragged(block_tables=np.zeros((1, -(-length // block_size)), np.int32), softcap=softcap))
        for length in _PREFILL_LENGTHS
        for softcap in (None, 1.0)
        if prefill
    ]
    written = caches | {"k": k, "v": v, "slots": slots, "check": check}
    writes = [write_call(**written)]
    gather = gather_call(**caches, block_table=table[0], seq_len=1)
    copy = copy_call(**arrays, pairs=np.array([[0, 1]]), backend="emulator")
    merge = None
    if num_states is not None:
        count = require.integer("num_states", num_states)
        if count < 1:
            raise ValueError(f"num_states must be at least 1, got {count}")
        lses = np.zeros((count, *q.shape[:2]), np.float32)
        merge = merge_call([q] * count, list(lses), backend="emulator")
    rotary = None
    if rotary_dim is not None:
        dim = even_dim(rotary_dim, head_dim)
        table = np.ones((1, dim // 2), np.float32)
        tables: dict[str, Any] = {"cos": table, "sin": table, "positions": slots, "interleaved": interleaved}
        rotary = rotary_call(q, None, **tables, backend="emulator", out=(q.copy(), None), check=check)
        writes.append(write_call(**written | tables))
    from ..cuda.warmup import compile_ahead

    asked = None if capabilities is None else _capabilities(capabilities)
    return compile_ahead(decodes, prefills, writes, gather, copy, merge, rotary, asked)


def _capabilities(given: Any) -> list[tuple[int, int]]:
    """Convert compute capabilities to pairs of ints, or raise."""
    from ..cuda.gpu import FIRST_CAPABILITY

    pairs = list(given) if isinstance(given, (list, tuple)) else []
    if not pairs or not all(isinstance(x, (list, tuple)) and len(x) == 2 for x in pairs):
        raise TypeError(f"capabilities must be a sequence of (major, minor), such as [(9, 0)], got {given!r}")
    asked = [(require.integer("capabilities", x), require.integer("capabilities", y)) for x, y in pairs]
    for pair in asked:
        if pair < FIRST_CAPABILITY or pair[1] < 0:
            raise ValueError(
                f"capabilities must be {FIRST_CAPABILITY} (Ampere) or newer, which kernels need, got {pair}"
            )
    return asked
