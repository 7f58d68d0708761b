"""Ranks: processes that each compute with a part of a model, and so have to take the same steps."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...memory.arguments import MAX_INT64
from ...validation.require import number

# A rank that follows waits for as long as rank 0 has nothing to compute. A rank that dies ends the wait at once.
_ANY_TIME = timedelta(days=365)


@contextmanager
def join_ranks(timeout: float = 600.0) -> Iterator[int]:
    """Join the processes that torchrun has started, until the end of a ``with`` block.

    Load the model, and make and call its Engine, in the block. However the block ends, this rank leaves the others in
    order; without that, gloo aborts the process at times.

    Parameters
    ----------
    timeout : float
        Seconds after which ranks that wait for one that does not answer raise RuntimeError; also for one that takes
        longer to load its weights. They learn at once of one that has died.

    Yields
    ------
    int
        The number of this rank.

    Raises
    ------
    ValueError
        torchrun has not started this process, or the time-out is not positive.

    Examples
    --------
    ``torchrun --nproc-per-node 2 script.py``::

        with join_ranks(timeout=60):
            sharding = DistributedConfig(tp_plan="auto")
            model = AutoModelForCausalLM.from_pretrained(name, distributed_config=sharding)
            engine = Engine(model, memory="2GiB")
            ...

    In a process that torchrun has not started:

    >>> from pagedkv.integrations.transformers.ranks import join_ranks
    >>> with join_ranks():
    ...     pass
    Traceback (most recent call last):
        ...
    ValueError: torchrun starts ranks, and has not started this process: torchrun --nproc-per-node 2 ...
    """
    seconds = number("timeout", timeout, positive=True)
    if "RANK" not in os.environ:
        raise ValueError("torchrun starts ranks, and has not started this process: torchrun --nproc-per-node 2 ...")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timedelta(seconds=seconds))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def fewest_blocks(num_blocks: int, device: torch.device) -> int:
    """The least of the numbers of blocks that the caches of all ranks have; each rank calls it."""
    return _least([num_blocks], device)[0]


def _least(values: Sequence[int], device: torch.device) -> list[int]:
    """For each of these values, the least that a rank has."""
    least = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    found: list[int] = least.tolist()
    return found


class Ranks:
    """What the engine of a rank tells those of the others.

    Before each step rank 0 tells the others what it was called with since the last one: they have been called with the
    same, or follow. In each step they take the tokens that rank 0 has chosen.

    Parameters
    ----------
    device : torch.device
        The device of the model.
    **settings : int
        What has to be the same on all ranks.

    Attributes
    ----------
    rank : int
        The number of this one.
    calls : list
        The requests that were added and aborted since the last step.

    Raises
    ------
    ValueError
        A setting is another one on another rank.
    """

    def __init__(self, device: torch.device, **settings: int) -> None:
        self.rank, self.calls = dist.get_rank(), list[Any]()
        self._device = device
        timeout = dist.group.WORLD._get_backend(
            device
        ).options._timeout  # of the model's group, new ones have their own
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        least = _least([*settings.values(), *(-value for value in settings.values())], device)
        for name, low, high in zip(settings, least, least[len(settings) :], strict=False):
            if low != -high:
                raise ValueError(f"{name} must be the same on all ranks, got {low} on one and {-high} on another")

    def tell(self, message: Any = None) -> Any:
        """Hand a message of rank 0 to the others, which get it as the result; None is the last one."""
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def wait(self) -> Any:
        """Get the next message of rank 0, which may have nothing to compute for a long time."""
        self._group.set_timeout(_ANY_TIME)
        return self.tell()

    def begin(self, dropped: deque[int]) -> deque[int]:
        """Begin a step on all ranks, which were called with the same, and return the requests that rank 0 drops.

        When a stream is dropped depends on the garbage collector, so that rank 0 alone decides.
        """
        calls, self.calls = self.calls, []
        theirs = deque(dropped.popleft() for _ in range(len(dropped)))
        told = self.tell((calls, theirs))
        if told is None:
            raise RuntimeError("rank 0 has closed its Engine")
        if told[0] != calls:
            raise RuntimeError(
                f"rank {self.rank} was called with {_brief(calls)} since the last step, and rank 0 with "
                f"{_brief(told[0])}: call all ranks with the same, or let the others follow()"
            )
        dropped_by_rank_0: deque[int] = told[1]
        return dropped_by_rank_0

    def agree(self, tokens: Sequence[int], finite: Sequence[bool]) -> tuple[list[int], list[bool]]:
        """The tokens that rank 0 has chosen; and for each request, whether it is finite on all ranks."""
        mine = tokens if self.rank == 0 else [MAX_INT64] * len(tokens)
        least = _least([*mine, *map(int, finite)], self._device)
        return least[: len(tokens)], [bool(is_finite) for is_finite in least[len(tokens) :]]


def _brief(calls: list[Any]) -> str:
    return ", ".join(f"{name} of request {request}" for name, request, *_ in calls) or "nothing"
