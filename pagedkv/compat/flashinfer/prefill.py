"""FlashInfer's wrapper of batch prefill, with masks."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import numpy as np
import torch

from ...memory.arguments import as_int
from ...validation import require
from ..arguments import as_int32, require_tensors
from ..ragged import never_decrease
from .wrapper import Wrapper, require_plain


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
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

    _prefix = "paged_kv_"
    _takes_windows = True
    _HINTS = (
        *("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"),
        *("custom_mask_buf", "mask_indptr_buf", "backend", "jit_args", "jit_kwargs"),
    )

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
        require_plain(pos_encoding_mode)
        for name, value in refused.items():
            if name not in _HINTS | _OF_ITEMS:
                raise TypeError(f"there is no argument {name} of plan in FlashInfer")
            if name in _OF_ITEMS and (isinstance(value, torch.Tensor) or value not in (None, 0)):
                raise ValueError(f"{name} must not be given: pagedkv has no multi-item scoring; use custom_mask")
        head_dim_qk = as_int("head_dim_qk", head_dim_qk, minimum=1)
        if head_dim_vo is not None and as_int("head_dim_vo", head_dim_vo) != head_dim_qk:
            raise ValueError(f"head_dim_vo must be head_dim_qk = {head_dim_qk}, got {head_dim_vo}")
        self._planned = False
        mask = None if custom_mask is None else _flat_mask("custom_mask", custom_mask, torch.bool)
        if packed_custom_mask is not None:
            mask = _flat_mask("packed_custom_mask", packed_custom_mask, torch.uint8)
        require.boolean("causal", causal)
        require_tensors(paged_kv_last_page_len=paged_kv_last_page_len)
        qo_indptr = as_int32("qo_indptr", qo_indptr, (paged_kv_last_page_len.numel() + 1,))
        self._set_types(q_data_type, kv_data_type, o_data_type)
        self._set_tables(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._set_options((num_qo_heads, num_kv_heads, head_dim_qk), window_left, logits_soft_cap, sm_scale)
        starts = qo_indptr.cpu().numpy().copy()
        query_lens, lens = np.diff(starts), self._lens_on_host
        if starts[0] != 0 or not never_decrease(starts):
            raise ValueError(f"qo_indptr must begin with 0 and never decrease, got {starts.tolist()}")
        self._num_rows, self._masks = int(starts[-1]), {"causal": causal}
        if mask is not None:
            self._masks = {"causal": False, "mask": mask.to(self.device)}
        if (query_lens > lens).any():
            if mask is not None or self.device.type != "cpu":
                raise ValueError(
                    "qo_indptr must give no request more tokens than it has keys, with a mask or on a GPU, "
                    f"got {query_lens.tolist()} for {lens.tolist()} keys"
                )
            self._query_lens = query_lens
        self._starts = {"query_starts": self._on_device(starts)}
        self._planned = True

    begin_forward = plan

    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """Plan other options than those of `plan`, and call `run`, as the original's older call does."""
        self._require_planned()
        require_plain(pos_encoding_mode)
        require.boolean("causal", causal)
        self._set_logits(window_left, logits_soft_cap, sm_scale)
        if "mask" not in self._masks:
            self._masks["causal"] = causal
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


# More arguments of plan for prefill: those on which no result depends, and those of multi-item scoring.
_HINTS = {"seq_lens", "seq_lens_q", "block_tables", "max_token_per_sequence", "max_sequence_kv"}
_HINTS |= {"fixed_split_size", "disable_split_kv"}
_OF_ITEMS = {"prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr"}


def _flat_mask(name: str, mask: Any, dtype: Any) -> Any:
    require_tensors(**{name: mask})
    if mask.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {mask.dtype}")
    return mask.reshape(-1).clone()  # what is planned stays, whatever the caller writes
