"""Steps of a model whose layers have states: a pass for each length, since rows of a pass must not be packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ...cache import PagedKVCache
from ...scheduling import Step
from .attention import WatchedPass
from .cache_layers import begin_states, cache_layers
from .models import cache_name, kv_windows, uncompiled
from .running import PassCache

Int64Array = npt.NDArray[np.int64]


class HybridSteps(PassCache):
    """Computes the steps of an Engine for a model whose layers have states; the cache that the model gets.

    Most such layers read tokens in one row as one text. So requests with as many tokens in a step share a pass with a
    row for each, if all of them have a state, or none has. A pass changes copies of the states.

    Parameters
    ----------
    model : PreTrainedModel
    kv : PagedKVCache
        With the states of the model.
    """

    def __init__(self, model: PreTrainedModel, kv: PagedKVCache) -> None:
        super().__init__()
        self.layers = cache_layers(model, self)
        self._model, self._kv, self._attending = model, kv, kv_windows(model).layers
        self._name = cache_name(uncompiled(model))
        self._changed: list[tuple[Any, dict[str, torch.Tensor]]] = []

    def last_logits(self, step: Step) -> torch.Tensor:
        """Compute logits of the last row of each request, (num_seqs, vocab_size).

        NaN if any of its rows is not finite, or its state: neither must become findable.
        """
        self._changed, passes = [], []
        with torch.inference_mode():
            starts = step.batch.query_starts.numpy(force=True)
            for length, rows in self._rows_of_passes(step, np.diff(starts)):
                passes.append((rows, self._run(step, length, rows, starts[rows])))
            order = np.concatenate([rows for rows, _ in passes]).argsort()
            return torch.cat([logits for _, logits in passes])[torch.from_numpy(order).to(step.tokens.device)]

    def store_states(self) -> None:
        """Store the states behind the step whose logits were computed last."""
        for seqs, states in self._changed:
            self._kv.write_states(seqs, states)
        self._changed = []

    def _rows_of_passes(self, step: Step, counts: Int64Array) -> list[tuple[int, Int64Array]]:
        """The passes of a step: how many tokens of each request, and which requests."""
        kinds = np.stack([counts, self._kv.state_lens(step.seqs) > 0])
        return [
            (int(kind[0]), (kinds == kind[:, None]).all(axis=0).nonzero()[0]) for kind in np.unique(kinds, axis=1).T
        ]

    def _run(self, step: Step, length: int, rows: Int64Array, starts: Int64Array) -> torch.Tensor:
        seqs = step.seqs[rows]
        columns = torch.from_numpy((starts[:, None] + np.arange(length)).ravel()).to(step.tokens.device)
        batch, states = self._kv.batch(seqs, length), self._kv.read_states(seqs)
        begin_states(self.layers, states, is_continued=bool(self._kv.state_lens(seqs[:1])[0]))
        watched = WatchedPass(self._kv, step.slots[..., columns], batch, self._attending)
        try:
            out = self._model(
                input_ids=step.tokens[columns].view(-1, length),
                position_ids=batch.positions.view(-1, length),
                use_cache=True,
                logits_to_keep=1,
                forward_pass=watched,
                **{self._name: self},
            )
        finally:
            begin_states(self.layers, {}, is_continued=False)
        finite = watched.are_finite().view(-1, length).all(dim=1)
        for of_all in states.values():
            finite &= of_all.isfinite().flatten(1).all(dim=1)
        self._changed.append((seqs, states))
        logits: torch.Tensor = out.logits[:, -1]
        return logits.masked_fill(~finite[:, None], torch.nan)
