"""EngineStats: how the memory of an engine is used, and what its requests do."""

from __future__ import annotations

from dataclasses import dataclass

from ...memory.stats import Stats


@dataclass(frozen=True)
class EngineStats:
    """What `Engine.stats` returns.

    Attributes
    ----------
    cache : Stats
        Blocks, what windows save of them (`passed_blocks`), hits of the prefix cache, and states.
    num_running, num_waiting : int
        Requests that are computed, and that wait for room.
    num_finished : int
        Requests that have ended so far by themselves, those with an error included.
    num_preempted, num_swapped : int
        How often a request was preempted, and how often swapped out.
    """

    cache: Stats
    num_running: int
    num_waiting: int
    num_finished: int
    num_preempted: int
    num_swapped: int
