"""Sampling: choose the most probable token, or draw one with random numbers that belong to the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...memory.arguments import MAX_INT64, as_int
from ...validation.require import number


@dataclass(eq=False)
class Sampling:
    """The options by which the tokens of a request are chosen.

    Parameters
    ----------
    temperature : float
        Logits are divided by it; 0 takes the most probable token.
    top_k : int
        Draw among this many of the most probable tokens; 0 for all.
    top_p : float
        Draw among the fewest most probable tokens that together have this probability, after the other limits.
    min_p : float
        Draw among tokens with at least this share of the probability of the most probable one.
    repetition_penalty : float
        Above 1, tokens of the prompt and of the text so far become less probable: their logits are divided by it if
        they are positive, else multiplied.
    seed : int or None
        The seed of the draws; None for a different text each time.

    Raises
    ------
    TypeError, ValueError
        An option is not a number, or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    _key: npt.NDArray[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # A step samples all its requests together, so one bad option would fail all of them.
        self.temperature = number("temperature", self.temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        self.top_k = as_int("top_k", self.top_k, maximum=MAX_INT64)
        for name in ("top_p", "min_p"):
            value = number(name, getattr(self, name))
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value}")
            setattr(self, name, value)
        self.repetition_penalty = number("repetition_penalty", self.repetition_penalty, positive=True)
        if self.seed is not None:
            self.seed = as_int("seed", self.seed)
        self._key = np.random.SeedSequence(self.seed).generate_state(2, np.uint64)

    def draw(self, place: int) -> float:
        """The random number in [0, 1) for the token at a place in the text: the same each time."""
        return np.random.Generator(np.random.Philox(key=self._key, counter=place)).random()


def choose(logits: torch.Tensor, samplings: Sequence[Sampling], places: Sequence[int]) -> list[int]:
    """Choose the next token of each request.

    Parameters
    ----------
    logits : (num_seqs, vocab_size) tensor
    samplings : sequence of Sampling
        The options for each row; rows with a temperature are drawn.
    places : sequence of int
        How many tokens the request of each row has so far.

    Returns
    -------
    list of int
    """
    if not len(samplings):
        return []
    tokens = logits.argmax(-1)
    rows = [i for i, sampling in enumerate(samplings) if sampling.temperature > 0]
    if rows:
        draws = [samplings[i].draw(places[i]) for i in rows]
        tokens[rows] = _draw_tokens(logits[rows], [samplings[i] for i in rows], draws)
    chosen: list[int] = tokens.tolist()
    return chosen


def are_finite(logits: torch.Tensor) -> list[bool]:
    """Whether a token can be chosen from each row: it has no NaN, no +inf, and not only -inf."""
    finite: list[bool] = logits.amax(-1).isfinite().tolist()
    return finite


def _draw_tokens(logits: torch.Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> torch.Tensor:
    """Draw a token of each row by inverting its distribution."""
    scaled = logits.double()
    scaled = scaled - scaled.amax(-1, keepdim=True)
    p = (scaled / _column([sampling.temperature for sampling in samplings], scaled)).exp()
    p[p < _column([sampling.min_p for sampling in samplings], p)] = 0  # the most probable one has 1 here
    cut = [i for i, sampling in enumerate(samplings) if sampling.top_k or sampling.top_p < 1]
    if cut:
        p[cut] = _most_probable(p[cut], [samplings[i] for i in cut])
    p = p.cumsum(-1)
    found = torch.searchsorted(p, _column(draws, p) * p[:, -1:], right=True)
    return found[:, 0].clamp(max=p.shape[1] - 1)


def _most_probable(p: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Set the probabilities of tokens that top_k and top_p exclude to 0; `p` need not be normalised."""
    order = p.argsort(dim=-1, descending=True, stable=True)
    left, rank = p.gather(-1, order), torch.arange(p.shape[1], device=p.device)
    left[rank >= _column([sampling.top_k or p.shape[1] for sampling in samplings], p)] = 0
    # A token stays if those before it do not have top_p together: the first one always does.
    before, whole = left.cumsum(-1) - left, left.sum(-1, keepdim=True)
    left[(before >= _column([sampling.top_p for sampling in samplings], p) * whole) & (rank > 0)] = 0
    return torch.zeros_like(p).scatter(-1, order, left)


def _column(values: Sequence[float], p: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=p.device)[:, None]
