"""Pages of caches: FlashInfer's append, and what its scripts compute for it."""

from __future__ import annotations

from typing import Any

import torch

from ...arrays import between_graphs
from ...memory.arguments import as_int
from ...operations.caches import write_kv
from ..arguments import as_int32, in_words, require_tensors
from ..ragged import never_decrease, require_starts

FLOAT8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Compute how many tokens each request has, (batch_size,), from its pages.

    Parameters
    ----------
    kv_indptr : (batch_size + 1,) int32 tensor
    kv_last_page_len : (batch_size,) int32 tensor
    page_size : int

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import flashinfer
    >>> flashinfer.get_seq_lens(torch.tensor([0, 3, 4]).int(), torch.tensor([13, 8]).int(), 16)
    tensor([45,  8], dtype=torch.int32)
    """
    kv_last_page_len = as_int32("kv_last_page_len", kv_last_page_len, (None,))
    kv_indptr = as_int32("kv_indptr", kv_indptr, (len(kv_last_page_len) + 1,))
    page_size = as_int("page_size", page_size, minimum=1, maximum=2**31 - 1)
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(append_indptr: Any, seq_lens: Any, nnz: int) -> tuple[Any, Any]:
    """Say of each of `nnz` appended tokens which request it belongs to, and its position there.

    Parameters
    ----------
    append_indptr : (batch_size + 1,) int32 tensor
        Where the new tokens of each request begin.
    seq_lens : (batch_size,) tensor of ints
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
    require_tensors(seq_lens=seq_lens)
    if seq_lens.dim() != 1 or seq_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"seq_lens must be (batch_size,) int32 or int64, got {tuple(seq_lens.shape)} of {seq_lens.dtype}"
        )
    append_indptr = as_int32("append_indptr", append_indptr, (len(seq_lens) + 1,))
    nnz = as_int("nnz", nnz)
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
    if append_key.dim() != 3:
        raise ValueError(f"append_key must have shape (n, num_kv_heads, head_dim), got {tuple(append_key.shape)}")
    batch_indices = as_int32("batch_indices", batch_indices, (len(append_key),))
    positions = as_int32("positions", positions, (len(append_key),))
    kv_indices, kv_last_page_len = (
        as_int32(name, x, (None,)) for name, x in (("kv_indices", kv_indices), ("kv_last_page_len", kv_last_page_len))
    )
    kv_indptr = as_int32("kv_indptr", kv_indptr, (len(kv_last_page_len) + 1,))
    caches = unpack(paged_kv_cache)
    require_kv_layout(kv_layout)
    page_size = caches[0].shape[1 if kv_layout == "NHD" else 2]
    if not batch_indices.is_cuda:
        num_requests = len(kv_last_page_len)
        require_starts("kv_indptr", kv_indptr.numpy(), len(kv_indices), "pages of kv_indices")
        if bool(((batch_indices < 0) | (batch_indices >= num_requests)).any()):
            raise IndexError(f"batch_indices must be in 0..{num_requests - 1}, got {batch_indices.tolist()}")
        room = kv_indptr.diff()[batch_indices.long()] * page_size
        if bool(((positions < 0) | (positions >= room)).any()):
            raise IndexError(
                f"positions must be in the pages of their requests, below {room.tolist()}, got {positions.tolist()}"
            )
    at = kv_indptr[batch_indices.long()] + positions // page_size
    pages = kv_indices[at.long()]
    if not pages.is_cuda and bool((pages < 0).any()):
        raise IndexError(f"kv_indices must be pages of paged_kv_cache, from 0, got {pages.tolist()} for the new tokens")
    slots = pages.long() * page_size + positions % page_size
    kv_dtype: Any = FLOAT8.get(caches[0].dtype)
    if caches[1].dtype != caches[0].dtype:
        raise TypeError(f"paged_kv_cache must be of one dtype, got {caches[0].dtype} and {caches[1].dtype}")
    k_cache, v_cache = caches if kv_dtype is None else (x.view(torch.uint8) for x in caches)
    write_kv(append_key, append_value, k_cache, v_cache, slots, layout=kv_layout, kv_dtype=kv_dtype)


def require_kv_layout(kv_layout: Any) -> None:
    """Raise ValueError unless it is one of FlashInfer's."""
    if not isinstance(kv_layout, str) or kv_layout not in ("NHD", "HND"):
        raise ValueError(f'kv_layout must be "NHD" or "HND", got {kv_layout!r}')


def unpack(paged_kv_cache: Any) -> tuple[Any, Any]:
    """K and V."""
    for x in paged_kv_cache if isinstance(paged_kv_cache, tuple) else (paged_kv_cache,):
        if isinstance(x, torch.Tensor):
            require_tensors(paged_kv_cache=x)
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
