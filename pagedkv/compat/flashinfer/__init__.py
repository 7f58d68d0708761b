"""FlashInfer's wrappers of batches over a paged KV cache, and what its scripts call beside them.

``from pagedkv.compat import flashinfer`` in place of ``import flashinfer``. Page tables are CSR matrices: request i has
the pages ``indices[indptr[i]:indptr[i + 1]]``, the last of them with ``last_page_len[i]`` tokens. LSEs are base 2, of
shape (tokens, heads). A cache is one tensor (num_pages, 2, ...) or a pair (K, V) of tensors (num_pages, page_size,
num_kv_heads, head_dim), or (num_pages, num_kv_heads, page_size, head_dim) for "HND".
"""

from typing import TYPE_CHECKING

from ..names import missing_names
from .cascade import merge_state, merge_states
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from .prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_states",
]


if not TYPE_CHECKING:
    __getattr__ = missing_names(
        __name__,
        "plan a single request as a batch of one; flash_attn_varlen_func of pagedkv.compat.flash_attn takes keys "
        "without pages, and pagedkv.apply_rotary rotates",
    )
