"""The results of a step: the logits of its requests, and the tokens that they get."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ...cache import PagedKVCache
from ...commit import Write
from ...memory.ids import Int64Array, spans
from ...scheduling import Step
from .attention import WatchedPass
from .grammar import GrammarError
from .logprobs import TokenLogprob, token_logprobs
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
    logprob : float or None
        The log-probability of the token, with `logprobs`.
    top_logprobs : list of (int, float)
        The most probable tokens and their log-probabilities, as many as `logprobs` asks for.
    prompt_logprobs : list of TokenLogprob, or None
        With `prompt_logprobs`, those of the prompt's tokens but the first; with the first token of the text.
    """

    request: int
    token: int
    reason: str
    message: str = ""
    num_cached: int = 0
    logprob: float | None = None
    top_logprobs: Sequence[tuple[int, float]] = ()
    prompt_logprobs: list[TokenLogprob] | None = None


def rows_with_logits(step: Step, requests: Mapping[int, EngineRequest]) -> Int64Array | None:
    """How many of its last rows of a step each request needs logits of, (num_seqs,) int64; None for one of each."""
    asked = [requests[number] for number in step.requests.tolist()]
    if all(request.options.prompt_logprobs is None for request in asked):
        return None
    stops = step.batch.seq_lens.tolist()
    rows = [one.num_prompt_rows(stop) + (stop >= len(one.prompt)) for one, stop in zip(asked, stops, strict=True)]
    return np.maximum(rows, 1)


def last_logits(model: PreTrainedModel, cache: PagedKVCache, step: Step, rows: Int64Array | None) -> torch.Tensor:
    """Compute logits of the last rows of each request, (rows.sum(), vocab_size); NaN if any of its rows is not finite.

    `rows` is from `rows_with_logits`. Keys and values that are not finite must not become findable, even if a window
    hides them from the last row.
    """
    watched = WatchedPass(cache, step.slots, step.batch)
    stops = step.batch.query_starts[1:].long()
    if rows is None:
        kept, first = stops - 1, np.arange(len(stops) + 1)
    else:
        kept = torch.from_numpy(spans(stops.numpy(force=True) - rows, rows)).to(stops.device)
        first = np.append(0, rows.cumsum())
    with torch.inference_mode():
        out = model(
            input_ids=step.tokens[None],
            position_ids=step.batch.positions[None],
            use_cache=False,
            logits_to_keep=kept,
            forward_pass=watched,
        )
        logits: torch.Tensor = out.logits[0]
        finite = watched.are_finite().tolist()
        for i, (start, stop) in enumerate(pairwise(step.batch.query_starts.tolist())):
            if not all(finite[start:stop]):
                logits[first[i] : first[i + 1]] = torch.nan
    return logits


def plan_results(
    logits: torch.Tensor,
    rows: Int64Array | None,
    step: Step,
    requests: Mapping[int, EngineRequest],
    num_cached: Sequence[int],
    ranks: Ranks | None,
) -> tuple[list[Sampled], list[Write], list[int]]:
    """Choose tokens: the results, what to store, and the tokens of `step.sampled`.

    Parameters
    ----------
    logits : (rows.sum(), vocab_size) tensor
        From `last_logits`.
    rows : (num_seqs,) int64 or None
        From `rows_with_logits`.
    step : Step
    requests : dict of int to EngineRequest
        By their numbers.
    num_cached : sequence of int
        Of each request of the step, how many tokens of its prompt the prefix cache had.
    ranks : Ranks or None
        The ranks that have to choose the same.
    """
    numbers, sampled = step.requests.tolist(), step.sampled.tolist()
    stops = np.arange(1, len(numbers) + 1) if rows is None else rows.cumsum()
    last = dict(zip(numbers, (stops - 1).tolist(), strict=True))
    chooses = [requests[number] for number in sampled]
    of_sampled = logits[[last[number] for number in sampled]]
    failed: dict[int, str] = {}
    for i, request in enumerate(chooses):
        if request.adjusts:
            of_sampled = of_sampled.float()
            try:
                request.adjust(of_sampled[i])
            except GrammarError as error:
                failed[sampled[i]] = str(error)
            except Exception as error:
                error.add_note(f"in request {sampled[i]}: abort it to go on with the others")
                raise
    places = [len(request.prompt) + len(request.tokens) for request in chooses]
    tokens, finite = choose(of_sampled, [request.options for request in chooses], places), are_finite(logits)
    if rows is not None:
        finite = np.logical_and.reduceat(finite, stops - rows).tolist()
    if ranks is not None:
        tokens, finite = ranks.agree(tokens, finite)
    if not all(finite):
        failed |= dict.fromkeys(compress(numbers, np.logical_not(finite)), NOT_FINITE.format(dtype=logits.dtype))
    chosen = {number: token for number, token in zip(sampled, tokens, strict=True) if number not in failed}
    logprobs = _of_chosen(logits, last, chosen, requests)
    prompts = {} if rows is None else _of_prompts(logits, stops - rows, step, requests, failed)
    made: list[Sampled] = []
    writes: list[Write] = []
    for number, cached in zip(numbers, num_cached, strict=True):
        request = requests[number]
        if not request.tokens:
            writes.append((vars(request), "num_cached", cached))
        if number in failed:
            made.append(Sampled(number, NO_TOKEN, "error", failed[number], cached))
            writes += request.plan_end("error", failed[number])
            continue
        known = request.prompt_logprobs
        if number in prompts:
            writes.append((known, slice(len(known), None), prompts[number]))
            known = known + prompts[number]
        if number in chosen:
            logprob = logprobs.get(number)
            reason, stored = request.plan(chosen[number], logprob)
            one = Sampled(number, chosen[number], reason, "", cached)
            if logprob is not None:
                one = one._replace(logprob=logprob.logprob, top_logprobs=logprob.top_logprobs)
            if request.options.prompt_logprobs is not None and not request.tokens:
                one = one._replace(prompt_logprobs=known)
            made.append(one)
            writes += stored
    return made, writes, tokens


def _of_chosen(
    logits: torch.Tensor, last: Mapping[int, int], chosen: Mapping[int, int], requests: Mapping[int, EngineRequest]
) -> dict[int, TokenLogprob]:
    """The log-probabilities of the chosen tokens, of the requests that want them."""
    num_top = {number: requests[number].options.logprobs for number in chosen}
    wanted = {number: n for number, n in num_top.items() if n is not None}
    if not wanted:
        return {}
    rows = logits[[last[number] for number in wanted]]
    made = token_logprobs(rows, [chosen[number] for number in wanted], max(wanted.values()))
    return {
        number: one._replace(top_logprobs=one.top_logprobs[:n])
        for (number, n), one in zip(wanted.items(), made, strict=True)
    }


def _of_prompts(
    logits: torch.Tensor,
    starts: Int64Array,
    step: Step,
    requests: Mapping[int, EngineRequest],
    failed: Collection[int],
) -> dict[int, list[TokenLogprob]]:
    """The log-probabilities of the prompts' tokens that the step gives, of the requests that want them."""
    made = {}
    for number, start, stop in zip(step.requests.tolist(), starts.tolist(), step.batch.seq_lens.tolist(), strict=True):
        request = requests[number]
        if (num_rows := request.num_prompt_rows(stop)) and number not in failed:
            at = len(request.prompt_logprobs) + 1
            tokens = request.prompt[at : at + num_rows].tolist()
            num_top = request.options.prompt_logprobs or 0
            made[number] = token_logprobs(logits[start : start + num_rows], tokens, num_top)
    return made
