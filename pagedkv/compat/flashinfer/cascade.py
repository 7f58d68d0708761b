"""Merges of attention states by FlashInfer's names."""

from __future__ import annotations

import math
from typing import Any

from ...arrays import between_graphs
from ...operations import attention
from ..arguments import contiguous_rows, in_words, require_tensors

LN2 = math.log(2.0)


@between_graphs
@in_words({"outs[0]": "v_a", "outs[1]": "v_b"})
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
    require_tensors(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    if v_a.dim() != 3 or not v_a.shape == v_b.shape or not v_a.shape[:2] == s_a.shape == s_b.shape:
        raise ValueError(
            "v_a and v_b must have shape (tokens, num_heads, head_dim), s_a and s_b (tokens, num_heads), got "
            + ", ".join(str(tuple(x.shape)) for x in (v_a, v_b, s_a, s_b))
        )
    states = [contiguous_rows(v_a), contiguous_rows(v_b)]
    out, lse = attention.merge_states(states, [_natural("s_a", s_a), _natural("s_b", s_b)])
    return out, lse.div_(LN2)


@between_graphs
@in_words({"outs": "v"})
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
    require_tensors(v=v, s=s)
    if v.dim() != 4 or v.shape[:3] != s.shape or not v.shape[1]:
        raise ValueError(
            "v must have shape (tokens, num_states, num_heads, head_dim) with at least one state, and "
            f"s (tokens, num_states, num_heads), got {tuple(v.shape)} and {tuple(s.shape)}"
        )
    out, lse = attention.merge_states(list(contiguous_rows(v).unbind(1)), list(_natural("s", s).unbind(1)))
    return out, lse.div_(LN2)


def _natural(name: str, s: Any) -> Any:
    """LSEs of base e."""
    if not s.is_floating_point():
        raise TypeError(f"{name} must have dtype torch.float32, got {s.dtype}")
    return s.float() * LN2
