"""Step: what the model computes next; Finished: what ended with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..memory.device.batch import Batch

Int64Array = npt.NDArray[np.int64]


class Finished(NamedTuple):
    """A request whose turn has ended.

    Attributes
    ----------
    request : int
        Its number.
    tokens : (num_new_tokens,) int32
        The tokens generated in this turn.
    reason : str
        "stop" after an end token, "length" after max_tokens.
    """

    request: int
    tokens: npt.NDArray[np.int32]
    reason: str


@dataclass(frozen=True, eq=False)
class Step:
    """One batch for the model, which mixes chunks of prompts with single generated tokens.

    Arrays belong to the cache's framework, except `requests`, `sampled` and `seqs`, which are NumPy arrays.

    Attributes
    ----------
    requests : (num_seqs,) int64
        The numbers of its requests, in the order of the batch.
    tokens : (num_tokens,) int64
        The ids of the tokens to compute, first those of the first request.
    slots : (num_tokens,) int64
        Where their K and V go, for `PagedKVCache.write` or `write_kv`. With several groups of layers (num_groups,
        num_tokens), for `PagedKVCache.write`, which takes those of its layer.
    batch : Batch
        Block tables, seq_lens, query_starts and positions, for `PagedKVCache.attend` or `prefill_attention`.
    logits_indices : (num_sampled,) int64
        The rows of the model's output, in 0..num_tokens-1, from which to choose a next token: the last row of each
        request whose tokens are all computed after this step.
    sampled : (num_sampled,) int64
        The requests of these rows.
    seqs : (num_seqs,) int64
        The handles of the sequences of `requests`, for `PagedKVCache.read_states` and `write_states`. A model reads the
        states, computes the step from them, and writes them before `update`.
    """

    requests: Int64Array
    tokens: Any
    slots: Any
    batch: Batch
    logits_indices: Any
    sampled: Int64Array
    seqs: Int64Array
    _lanes: Int64Array = field(repr=False)
    _counts: Int64Array = field(repr=False)
    _is_sampled: npt.NDArray[np.bool] = field(repr=False)
