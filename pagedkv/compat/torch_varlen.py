"""torch's own paged attention, ``torch.nn.attention.varlen``, on tensors on the host, where torch itself has no kernel.

`varlen_attn` calls an operator of torch's flash attention, for which `register` brings a CPU kernel. The operators are
private to torch: `register` refuses releases in which nobody tried them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..operations.attention import prefill_attention
from .arguments import as_int32, in_words
from .names import missing_names
from .ragged import as_blocks, behind_padding

OLDEST, BEFORE = (2, 13), (2, 15)
_WORDS = {
    **{"q": "query", "k_cache": "key", "v_cache": "value", "block_tables": "block_table"},
    **{"query_starts": "cu_seq_q", "seq_lens": "seqused_k or cu_seq_k"},
}


def register() -> None:
    """Let ``varlen_attn`` and ``varlen_attn_out`` of torch run on tensors on the host; a second call does nothing.

    Paged (``block_table`` and ``seqused_k``, pages of any size) and not, in float32, float16 and bfloat16. There is no
    backward pass. Tensors on other devices go where they went before.

    Raises
    ------
    ImportError
        The version of torch is none of those whose operators are known here.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.attention.varlen import varlen_attn
    >>> from pagedkv.compat import torch_varlen
    >>> torch_varlen.register()
    >>> q, starts = torch.randn(7, 4, 64), torch.tensor([0, 5, 7]).int()
    >>> varlen_attn(q, q, q, starts, starts, 5, 5, window_size=(-1, 0)).shape
    torch.Size([7, 4, 64])
    """
    require_torch(torch.__version__)
    _library()


def require_torch(version: str) -> None:
    """Raise ImportError unless the operators of this version of torch are known."""
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) < BEFORE:
        oldest, before = ("{}.{}".format(*bound) for bound in (OLDEST, BEFORE))
        raise ImportError(
            f"torch must be at least {oldest} and below {before} for compat.torch_varlen, which serves private "
            f"operators of torch, got {version}: call pagedkv.prefill_attention"
        )


@cache
def _library() -> torch.library.Library:
    """Register the kernels, which last as long as the returned object."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", _forward)
    library.impl("_flash_attention_forward_no_dropout_inplace", _forward_into)
    library.impl("_flash_attention_backward", _backward)
    return library


def _forward(query: Any, *args: Any, **options: Any) -> tuple[Any, Any, Any, Any, Any]:
    """(out, LSE, and what a backward pass and a debugger of dropout would ask for)."""
    out, lse = _attend(query, *args, **options)
    state = torch.empty(2, dtype=torch.uint64)
    return out, lse, state, torch.empty((), dtype=torch.uint64), query.new_empty(0)


def _forward_into(out: Any, *args: Any, **options: Any) -> Any:
    return _attend(*args, **options, out=out)[1]


@in_words(_WORDS, ("query", "key", "value"))
def _attend(
    query: Any,
    key: Any,
    value: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
    out: Any = None,
) -> tuple[Any, Any]:
    """out (T, Hq, D), and the LSE (Hq, T).

    max_q, max_k and num_splits are hints for a kernel on a GPU: no result depends on them.
    """
    if cum_seq_q is None:
        raise ValueError("cu_seq_q must be an int32 tensor, got None: only ragged batches are served here")
    if dropout_p or return_debug_mask or alibi_slopes is not None:
        raise ValueError(
            "dropout_p, return_debug_mask and alibi_slopes are not served here: varlen_attn has none of them"
        )
    cum_seq_q, cum_seq_k, seqused_k = (
        None if x is None else as_int32(name, x, (None,))
        for name, x in (("cu_seq_q", cum_seq_q), ("cu_seq_k", cum_seq_k), ("seqused_k", seqused_k))
    )
    if block_table is None:
        key, value, block_table, lens = as_blocks(key, value, cum_seq_k, seqused_k, "cu_seq_k")
    elif seqused_k is None:
        raise ValueError("seqused_k must say how many tokens each sequence has where block_table is given, got None")
    else:
        lens = seqused_k
    # torch says is_causal for the tuple (-1, 0) alone, but passes the window as it is.
    left = -1 if window_size_left is None else window_size_left
    right = 0 if is_causal else -1 if window_size_right is None else window_size_right
    window = {"window": None if left < 0 else left + 1, "window_right": None if right < 0 else right}
    options: dict[str, Any] = {"scale": scale, "causal": False, **window, "out": out, "return_lse": True}
    try:
        result, lse = prefill_attention(query, key, value, block_table, lens, cum_seq_q, **options)
    except ValueError:
        # More queries than keys are refused, if nothing else is wrong. To look for them first takes 10 us of each call.
        query_lens = cum_seq_q.diff().numpy()
        if query_lens.shape != lens.shape or not (query_lens > lens.numpy()).any():
            raise
        name = "cu_seq_k" if seqused_k is None else "seqused_k"
        arrays = block_table.numpy(), lens.numpy(), query_lens
        block_table, lens, options["leftpad"] = behind_padding(*arrays, len(query), key.shape[1], name)
        result, lse = prefill_attention(query, key, value, block_table, lens, cum_seq_q, **options)
    return result, torch.from_numpy(lse.numpy().T.copy())  # torch takes longer to transpose so few


def _backward(*args: Any, **options: Any) -> Any:
    raise NotImplementedError(
        "pagedkv computes no gradients: call varlen_attn under torch.no_grad() or torch.inference_mode()"
    )


if not TYPE_CHECKING:
    __getattr__ = missing_names(__name__, "after register() import varlen_attn from torch.nn.attention.varlen")
