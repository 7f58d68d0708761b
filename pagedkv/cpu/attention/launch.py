"""A launch of an attention kernel on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...arrays import Array, address_of
from ...calls import Caches
from ..threads import run_items
from .arguments import Arguments, Inputs


class Launch(NamedTuple):
    """A launch for some sequences of a call, without q, K, V and results."""

    kernel: Callable[..., Any]
    num_items: int
    inputs: Inputs
    arguments: Arguments
    owners: tuple[Array, ...]  # kept alive, since their addresses are among the arguments
    own: tuple[Any, ...]  # arguments that this kernel alone takes
    make_partials: Callable[[], tuple[Array, ...]]  # likewise, those that it writes, anew for each run
    estimate: float

    def run(self, q: Array, caches: Caches, result: Array, lse: Array) -> None:
        """Compute the rows of `result` and `lse` of the launch's sequences, and no others."""
        inputs, partials = self.inputs.at(q, caches), self.make_partials()
        run_items(
            self.kernel,
            self.num_items,
            (inputs, *self.arguments, *self.own, *partials, address_of(result), lse),
            owners=(q, *caches, *self.owners, result),
            estimate=self.estimate,
        )
