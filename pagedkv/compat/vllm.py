"""vLLM's operations on paged caches, in the argument order that kernels-community/paged-attention keeps.

``from pagedkv.compat import vllm as ops`` in place of ``from paged_attention import ...``, or of ``from vllm import
_custom_ops as ops`` of the releases that had them. Key caches are (num_blocks, num_kv_heads, head_dim / x, block_size,
x) with x = 16 / itemsize, value caches (num_blocks, num_kv_heads, head_dim, block_size).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..arrays import between_graphs
from ..memory.arguments import as_int
from ..operations import caches
from ..operations.attention import decode_attention
from .arguments import in_words, number, require_tensors, require_writable
from .names import missing_names

# What the strings of kv_cache_dtype are here.
KV_DTYPES = {"auto": None, "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
_WORDS = {
    **{"q": "query", "k_cache": "key_cache", "v_cache": "value_cache", "k": "key", "v": "value"},
    "slots": "slot_mapping",
}
_FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@between_graphs
@in_words(_WORDS, ("query", "key_cache", "value_cache"))
def paged_attention_v1(
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    scale: float,
    block_tables: Any,
    seq_lens: Any,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Compute attention of one token per sequence over paged keys and values into `out`.

    Parameters
    ----------
    out, query : (num_seqs, num_heads, head_dim) tensor
    key_cache, value_cache : tensor
        In the layout of the module; of query's dtype, or uint8 for fp8.
    num_kv_heads, block_size : int
        As in the caches.
    scale : float
        Factor of ``q . k``.
    block_tables : (num_seqs, max_blocks) int32 tensor
    seq_lens : (num_seqs,) int32 tensor
    max_seq_len : int
        A bound that no length exceeds.
    alibi_slopes : (num_heads,) float32 tensor or None
    kv_cache_dtype : {"auto", "fp8", "fp8_e4m3", "fp8_e5m2"}
        "fp8" is e4m3.
    k_scale, v_scale : float, or float32 tensor
        value = code * scale; a tensor has one element, or one for each KV head.
    tp_rank, blocksparse_...
        Options of block-sparse attention, which is refused: they must have their defaults, `tp_rank` may be any.

    Raises
    ------
    TypeError, ValueError, IndexError
        As from `pagedkv.decode_attention`; sizes differ from those of the caches; block-sparse attention.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import vllm as ops
    >>> k_cache, v_cache = torch.ones(4, 2, 16, 8, 4), torch.ones(4, 2, 64, 8)
    >>> query, out = torch.ones(1, 8, 64), torch.empty(1, 8, 64)
    >>> tables, lens = torch.tensor([[3, 1]]).int(), torch.tensor([12]).int()
    >>> ops.paged_attention_v1(out, query, k_cache, v_cache, 2, 0.125, tables, lens, 8, 12, None, "auto", 1.0, 1.0)
    >>> bool((out == 1).all())
    True
    """
    sparse = blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step
    _attend(
        "v1", out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len,
        alibi_slopes, kv_cache_dtype, k_scale, v_scale, sparse,
    )  # fmt: skip


