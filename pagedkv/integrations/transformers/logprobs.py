"""Log-probabilities of tokens, by what the model gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_MOST_LOGITS = 2**24  # at a time, whatever the length of a prompt: 64 MiB


class TokenLogprob(NamedTuple):
    """The log-probability of a token behind those before it.

    Attributes
    ----------
    token : int
    logprob : float
    top_logprobs : list of (int, float)
        The most probable tokens and their log-probabilities; of equal ones the smaller token first.
    """

    token: int
    logprob: float
    top_logprobs: list[tuple[int, float]]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of a token of each row, and of the most probable ones.

    Parameters
    ----------
    logits : (num_rows, vocab_size) tensor
    tokens : (num_rows,) ints
    num_top : int
        How many of the most probable tokens.
    """
    num_rows = max(1, _MOST_LOGITS // logits.shape[1])
    made: list[TokenLogprob] = []
    for start in range(0, len(tokens), num_rows):
        chosen = tokens[start : start + num_rows]
        rows = logits[start : start + num_rows].float().log_softmax(-1)
        at = torch.tensor(chosen, device=logits.device)
        values = rows.gather(-1, at[:, None].clamp(max=rows.shape[1] - 1))[:, 0]
        # Images, for example, may have ids that are never generated.
        values = values.masked_fill(at >= rows.shape[1], -torch.inf).tolist()
        made += map(TokenLogprob, chosen, values, _most_probable(rows, min(num_top, rows.shape[1])))
    return made


def _most_probable(rows: torch.Tensor, num_top: int) -> list[list[tuple[int, float]]]:
    """The most probable tokens of each row, of equal ones the smaller first, as argmax takes them: topk takes any."""
    if not num_top:
        return [[] for _ in range(len(rows))]
    least = rows.topk(num_top).values[:, -1:]
    owners, ids = (rows >= least).nonzero(as_tuple=True)
    values: npt.NDArray[Any] = rows[owners, ids].numpy(force=True)
    of_rows, of_ids = owners.numpy(force=True), ids.numpy(force=True)
    order = np.lexsort((of_ids, -values, of_rows))
    starts = np.searchsorted(of_rows, np.arange(len(rows)))
    places = order[(starts[:, None] + np.arange(num_top)).ravel()]
    pairs = list(zip(of_ids[places].tolist(), values[places].tolist(), strict=True))
    return [pairs[i : i + num_top] for i in range(0, len(pairs), num_top)]
