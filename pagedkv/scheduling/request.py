"""Request: what the scheduler knows about one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NOT_RUNNING = -1


@dataclass(eq=False, slots=True)
class Request:
    """The tokens of a request, its limits, and its place in the order.

    Attributes
    ----------
    number : int
        The number by which callers name it.
    tokens : (num_tokens,) int32
        Its tokens so far; while it runs, those that it had when it started to run.
    num_prompt, max_len : int
        Its length at the start of this turn, and its largest possible length at the end.
    priority : int
    key : int
        Its place in the order; the smallest comes first.
    salt : str, bytes or None
    root : bytes
        The root digest of its salt.
    resumable : bool
        Whether it stays when its turn ends.
    finds : bool
        Whether it starts with what the prefix cache finds.
    num_cached : int or None
        How many of its tokens the prefix cache had when this turn started; None before that.
    lane : int
        Its lane in `Running` while it runs, otherwise NOT_RUNNING.
    snapshot_at : tuple of int
        Lengths at which a snapshot of its state should stay.
    copy : object or None
        The copy of its K and V that `Swap.copy_out` has made, while it waits after a preemption.
    """

    number: int
    tokens: npt.NDArray[np.int32]
    num_prompt: int
    max_len: int
    priority: int
    key: int
    salt: str | bytes | None
    root: bytes
    resumable: bool
    finds: bool = True
    num_cached: int | None = None
    lane: int = NOT_RUNNING
    snapshot_at: tuple[int, ...] = ()
    copy: Any = None

    def stops(self, num_cached: int, num_matched: int, block_size: int, every: int | None) -> list[int]:
        """Where chunks of its tokens must end so that a snapshot stays there, ascending.

        Parameters
        ----------
        num_cached, num_matched : int
            How many tokens are found, and how many of their blocks: behind those, it and another request part.
        block_size : int
            P.
        every : int or None
            How many tokens there are between snapshots.
        """
        last = (len(self.tokens) - 1) // block_size * block_size
        wanted = [*self.snapshot_at, *(range(every, last, every) if every else ())]
        stops = {last, num_matched, *(length // block_size * block_size for length in wanted)}
        return sorted(stop for stop in stops if stop > num_cached)