@between_graphs
@in_words(_WORDS, ("query", "key_cache", "value_cache"))
def paged_attention_v2(
    out: Any,
    exp_sum: Any,
    max_logits: Any,
    tmp_out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    scale: float,
    block_tables: Any,
    seq_lens: Any,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """As `paged_attention_v1`, with the keys of a sequence split over thread blocks.

    Parameters
    ----------
    exp_sum, max_logits, tmp_out
        Scratch memory of the original, which is not used.
    out, query, ...
        As in `paged_attention_v1`.

    Raises
    ------
    TypeError, ValueError, IndexError
        As from `paged_attention_v1`.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import vllm as ops
    >>> caches = torch.ones(4, 2, 16, 8, 4), torch.ones(4, 2, 64, 8)
    >>> query, out = torch.ones(1, 8, 64), torch.empty(1, 8, 64)
    >>> scratch = torch.empty(1, 8, 1), torch.empty(1, 8, 1), torch.empty(1, 8, 1, 64)
    >>> tables, lens = torch.tensor([[3, 1]]).int(), torch.tensor([12]).int()
    >>> ops.paged_attention_v2(out, *scratch, query, *caches, 2, 0.125, tables, lens, 8, 12, None, "auto", 1.0, 1.0)
    >>> bool((out == 1).all())
    True
    """
    sparse = blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step
    _attend(
        "v2", out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len,
        alibi_slopes, kv_cache_dtype, k_scale, v_scale, sparse,
    )  # fmt: skip


@between_graphs
@in_words(_WORDS, ("key", "value", "key_cache", "value_cache"))
def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Write keys and values to their slots of caches in the layout of the module.

    Parameters
    ----------
    key, value : (num_tokens, num_kv_heads, head_dim) tensor
        As many tokens as `slot_mapping` has; more of them are padding.
    key_cache, value_cache : tensor
    slot_mapping : (n,) int64 tensor
        ``block * block_size + offset``; tokens with a negative one are skipped.
    kv_cache_dtype, k_scale, v_scale
        As in `paged_attention_v1`; code = value / scale, saturated at the largest one.

    Raises
    ------
    TypeError, ValueError, IndexError
        As from `pagedkv.write_kv`.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import vllm as ops
    >>> key = value = torch.ones(2, 1, 8)
    >>> key_cache, value_cache = torch.zeros(4, 1, 2, 8, 4), torch.zeros(4, 1, 8, 8)
    >>> ops.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([7, 8]), "auto", 1.0, 1.0)
    >>> value_cache[:, 0, 0].nonzero()  # block and offset of each token
    tensor([[0, 7],
            [1, 0]])
    """
    _write(key, value, key_cache, value_cache, slot_mapping, "vllm", kv_cache_dtype, k_scale, v_scale)


@between_graphs
@in_words(_WORDS, ("key", "value", "key_cache", "value_cache"))
def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """As `reshape_and_cache`, for caches (num_blocks, block_size, num_kv_heads, head_dim).

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import vllm as ops
    >>> key = value = torch.ones(2, 1, 8)
    >>> key_cache, value_cache = torch.zeros(2, 4, 8, 1, 8)
    >>> ops.reshape_and_cache_flash(key, value, key_cache, value_cache, torch.tensor([7, 8]), "auto", 1.0, 1.0)
    >>> value_cache[:, :, 0, 0].nonzero()  # block and offset of each token
    tensor([[0, 7],
            [1, 0]])
    """
    _write(key, value, key_cache, value_cache, slot_mapping, "NHD", kv_cache_dtype, k_scale, v_scale)


@in_words({"k_cache": "key_caches", "v_cache": "value_caches", "pairs": "block_mapping"})
def copy_blocks(key_caches: list[Any], value_caches: list[Any], block_mapping: Any) -> None:
    """Copy blocks within all caches of all layers.

    Parameters
    ----------
    key_caches, value_caches : list of tensor
    block_mapping : (n, 2) int64 tensor
        (source, destination).

    Raises
    ------
    TypeError, ValueError, IndexError
        As from `pagedkv.copy_blocks`.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import vllm as ops
    >>> key_caches, value_caches = [torch.zeros(4, 1, 2, 8, 4)], [torch.zeros(4, 1, 8, 8)]
    >>> value_caches[0][0] = 1
    >>> ops.copy_blocks(key_caches, value_caches, torch.tensor([[0, 3]]))
    >>> value_caches[0][:, 0, 0, 0]
    tensor([1., 0., 0., 1.])
    """
    caches.copy_blocks(key_caches, value_caches, block_mapping)


@in_words({"source": "src", "destination": "dst", "pairs": "block_mapping"})
def swap_blocks(src: Any, dst: Any, block_mapping: Any) -> None:
    """Copy blocks from one cache to another; one may be on the host and one on a device.

    Parameters
    ----------
    src, dst : tensor
    block_mapping : (n, 2) int64 tensor
        (source, destination).

    Raises
    ------
    TypeError, ValueError, IndexError
        As from `pagedkv.swap_blocks`.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import vllm as ops
    >>> cache, swapped = torch.ones(4, 1, 8, 8), torch.zeros(2, 1, 8, 8)
    >>> ops.swap_blocks(cache, swapped, torch.tensor([[3, 0]]))
    >>> swapped[:, 0, 0, 0]
    tensor([1., 0.])
    """
    caches.swap_blocks(src, dst, block_mapping)


def convert_fp8(output: Any, input: Any, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """Convert a cache to or from fp8; the tensor of dtype uint8 has the codes.

    Parameters
    ----------
    output : tensor
        Written: codes of ``input / scale``, saturated, or ``code * scale``.
    input : tensor
        Of output's shape.
    scale : float
    kv_dtype : {"fp8", "fp8_e4m3", "fp8_e5m2"}

    Raises
    ------
    ValueError
        None or both of the tensors are uint8, their shapes differ, or kv_dtype is unknown.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.compat import vllm as ops
    >>> codes, back = torch.zeros(2, dtype=torch.uint8), torch.zeros(2)
    >>> ops.convert_fp8(codes, torch.tensor([1.0, 1000.0]))
    >>> ops.convert_fp8(back, codes)
    >>> back  # the largest value of fp8_e4m3 is 448
    tensor([  1., 448.])
    """
    float8 = _FLOAT8[_kv_dtype("kv_dtype", kv_dtype, with_auto=False)]
    require_tensors(output=output, input=input)
    scale = number("scale", scale, positive=True)
    wide = input if output.dtype == torch.uint8 else output
    one_is_fp8 = (output.dtype == torch.uint8) != (input.dtype == torch.uint8)
    if not one_is_fp8 or not wide.is_floating_point() or output.shape != input.shape:
        raise ValueError(
            "output and input must have one shape, and one of them dtype torch.uint8, the other one a float dtype, "
            f"got {output.dtype} of {tuple(output.shape)} and {input.dtype} of {tuple(input.shape)}"
        )
    require_writable("output", output)
    if output.dtype == torch.uint8:
        most = torch.finfo(float8).max
        output.detach().copy_((input.float() / scale).clamp(-most, most).to(float8).view(torch.uint8))
    else:
        output.detach().copy_(input.contiguous().view(float8).float() * scale)


def _attend(
    kernel: Any,
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    scale: float,
    block_tables: Any,
    seq_lens: Any,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    sparse: tuple[int, int, int, int],
) -> None:
    if not all(isinstance(x, int) for x in sparse) or sparse != (0, 0, 64, 0):
        raise ValueError(
            "blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size and "
            f"blocksparse_head_sliding_step must be 0, 0, 64 and 0, got {sparse}: pagedkv has no block-sparse attention"
        )
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor, which is written, got {type(out).__name__}")
    if not isinstance(num_kv_heads, int):
        raise TypeError(
            f"num_kv_heads must be an int, got {type(num_kv_heads).__name__}: the KV head of each query head follows"
        )
    block_size = as_int("block_size", block_size)
    if key_cache.dim() != 5:
        raise ValueError(
            "key_cache must have shape (num_blocks, num_kv_heads, head_dim / x, block_size, x) with x = 16 / itemsize, "
            f"got {tuple(key_cache.shape)}: reshape it"
        )
    if (num_kv_heads, block_size) != (key_cache.shape[1], key_cache.shape[3]):
        raise ValueError(
            f"num_kv_heads and block_size must be {key_cache.shape[1]} and {key_cache.shape[3]}, those of key_cache, "
            f"got {num_kv_heads} and {block_size}"
        )
    decode_attention(
        query, key_cache, value_cache, block_tables, seq_lens, max_seq_len=max_seq_len, scale=number("scale", scale),
        kernel=kernel, alibi_slopes=alibi_slopes, out=out, layout="vllm",
        **_stored(num_kv_heads, kv_cache_dtype, k_scale, v_scale),
    )  # fmt: skip


def _write(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    layout: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    if key.dim() != 3 or value.dim() != 3 or getattr(slot_mapping, "ndim", None) != 1:
        raise ValueError(
            "key and value must have shape (num_tokens, num_kv_heads, head_dim), and slot_mapping (n,), got "
            + ", ".join(str(tuple(getattr(x, "shape", ()))) for x in (key, value, slot_mapping))
        )
    num_tokens, stored = len(slot_mapping), _stored(key.shape[1], kv_cache_dtype, k_scale, v_scale)
    caches.write_kv(key[:num_tokens], value[:num_tokens], key_cache, value_cache, slot_mapping, layout=layout, **stored)


def _stored(num_kv_heads: int, kv_cache_dtype: str, k_scale: Any, v_scale: Any) -> dict[str, Any]:
    """The options that say how caches are stored; without fp8 scales are ignored, as in the original."""
    kv_dtype = _kv_dtype("kv_cache_dtype", kv_cache_dtype)
    if kv_dtype is None:
        return {}
    return {
        "kv_dtype": kv_dtype,
        "k_scale": _scale("k_scale", k_scale, num_kv_heads),
        "v_scale": _scale("v_scale", v_scale, num_kv_heads),
    }


def _kv_dtype(name: str, given: str, *, with_auto: bool = True) -> Any:
    names = [x for x in KV_DTYPES if with_auto or x != "auto"]
    if not isinstance(given, str) or given not in names:
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {given!r}")
    return KV_DTYPES[given]


def _scale(name: str, scale: Any, num_kv_heads: int) -> Any:
    if not isinstance(scale, torch.Tensor):
        return scale
    require_tensors(**{name: scale})
    if scale.shape == (num_kv_heads,):
        return scale.contiguous()
    if scale.numel() != 1:
        raise ValueError(f"{name} must have one element, or one for each KV head, got {tuple(scale.shape)}")
    # An array with one for each KV head, because a number would have to be read from the device.
    return scale.reshape(1).expand(num_kv_heads).contiguous() if scale.is_cuda else float(scale)


if not TYPE_CHECKING:
    __getattr__ = missing_names(
        __name__,
        "pagedkv.merge_states and pagedkv.apply_rotary merge and rotate",
    )
