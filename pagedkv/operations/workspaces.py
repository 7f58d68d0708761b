"""Workspaces: the memory in which kernels on a GPU keep partial results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..arrays import Array, metadata_of
from ..backends import backend_of, gpu_backend
from ..buckets import bucket
from ..calls import AttentionArguments, AttentionCall
from ..layouts import FLOAT32, float_dtype, scales_shape
from ..placement import Placement, place
from ..typing import Kernel, KvDtype, Layout
from ..validation import cache_pair, require
from ..validation.attention import placed_call

if TYPE_CHECKING:
    from ..cuda.backend import GpuBackend

_NEVER_READ = 256  # the address of arrays of which only shape, strides and dtype matter
_MOST = 2**31 - 1  # the largest length, query start and launch grid


def workspace_bytes() -> int:
    """How much memory the package holds for its kernels on all GPUs, streams and graphs.

    Figures of torch and CuPy do not include it.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> import pagedkv
    >>> num_bytes = pagedkv.workspace_bytes()  # 0 without a GPU
    """
    used = gpu_backend()
    return 0 if used is None else used.workspace_bytes()


def reserve_workspaces(
    k_cache: Any,
    v_cache: Any,
    num_heads: int,
    *,
    num_seqs: int,
    max_seq_len: int,
    num_tokens: int = 0,
    dtype: Any = None,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    window: int | None = None,
    check: bool | None = None,
) -> int:
    """Allocate the workspaces of the largest calls on the current stream, so that no call has to.

    Calls of decode_attention and prefill_attention for such caches and of at most these sizes then allocate nothing on
    this GPU and stream, with any kernel and options. Nothing is compiled (`warmup` does that) or launched. While a CUDA
    graph captures the stream, the workspaces belong to that graph.

    Parameters
    ----------
    k_cache, v_cache : array
        Caches of a layer, or arrays like them, which determine GPU and stream; on the host nothing is reserved.
    num_heads : int
        Heads of q.
    num_seqs : int
        The most sequences of a call.
    max_seq_len : int
        The largest bound of a call; for calls without one the capacity of their tables, max_blocks * block_size.
    num_tokens : int
        The most rows of q in a call of prefill_attention; 0 if there are none.
    dtype : dtype-like, optional
        The dtype of q: float32, float16 or bfloat16; by default that of the caches, unless they are in 8 bits.
    layout : str
        "NHD", "HND" or "vllm".
    kv_dtype : str, optional
        "fp8_e4m3" or "fp8_e5m2", for caches in uint8, or "int8".
    window : int, optional
        The largest window, if all calls have one.
    check : bool, optional
        As in the calls.

    Returns
    -------
    int
        Bytes that the workspaces have grown by.

    Raises
    ------
    TypeError, ValueError
        As from the calls; a size is out of range.
    MemoryError
        The GPU has no room, and nothing has grown. Old workspaces exist until the new ones do: call
        `release_workspaces` first to need the least memory.
    BackendUnavailableError
        The CUDA driver or a package is missing.

    Examples
    --------
    >>> import numpy as np
    >>> import pagedkv
    >>> k_cache = v_cache = np.zeros((4, 16, 2, 64), np.float32)  # arrays of a GPU reserve more than that
    >>> pagedkv.reserve_workspaces(k_cache, v_cache, num_heads=8, num_seqs=4, max_seq_len=64)
    0
    """
    sizes = {"num_heads": num_heads, "num_seqs": num_seqs, "max_seq_len": max_seq_len, "num_tokens": num_tokens}
    sizes = {name: require.integer(name, size) for name, size in sizes.items()}
    for name, size in sizes.items():
        if size < (least := int(name != "num_tokens")):
            raise ValueError(f"{name} must be at least {least}, got {size}")
        if size > _MOST and name != "max_seq_len":  # a larger bound has no effect, as in the calls
            raise ValueError(f"{name} must be below 2**31, got {size}")
    options = {"layout": layout, "kv_dtype": kv_dtype, "window": window, "check": check}
    placement, caches = place("auto", [("k_cache", k_cache), ("v_cache", v_cache)])
    calls = list(_largest_calls(placement, caches, dtype, options, **sizes))
    return 0 if placement.on_host else cast("GpuBackend", backend_of(placement)).reserve_workspaces(calls)


def release_workspaces() -> int:
    """Wait for the GPUs that this process has used, and free the workspaces of calls.

    The few bytes in which ``check=True`` records bad entries stay for `raise_if_failed`, and so do the workspaces of
    captured CUDA graphs. Later calls allocate what they need.

    Returns
    -------
    int
        Bytes that have been freed.

    Raises
    ------
    RuntimeError
        A stream of the GPU is being captured in a CUDA graph, by any thread, so the GPU cannot be waited for.

    Examples
    --------
    >>> import pagedkv
    >>> held = pagedkv.workspace_bytes()
    >>> held - pagedkv.release_workspaces() == pagedkv.workspace_bytes()
    True
    """
    used = gpu_backend()
    return 0 if used is None else used.release_workspaces()


def _largest_calls(
    placement: Placement,
    caches: list[Array],
    dtype: Any,
    options: Mapping[str, Any],
    num_heads: int,
    num_seqs: int,
    max_seq_len: int,
    num_tokens: int,
) -> Iterator[AttentionCall]:
    """A call for each operation, which need as much of each workspace as any call of at most these sizes."""
    k_cache, v_cache = caches
    layout = options["layout"]
    geometry = cache_pair.geometry_of(layout, options["kv_dtype"], k_cache, v_cache)
    kv_format = cache_pair.format_of({"k_cache": k_cache, "v_cache": v_cache}, options["kv_dtype"])
    if dtype is None and kv_format.coded:
        raise TypeError("dtype must be that of q for caches in 8 bits, got None")
    q_dtype = float_dtype(kv_format.name if dtype is None else dtype)
    bound = bucket(min(max_seq_len, _MOST))  # the length that calls with this bound are planned for
    if placement.on_host:  # use shadows, since CPU kernels accept more strides and addresses
        require.memory({"k_cache": k_cache, "v_cache": v_cache}, placement)
        k_cache, v_cache = (_shadow("a cache", x.dtype, *x.shape) for x in caches)
    views: dict[str, Any] = {
        **{"k_cache": k_cache, "v_cache": v_cache, "q": _shadow("q", q_dtype, num_seqs, num_heads, geometry.head_dim)},
        "block_tables": _shadow("block_tables", np.int32, num_seqs, -(-bound // geometry.block_size)),
        "seq_lens": _shadow("seq_lens", np.int32, num_seqs),
    }
    if kv_format.scale == "row":
        views |= {name: _shadow(name, FLOAT32, *scales_shape(layout, geometry)[1]) for name in ("k_scales", "v_scales")}
    ragged = views | {
        "q": _shadow("q", q_dtype, num_tokens, num_heads, geometry.head_dim),
        "query_starts": _shadow("query_starts", np.int32, num_seqs + 1),
    }
    where = placement._replace(backend="cuda")  # so that values are not validated
    kernel: Kernel = "v2" if layout == "vllm" else "auto"
    arguments: Callable[..., AttentionArguments] = partial(AttentionArguments, max_seq_len=bound, **options)
    yield placed_call(arguments(**views, kernel=kernel), where, dict(views))
    if num_tokens:
        yield placed_call(arguments(**ragged, ragged=True), where, dict(ragged))


def _shadow(name: str, dtype: Any, *shape: int) -> Array:
    return metadata_of(name, _NEVER_READ, shape, None, np.dtype(dtype), True, None).shadow
