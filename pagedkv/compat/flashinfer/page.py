"""Pages of caches: FlashInfer's append, and what its scripts compute for it."""

from __future__ import annotations

from typing import Any

import torch

from ...arrays import between_graphs
from ...operations.caches import write_kv
from ..arguments import as_int32, in_words, require_tensors
from ..ragged import never_decrease

FLOAT8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Compute how many tokens each request has, (batch_size,), from its pages.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import flashinfer
    >>> flashinfer.get_seq_lens(torch.tensor([0, 3, 4]).int(), torch.tensor([13, 8]).int(), 16)
    tensor([45,  8], dtype=torch.int32)
    """
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(append_indptr: Any, seq_lens: Any, nnz: int) -> tuple[Any, Any]:
    """Say of each of `nnz` appended tokens which request it belongs to, and its position there.

    Parameters
    ----------
    append_indptr : (batch_size + 1,) int32 tensor
        Where the new tokens of each request begin.
    seq_lens : (batch_size,) tensor
        Tokens of each request, the new ones among them.
    nnz : int
        ``append_indptr[-1]``.

    Returns
    -------
    batch_indices, positions : (nnz,) int32 tensor

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import flashinfer
    >>> flashinfer.get_batch_indices_positions(torch.tensor([0, 1, 3]).int(), torch.tensor([5, 5]), 3)
    (tensor([0, 1, 1], dtype=torch.int32), tensor([4, 3, 4], dtype=torch.int32))
    """
    as_int32("append_indptr", append_indptr, (len(seq_lens) + 1,))
    starts = append_indptr.cpu().numpy()
    if starts[0] != 0 or not never_decrease(starts):
        raise ValueError(f"append_indptr must begin with 0 and never decrease, got {starts.tolist()}")
    if starts[-1] != nnz:
        raise ValueError(f"nnz must be {starts[-1]}, the tokens of append_indptr, got {nnz}")
    requests = torch.arange(len(seq_lens), dtype=torch.int32, device=append_indptr.device)
    batch_indices = requests.repeat_interleave(append_indptr.diff())
    shifts = seq_lens.to(append_indptr) - append_indptr[1:]
    positions = torch.arange(nnz, dtype=torch.int32, device=append_indptr.device) + shifts[batch_indices.long()]
    return batch_indices, positions


@between_graphs
@in_words(
    {"k": "append_key", "v": "append_value", "slots": "kv_indices", "k_cache": "paged_kv_cache", "layout": "kv_layout"}
)
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
    require_tensors(append_key=append_key, append_value=append_value)
    for name, x in (("batch_indices", batch_indices), ("positions", positions)):
        as_int32(name, x, (len(append_key),))
    for name, x in (("kv_indices", kv_indices), ("kv_indptr", kv_indptr), ("kv_last_page_len", kv_last_page_len)):
        as_int32(name, x, (None,))
    caches = unpack(paged_kv_cache)
    page_size = caches[0].shape[1 if kv_layout == "NHD" else 2]
    if not batch_indices.is_cuda:
        num_requests = len(kv_indptr) - 1
        if bool(((batch_indices < 0) | (batch_indices >= num_requests)).any()):
            raise IndexError(f"batch_indices must be in 0..{num_requests - 1}, got {batch_indices.tolist()}")
        room = kv_indptr.diff()[batch_indices.long()] * page_size
        if bool(((positions < 0) | (positions >= room)).any()):
            raise IndexError(
                f"positions must be in the pages of their requests, below {room.tolist()}, got {positions.tolist()}"
            )
    at = kv_indptr[batch_indices.long()] + positions // page_size
    slots = kv_indices[at.long()].long() * page_size + positions % page_size
    kv_dtype: Any = FLOAT8.get(caches[0].dtype)
    if caches[1].dtype != caches[0].dtype:
        raise TypeError(f"paged_kv_cache must be of one dtype, got {caches[0].dtype} and {caches[1].dtype}")
    k_cache, v_cache = caches if kv_dtype is None else (x.view(torch.uint8) for x in caches)
    write_kv(append_key, append_value, k_cache, v_cache, slots, layout=kv_layout, kv_dtype=kv_dtype)


def unpack(paged_kv_cache: Any) -> tuple[Any, Any]:
    """K and V."""
    if isinstance(paged_kv_cache, torch.Tensor) and paged_kv_cache.dim() == 5 and paged_kv_cache.shape[1] == 2:
        k_cache, v_cache = paged_kv_cache.unbind(1)
        return k_cache, v_cache
    is_pair = isinstance(paged_kv_cache, tuple) and len(paged_kv_cache) == 2
    if not is_pair or any(not isinstance(x, torch.Tensor) or x.dim() != 4 for x in paged_kv_cache):
        raise TypeError(
            "paged_kv_cache must be a tensor (num_pages, 2, ...) of 5 axes or a tuple (K, V) of 4 axes each"
        )
    k_cache, v_cache = paged_kv_cache
    return k_cache, v_cache
