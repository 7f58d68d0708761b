"""Generation: a prompt's text, its tokens and what is known of them, once it has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...memory.arguments import as_int
from .logprobs import TokenLogprob
from .request import EngineRequest


@dataclass(frozen=True)
class Generation:
    """The text that a prompt got.

    Attributes
    ----------
    text : str or None
        None if the engine has no tokenizer.
    tokens : list of int
        Without one that stops the text.
    finish_reason : str
        "stop", "length" or "error", as of `Sampled`; "aborted" if something else has aborted the request.
    message : str
        The message of an error.
    num_cached : int
        How many tokens of the prompt the prefix cache had.
    logprobs : list of TokenLogprob, or None
        Those of `tokens`, with `logprobs`.
    prompt_logprobs : list of TokenLogprob, or None
        Those of the prompt's tokens but the first, with `prompt_logprobs`.
    choices : tuple of Generation
        With n > 1 all texts of the prompt, this one first; else empty.
    """

    text: str | None
    tokens: list[int]
    finish_reason: str
    message: str = ""
    num_cached: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    choices: tuple[Generation, ...] = ()

    @classmethod
    def of(cls, requests: list[EngineRequest]) -> Generation:
        """Make that of a prompt from its requests, which have ended."""
        made = tuple(map(cls._of_one, requests))
        return made[0] if len(made) == 1 else replace(made[0], choices=made)

    @classmethod
    def _of_one(cls, request: EngineRequest) -> Generation:
        return cls(
            text=None if request.decoder is None else "".join(request.pieces),
            tokens=request.tokens,
            finish_reason=request.reason,
            message=request.message,
            num_cached=request.num_cached,
            logprobs=None if request.options.logprobs is None else request.logprobs,
            prompt_logprobs=None if request.options.prompt_logprobs is None else request.prompt_logprobs,
        )


def wait_for(requests: list[EngineRequest], step: Callable[[], None]) -> None:
    """Run steps until requests have ended, with a progress bar where stderr is a terminal."""
    from tqdm import tqdm  # which transformers brings, and nothing else needs

    with tqdm(total=len(requests), unit="text", disable=None) as bar:
        while left := [request for request in requests if not request.reason]:
            bar.update(len(requests) - len(left) - bar.n)
            step()
        bar.update(len(requests) - bar.n)


def is_one_prompt(prompts: Any) -> bool:
    """Whether it is one prompt, and not a list of several or the rows of an array."""
    if isinstance(prompts, (torch.Tensor, np.ndarray)):
        return prompts.ndim < 2
    if isinstance(prompts, (str, Mapping)):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], (int, np.integer, Mapping))


def options_of_choices(options: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """The options of n requests for one prompt: each draws with a seed of its own, the first computes the prompt."""
    made = [dict(options)]
    for i in range(1, n):
        made.append(dict(options, prompt_logprobs=None))
        if options.get("seed") is not None:
            made[i]["seed"] = as_int("seed", options["seed"]) + i
    return made
