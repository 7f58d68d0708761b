"""Merges of attention states by FlashInfer's names."""

from __future__ import annotations

import math
from typing import Any

from ...arrays import between_graphs
from ...operations import attention
from ..arguments import require_tensors

LN2 = math.log(2.0)


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
    require_tensors(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    out, lse = attention.merge_states([v_a, v_b], [s_a.float() * LN2, s_b.float() * LN2])
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
    require_tensors(v=v, s=s)
    out, lse = attention.merge_states(list(v.unbind(1)), list((s.float() * LN2).unbind(1)))
    return out, lse.div_(LN2)
