"""FlashInfer's wrappers of batches over a paged KV cache, and what its scripts call beside them.

``from pagedkv.compat import flashinfer`` in place of ``import flashinfer``. Page tables are CSR matrices: request i has
the pages ``indices[indptr[i]:indptr[i + 1]]``, the last of them with ``last_page_len[i]`` tokens. LSEs are base 2, of
shape (tokens, heads). A cache is one tensor (num_pages, 2, ...) or a pair (K, V) of tensors (num_pages, page_size,
num_kv_heads, head_dim), or (num_pages, num_kv_heads, page_size, head_dim) for "HND".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..arrays import between_graphs, host_view
from ..operations import attention
from ..operations.attention import decode_attention, prefill_attention
from ..operations.caches import write_kv
from ..operations.prepared import attend

LN2 = math.log(2.0)
_FLOAT8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


class _Wrapper:
    """Base of both wrappers: their device, and what the last `plan` has set."""

    def __init__(
        self, float_workspace_buffer: Any, kv_layout: str = "NHD", use_cuda_graph: bool = False, **hints: Any
    ) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f'kv_layout must be "NHD" or "HND", got {kv_layout!r}')
        if use_cuda_graph:
            raise ValueError(
                "use_cuda_graph must be False: plan makes new tables, which a captured graph would not see"
            )
        if hints.get("jit_args") is not None:
            raise ValueError("jit_args must not be given: pass a score_mod to pagedkv.prefill_attention")
        self.device = float_workspace_buffer.device
        self._layout: Any = kv_layout
        self._planned = False
        self._starts: dict[str, Any] = {}
        self._masks: dict[str, Any] = {}

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Do nothing, since workspace buffers are not used."""

    def end_forward(self) -> None:
        """Do nothing, as the original does."""

    def _set_tables(self, indptr: Any, indices: Any, last_page_len: Any, page_size: int) -> None:
        """Convert the page table to rows, and compute the lengths."""
        starts, pages, last = (x.cpu().numpy() for x in (indptr, indices, last_page_len))
        counts = np.diff(starts)
        if len(starts) != len(last) + 1 or (counts < 0).any() or (len(starts) and starts[-1] > len(pages)):
            raise ValueError(
                f"indptr must have {len(last) + 1} entries, one more than last_page_len, and never decrease up to "
                f"{len(pages)}, the length of indices, got {starts.tolist()}"
            )
        has_pages = counts > 0
        if ((last < 1) | (last > page_size))[has_pages].any():
            raise ValueError(f"last_page_len must be in 1..page_size = 1..{page_size}, got {last.tolist()}")
        tables = np.zeros((len(counts), max(int(counts.max(initial=0)), 1)), np.int32)
        tables[np.arange(tables.shape[1]) < counts[:, None]] = pages[starts[0] : starts[-1]]
        lens = np.where(has_pages, (counts - 1) * page_size + last, 0).astype(np.int32)
        self._max_seq_len = int(lens.max(initial=0))
        self._tables: Any = tables if self.device.type == "cpu" else torch.from_numpy(tables).to(self.device)
        self._lens: Any = lens if self.device.type == "cpu" else torch.from_numpy(lens).to(self.device)
        self._lens_on_host, self._page_size = lens, page_size
        self._prepared: dict[Any, Any] = {}

    def _set_types(self, q_data_type: Any, kv_data_type: Any, o_data_type: Any) -> None:
        self._q_dtype = _dtype("q_data_type", q_data_type)
        self._kv_dtype = self._q_dtype if kv_data_type is None else _dtype("kv_data_type", kv_data_type)
        if o_data_type is not None and _dtype("o_data_type", o_data_type) != self._q_dtype:
            raise ValueError(f"o_data_type must be {self._q_dtype}, that of q, got {o_data_type}")

    def _set_options(self, sizes: tuple[int, int, int], window_left: int, soft_cap: Any, sm_scale: Any) -> None:
        self._num_qo_heads, self._num_kv_heads, self._head_dim = sizes
        self._window_left, self._softcap = window_left, soft_cap or None
        self._scale = self._head_dim**-0.5 if sm_scale is None else sm_scale

    @between_graphs
    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
    ) -> Any:
        """Compute attention as planned.

        Parameters
        ----------
        q : (tokens, num_qo_heads, head_dim) tensor
        paged_kv_cache : tensor or pair of tensors
        q_scale, k_scale, v_scale : float, optional
            The first two multiply `sm_scale`, the last one the output.
        out : tensor like q, optional
        lse : (tokens, num_qo_heads) float32 tensor, optional
            Where to write the LSE.
        return_lse : bool
            Also return the LSE, base 2.
        enable_pdl
            No result depends on it.
        window_left : int, optional
            The planned one.
        sinks : (num_qo_heads,) float32 tensor, optional

        Returns
        -------
        tensor, or (tensor, lse)

        Raises
        ------
        RuntimeError
            `plan` was not called.
        TypeError, ValueError, IndexError
            As in `pagedkv.decode_attention` and `pagedkv.prefill_attention`, and for tensors that are not as planned.
        """
        if args:
            raise ValueError("run takes q and paged_kv_cache by position; what follows them is for jit_args")
        if not self._planned:
            raise RuntimeError("call plan before run")
        if q.dtype != self._q_dtype:
            raise ValueError(f"q must have dtype {self._q_dtype}, which was planned, got {q.dtype}")
        if q.dim() != 3 or q.shape[1:] != (self._num_qo_heads, self._head_dim):
            raise ValueError(
                f"q must have shape (tokens, {self._num_qo_heads}, {self._head_dim}), as planned, got {tuple(q.shape)}"
            )
        if window_left is not None and window_left != self._window_left:
            raise ValueError(f"window_left must be {self._window_left}, which was planned, got {window_left}")
        caches, stored = self._caches(paged_kv_cache)
        q_scale, k_scale, v_scale = (1.0 if x is None else float(x) for x in (q_scale, k_scale, v_scale))
        stored |= {"layout": self._layout, "max_seq_len": self._max_seq_len}
        options = {
            **self._masks,
            "scale": self._scale * q_scale * k_scale,
            "softcap": self._softcap,
            "window": self._window_left + 1 if self._window_left >= 0 else None,
        }
        if sinks is not None:
            options["sinks"] = sinks
        where = {"block_tables": self._tables, "seq_lens": self._lens, **self._starts}
        operation: Any = prefill_attention if self._starts else decode_attention
        result, logs = None, None
        if out is None and not return_lse:
            key = tuple((x.shape, x.stride(), x.dtype) for x in caches)
            k_cache, v_cache = (host_view(x) for x in caches)
            result = attend(operation, self._prepared, key, q, k_cache, v_cache, where, stored, options)
        else:
            result = operation(q, *caches, **where, **stored, **options, out=out, return_lse=return_lse)
            result, logs = result if return_lse else (result, None)
        if v_scale != 1.0:
            result.mul_(v_scale)
        if not return_lse:
            return result
        assert logs is not None
        logs.div_(LN2)
        return result, logs if lse is None else lse.copy_(logs)

    def run_return_lse(self, q: Any, paged_kv_cache: Any, **options: Any) -> Any:
        """Call `run` with ``return_lse=True``."""
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    forward = run

    def _caches(self, paged_kv_cache: Any) -> tuple[list[Any], dict[str, Any]]:
        """The K and V caches, and the options that say how they are stored."""
        caches = paged_kv_cache if isinstance(paged_kv_cache, tuple) else paged_kv_cache.unbind(1)
        page_size = caches[0].shape[1 if self._layout == "NHD" else 2]
        if page_size != self._page_size or caches[0].dtype != self._kv_dtype:
            raise ValueError(
                f"paged_kv_cache must have pages of {self._page_size} tokens of {self._kv_dtype}, as planned, "
                f"got {page_size} of {caches[0].dtype}"
            )
        if (kv_dtype := _FLOAT8.get(self._kv_dtype)) is None:
            return list(caches), {}
        return [x.view(torch.uint8) for x in caches], {"kv_dtype": kv_dtype}


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Computes attention of one token per request, or of `q_len_per_req`, over a paged KV cache.

    Parameters
    ----------
    float_workspace_buffer : tensor
        Says on which device calls run; its memory is not used.
    kv_layout : {"NHD", "HND"}
    use_cuda_graph : bool
        Must be False.
    **hints
        use_tensor_cores, buffers and backends of the original, on which no result depends. `jit_args` are refused.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import flashinfer
    >>> wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8))
    >>> indptr, indices, last = (torch.tensor(x).int() for x in ([0, 2], [3, 1], [4]))
    >>> wrapper.plan(indptr, indices, last, 8, 2, 64, 16, q_data_type=torch.float32)
    >>> wrapper.run(torch.ones(1, 8, 64), torch.ones(4, 2, 16, 2, 64)).shape
    torch.Size([1, 8, 64])
    """

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        window_right: int = 0,
        q_len_per_req: int = 1,
    ) -> None:
        """Set what the next calls of `run` have in common.

        Parameters
        ----------
        indptr : (batch_size + 1,) int32 tensor
        indices : (n,) int32 tensor
        last_page_len : (batch_size,) int32 tensor
            1 to page_size.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
        pos_encoding_mode : str
            Must be "NONE": rotate queries and keys beforehand.
        window_left : int
            Keys before its own that a token sees; -1: all.
        logits_soft_cap : float, optional
        q_data_type, kv_data_type, o_data_type, data_type : torch.dtype or str
            `data_type` is that of both.
        sm_scale : float, optional
            ``1 / sqrt(head_dim)`` if None.
        rope_scale, rope_theta, non_blocking, block_tables, seq_lens, fixed_split_size, disable_split_kv
            No result depends on them.
        window_right : int
            0, or -1: there is no later key.
        q_len_per_req : int
            Tokens of each request in q, the last ones of it, causal.

        Raises
        ------
        ValueError
            An argument is wrong, or pagedkv does not support it.
        """
        _require_plain(pos_encoding_mode)
        if window_right > 0 or q_len_per_req < 1:
            raise ValueError(
                f"window_right must be 0 or -1, and q_len_per_req at least 1, got {window_right} and {q_len_per_req}"
            )
        self._planned = False
        self._set_types(q_data_type if data_type is None else data_type, kv_data_type or data_type, o_data_type)
        self._set_tables(indptr, indices, last_page_len, page_size)
        self._set_options((num_qo_heads, num_kv_heads, head_dim), window_left, logits_soft_cap, sm_scale)
        if q_len_per_req > 1 and (self._lens_on_host < q_len_per_req).any():
            raise ValueError(
                f"every request must have at least q_len_per_req = {q_len_per_req} tokens, "
                f"got {self._lens_on_host.tolist()}"
            )
        starts = np.arange(len(self._lens_on_host) + 1, dtype=np.int32) * np.int32(q_len_per_req)
        on_device = starts if self.device.type == "cpu" else torch.from_numpy(starts).to(self.device)
        self._starts = {} if q_len_per_req == 1 else {"query_starts": on_device}
        self._masks = {}
        self._planned = True

    begin_forward = plan


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Computes attention of the last tokens of each request over a paged KV cache.

    Parameters are those of `BatchDecodeWithPagedKVCacheWrapper`.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import flashinfer
    >>> wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8))
    >>> rows, indptr, indices, last = (torch.tensor(x).int() for x in ([0, 5], [0, 2], [3, 1], [4]))
    >>> wrapper.plan(rows, indptr, indices, last, 8, 2, 64, 16, causal=True, q_data_type=torch.float32)
    >>> wrapper.run(torch.ones(5, 8, 64), torch.ones(4, 2, 16, 2, 64)).shape
    torch.Size([5, 8, 64])
    """

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        **refused: Any,
    ) -> None:
        """Set what the next calls of `run` have in common.

        Parameters
        ----------
        qo_indptr : (batch_size + 1,) int32 tensor
            Where the tokens of each request begin in q.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, page_size
            As in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        head_dim_qk, head_dim_vo : int
            The same.
        custom_mask : (n,) bool tensor, optional
            The (tokens, keys) booleans of each request, flattened; replaces `causal`.
        packed_custom_mask : (n,) uint8 tensor, optional
            The same as bits, with a new byte for each request; replaces `custom_mask`.
        causal : bool
        use_fp16_qk_reduction, rope_scale, rope_theta, non_blocking
            Ignored, since no result depends on them: sums are float32.
        pos_encoding_mode, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type, o_data_type
            As in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        **refused
            Other arguments of the original: hints for its backends are ignored, multi-item scoring is refused.

        Raises
        ------
        ValueError
            An argument is wrong, or pagedkv does not support it.
        """
        _require_plain(pos_encoding_mode)
        for name, value in refused.items():
            if name not in _HINTS | _OF_ITEMS:
                raise TypeError(f"there is no argument {name} of plan in FlashInfer")
            if name in _OF_ITEMS and (isinstance(value, torch.Tensor) or value not in (None, 0)):
                raise ValueError(f"{name} must not be given: pagedkv has no multi-item scoring; use custom_mask")
        if head_dim_vo not in (None, head_dim_qk):
            raise ValueError(f"head_dim_vo must be head_dim_qk = {head_dim_qk}, got {head_dim_vo}")
        self._planned = False
        self._set_types(q_data_type, kv_data_type, o_data_type)
        self._set_tables(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._set_options((num_qo_heads, num_kv_heads, head_dim_qk), window_left, logits_soft_cap, sm_scale)
        mask = custom_mask if packed_custom_mask is None else packed_custom_mask
        self._masks = {"causal": causal} if mask is None else {"causal": False, "mask": mask.to(self.device)}
        starts = qo_indptr.to(self.device)
        self._starts = {"query_starts": starts if starts.is_cuda else starts.numpy()}
        self._planned = True

    begin_forward = plan


# More arguments of plan for prefill: those on which no result depends, and those of multi-item scoring.
_HINTS = {"seq_lens", "seq_lens_q", "block_tables", "max_token_per_sequence", "max_sequence_kv"}
_HINTS |= {"fixed_split_size", "disable_split_kv"}
_OF_ITEMS = {"prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr"}


@between_graphs
def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: Any = "NHD",
) -> None:
    """Write keys and values to the pages of their requests.

    Parameters
    ----------
    append_key, append_value : (n, num_kv_heads, head_dim) tensor
    batch_indices, positions : (n,) int32 tensor
        The request of each token, and its position there.
    paged_kv_cache : tensor or pair of tensors
    kv_indices, kv_indptr, kv_last_page_len : int32 tensor
        The page table, which already has the pages of the new tokens.
    kv_layout : {"NHD", "HND"}

    Raises
    ------
    TypeError, ValueError, IndexError
        As in `pagedkv.write_kv`.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import flashinfer
    >>> cache, k = torch.zeros(4, 2, 16, 2, 64), torch.ones(1, 2, 64)
    >>> request, position, indices, indptr, last = (torch.tensor(x).int() for x in ([0], [17], [3, 1], [0, 2], [2]))
    >>> flashinfer.append_paged_kv_cache(k, k, request, position, cache, indices, indptr, last)
    >>> bool((cache[1, :, 1] == 1).all())
    True
    """
    caches = paged_kv_cache if isinstance(paged_kv_cache, tuple) else paged_kv_cache.unbind(1)
    page_size = caches[0].shape[1 if kv_layout == "NHD" else 2]
    at = kv_indptr[batch_indices.long()] + positions // page_size
    slots = kv_indices[at.long()].long() * page_size + positions % page_size
    kv_dtype: Any = _FLOAT8.get(caches[0].dtype)
    if kv_dtype is not None:
        caches = [x.view(torch.uint8) for x in caches]
    k_cache, v_cache = caches
    write_kv(append_key, append_value, k_cache, v_cache, slots, layout=kv_layout, kv_dtype=kv_dtype)


