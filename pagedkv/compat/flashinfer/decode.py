"""FlashInfer's wrapper of batch decode."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import numpy as np

from ...memory.arguments import as_int
from ...validation import require
from .wrapper import Wrapper, require_plain


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
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

    _HINTS = (
        *("use_tensor_cores", "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"),
        *("backend", "jit_args"),
    )

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
        q_data_type: Any = None,
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
            `data_type` is that of both, where the other two do not say another one; float16 without any.
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
        require_plain(pos_encoding_mode)
        q_len_per_req = as_int("q_len_per_req", q_len_per_req, maximum=2**31 - 1)
        if require.integer("window_right", window_right) > 0 or q_len_per_req < 1:
            raise ValueError(
                f"window_right must be 0 or -1, and q_len_per_req at least 1, got {window_right} and {q_len_per_req}"
            )
        self._planned = False
        q_type, kv_type = (data_type if x is None else x for x in (q_data_type, kv_data_type))
        self._set_types(q_type, kv_type, o_data_type)
        self._set_tables(indptr, indices, last_page_len, page_size)
        self._set_options((num_qo_heads, num_kv_heads, head_dim), window_left, logits_soft_cap, sm_scale)
        if q_len_per_req > 1 and (self._lens_on_host < q_len_per_req).any():
            raise ValueError(
                f"every request must have at least q_len_per_req = {q_len_per_req} tokens, "
                f"got {self._lens_on_host.tolist()}"
            )
        starts = np.arange(len(self._lens_on_host) + 1, dtype=np.int32) * np.int32(q_len_per_req)
        self._starts = {} if q_len_per_req == 1 else {"query_starts": self._on_device(starts)}
        self._num_rows = int(starts[-1])
        self._planned = True

    begin_forward = plan

    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        self._set_logits(window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)
