"""The results of a step: the logits of its requests, and the tokens that they get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedModel

from ...cache import PagedKVCache
from ...commit import Write
from ...scheduling import Step
from .attention import WatchedPass
from .request import EngineRequest
from .sampling import are_finite, choose

if TYPE_CHECKING:
    from .ranks import Ranks

NO_TOKEN = -1
NOT_FINITE = (
    "the model's logits are not finite: look for NaN in its weights, or for a dtype of a wider range than {dtype}"
)


class Sampled(NamedTuple):
    """The result of a step for a request.

    Attributes
    ----------
    request : int
        Its number.
    token : int
        The next token of its text; -1 with an error.
    reason : str
        Why the text ends: "stop" for an end token or a text of `stop`, "length" for max_tokens, "error" if no token
        can be chosen; empty while it goes on.
    message : str
        The message of an error.
    num_cached : int
        How many tokens of its prompt the prefix cache had.
    """

    request: int
    token: int
    reason: str
    message: str = ""
    num_cached: int = 0


def last_logits(model: PreTrainedModel, cache: PagedKVCache, step: Step) -> torch.Tensor:
    """Compute logits of the last row of each request, (num_seqs, vocab_size); NaN if any of its rows is not finite.

    Keys and values that are not finite must not become findable, even if a window hides them from the last row.
    """
    watched = WatchedPass(cache, step.slots, step.batch)
    with torch.inference_mode():
        out = model(
            input_ids=step.tokens[None],
            position_ids=step.batch.positions[None],
            use_cache=False,
            logits_to_keep=step.batch.query_starts[1:].long() - 1,
            forward_pass=watched,
        )
        logits: torch.Tensor = out.logits[0]
        finite = watched.are_finite().tolist()
        for row, (start, stop) in enumerate(pairwise(step.batch.query_starts.tolist())):
            if not all(finite[start:stop]):
                logits[row] = torch.nan
    return logits


def plan_results(
    logits: torch.Tensor,
    step: Step,
    requests: Mapping[int, EngineRequest],
    num_cached: Sequence[int],
    ranks: Ranks | None,
) -> tuple[list[Sampled], list[Write], list[int]]:
    """Choose tokens: the results, what to store, and the tokens of `step.sampled`.

    Parameters
    ----------
    logits : (num_seqs, vocab_size) tensor
        From `last_logits`.
    step : Step
    requests : dict of int to EngineRequest
        By their numbers.
    num_cached : sequence of int
        Of each request of the step, how many tokens of its prompt the prefix cache had.
    ranks : Ranks or None
        The ranks that have to choose the same.
    """
    rows = {number: i for i, number in enumerate(step.requests.tolist())}
    sampled = step.sampled.tolist()
    chooses = [requests[number] for number in sampled]
    of_sampled = logits[[rows[number] for number in sampled]]
    for i, request in enumerate(chooses):
        if request.adjusts:
            of_sampled = of_sampled.float()
            request.adjust(of_sampled[i])
    places = [len(request.prompt) + len(request.tokens) for request in chooses]
    tokens, finite = choose(of_sampled, [request.sampling for request in chooses], places), are_finite(logits)
    if ranks is not None:
        tokens, finite = ranks.agree(tokens, finite)
    chosen = dict(zip(sampled, tokens, strict=True))
    made: list[Sampled] = []
    writes: list[Write] = []
    for number, is_finite, cached in zip(rows, finite, num_cached, strict=True):
        request = requests[number]
        if not is_finite:
            message = NOT_FINITE.format(dtype=logits.dtype)
            made.append(Sampled(number, NO_TOKEN, "error", message, cached))
            writes += request.plan_end("error", message)
        elif number in chosen:
            reason, stored = request.plan(chosen[number])
            made.append(Sampled(number, chosen[number], reason, "", cached))
            writes += stored
    return made, writes, tokens