@between_graphs
def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[Any, Any]:
    """Merge the results of attention over two disjoint sets of keys.

    Parameters
    ----------
    v_a, v_b : (tokens, num_heads, head_dim) tensor
    s_a, s_b : (tokens, num_heads) float32 tensor
        LSEs, base 2.

    Returns
    -------
    v : (tokens, num_heads, head_dim) tensor
    s : (tokens, num_heads) float32 tensor
        The LSE, base 2.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import flashinfer
    >>> one, three, lse = torch.ones(1, 1, 8), 3 * torch.ones(1, 1, 8), torch.zeros(1, 1)
    >>> v, s = flashinfer.merge_state(one, lse, three, lse)
    >>> v[0, 0, 0], s
    (tensor(2.), tensor([[1.]]))
    """
    out, lse = attention.merge_states([v_a, v_b], [s_a * LN2, s_b * LN2])
    return out, lse.div_(LN2)


@between_graphs
def merge_states(v: Any, s: Any) -> tuple[Any, Any]:
    """Merge the results of attention over several disjoint sets of keys.

    Parameters
    ----------
    v : (tokens, num_states, num_heads, head_dim) tensor
    s : (tokens, num_states, num_heads) float32 tensor
        LSEs, base 2.

    Returns
    -------
    v, s
        As in `merge_state`.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import flashinfer
    >>> v = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1).expand(1, 2, 1, 8)
    >>> merged, s = flashinfer.merge_states(v.contiguous(), torch.zeros(1, 2, 1))
    >>> merged[0, 0, 0], s
    (tensor(2.), tensor([[1.]]))
    """
    out, lse = attention.merge_states(list(v.unbind(1)), list((s * LN2).unbind(1)))
    return out, lse.div_(LN2)


def _dtype(name: str, given: Any) -> Any:
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} must be a torch.dtype or its name, got {given!r}")
    return dtype


def _require_plain(pos_encoding_mode: str) -> None:
    if pos_encoding_mode != "NONE":
        raise ValueError(
            f'pos_encoding_mode must be "NONE", got {pos_encoding_mode!r}: rotate with pagedkv.apply_rotary before, '
            "or pass alibi_slopes to pagedkv.prefill_attention"
        )
