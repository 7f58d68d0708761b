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

    def last_logits(self, step: Step, rows: Int64Array | None) -> torch.Tensor:
        """Compute logits of the last rows of each request, (rows.sum(), vocab_size), as `last_logits` of results.

        NaN if any row of the request is not finite, or its state: neither must become findable.
        """
        self._changed, passes = [], []
        num_kept = np.ones(len(step.seqs), np.int64) if rows is None else rows
        with torch.inference_mode():
            starts = step.batch.query_starts.numpy(force=True)
            for length, of_pass in self._requests_of_passes(step, np.diff(starts)):
                passes.append((of_pass, self._run(step, length, of_pass, starts[of_pass], num_kept[of_pass])))
            owners = np.concatenate([of_pass.repeat(num_kept[of_pass]) for of_pass, _ in passes])
            order = torch.from_numpy(owners.argsort(kind="stable")).to(step.tokens.device)
            return torch.cat([logits for _, logits in passes])[order]

    def store_states(self) -> None:
        """Store the states behind the step whose logits were computed last."""
        for seqs, states in self._changed:
            self._kv.write_states(seqs, states)
        self._changed = []

    def _requests_of_passes(self, step: Step, counts: Int64Array) -> list[tuple[int, Int64Array]]:
        """The passes of a step: how many tokens of each request, and which requests."""
        kinds = np.stack([counts, self._kv.state_lens(step.seqs) > 0])
        return [
            (int(kind[0]), (kinds == kind[:, None]).all(axis=0).nonzero()[0]) for kind in np.unique(kinds, axis=1).T
        ]

    def _run(
        self, step: Step, length: int, of_pass: Int64Array, starts: Int64Array, num_kept: Int64Array
    ) -> torch.Tensor:
        seqs, most = step.seqs[of_pass], int(num_kept.max())
        columns = torch.from_numpy((starts[:, None] + np.arange(length)).ravel()).to(step.tokens.device)
        batch, states = self._kv.batch(seqs, length), self._kv.read_states(seqs)
        begin_states(self.layers, states, is_continued=bool(self._kv.state_lens(seqs[:1])[0]))
        watched = WatchedPass(self._kv, step.slots[..., columns], batch, self._attending)
        try:
            out = self._model(
                input_ids=step.tokens[columns].view(-1, length),
                position_ids=batch.positions.view(-1, length),
                use_cache=True,
                logits_to_keep=most,
                forward_pass=watched,
                **{self._name: self},
            )
        finally:
            begin_states(self.layers, {}, is_continued=False)
        finite = watched.are_finite().view(-1, length).all(dim=1)
        for of_all in states.values():
            finite &= of_all.isfinite().flatten(1).all(dim=1)
        self._changed.append((seqs, states))
        is_kept = torch.from_numpy(np.arange(most) >= most - num_kept[:, None]).to(finite.device)
        logits: torch.Tensor = out.logits[:, -most:].masked_fill(~finite[:, None, None], torch.nan)
        return logits[is_kept]
