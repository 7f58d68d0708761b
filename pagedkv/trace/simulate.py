"""simulate: runs requests on a manager, one token for each running sequence in every step."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .lengths import Requests
from .managers import Manager

Int64Array = npt.NDArray[np.int64]
KINDS = ("tokens", "reserved", "internal", "external")


@dataclass(frozen=True, slots=True)
class Run:
    """How every slot was used in each step.

    Attributes
    ----------
    memory : int
        Slots in all.
    tokens, reserved, internal, external : (num_steps,) int64
        Slots of each kind, as `pagedkv.trace` defines them; the rest of the memory is idle. With windows of several
        layers the slots of each layer count by themselves, and a token that a window has passed is internal.
    running, waiting : (num_steps,) int64
        Sequences that run at once, and requests that wait.
    preempted : int
        How often a sequence was preempted because others needed its slots.
    recomputed : int
        Tokens that preempted sequences compute again.
    """

    memory: int
    tokens: Int64Array
    reserved: Int64Array
    internal: Int64Array
    external: Int64Array
    running: Int64Array
    waiting: Int64Array
    preempted: int
    recomputed: int

    @property
    def num_steps(self) -> int:
        """Steps until the last request ended."""
        return len(self.tokens)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind of slot among all that are not idle, summed over all steps."""
        sums = {kind: int(getattr(self, kind).sum()) for kind in KINDS}
        return {kind: slots / sum(sums.values()) for kind, slots in sums.items()}

    @property
    def waste(self) -> float:
        """The share of slots that are reserved, internal or external."""
        return 1 - self.shares["tokens"]

    @property
    def at_once(self) -> float:
        """Mean number of sequences that run at once while others wait; over all steps if none ever does."""
        busy = self.waiting > 0
        return float(self.running[busy].mean() if busy.any() else self.running.mean())


def simulate(
    requests: Requests, manager: Manager, watch: Callable[[Int64Array, Int64Array, Int64Array], Any] | None = None
) -> Run:
    """Run requests until all have ended.

    In each step every running sequence gets a token. If there is no room for all, the sequences admitted last are
    preempted: they wait at the head of the queue, and recompute their tokens later, as in vLLM. Otherwise requests are
    admitted in order, each with its prompt and first token, as long as the next one fits; none overtakes. A sequence
    with all its tokens counts in that step and then ends.

    Parameters
    ----------
    requests : Requests
    manager : Manager
        A manager without sequences.
    watch : callable or None
        Called in each step with the indices of the running requests, their handles and their lengths.

    Returns
    -------
    Run

    Raises
    ------
    ValueError
        A request is longer than the manager can hold when it is alone.

    Examples
    --------
    >>> from pagedkv import trace
    >>> requests = trace.Requests(prompt_lens=[5, 3], output_lens=[2, 4])
    >>> run = trace.simulate(requests, trace.Paged(memory=32, block_size=4))
    >>> run.num_steps, run.tokens, round(run.waste, 2)
    (4, array([10, 12,  6,  7]), 0.2)
    """
    seq_lens = requests.seq_lens
    longest = int(seq_lens.argmax())
    if seq_lens[longest] > manager.max_len:
        raise ValueError(
            f"request {longest} has {seq_lens[longest]} tokens in the end, a sequence has room for {manager.max_len}: "
            "make the memory or the maximum length larger, or leave the request out"
        )
    queue = deque(range(len(seq_lens)))
    lens = requests.prompt_lens.copy()
    windows, num_layers = Counter(manager.windows), len(manager.windows)
    memory = manager.memory * num_layers
    running, seqs = np.empty(0, np.int64), np.empty(0, np.int64)
    steps = array("q")
    preempted = recomputed = 0
    while queue or len(running):
        given_up = 0
        while not manager.append(seqs):
            manager.free(seqs[-1:])
            queue.appendleft(int(running[-1]))
            given_up, recomputed = given_up + 1, recomputed + int(lens[running[-1]])
            running, seqs = running[:-1], seqs[:-1]
        preempted += given_up
        admitted: list[tuple[int, int]] = []
        while queue and not given_up:
            seq = manager.admit(int(lens[queue[0]]) + 1, int(seq_lens[queue[0]]))
            if seq is None:
                break
            admitted.append((queue.popleft(), seq))
        if admitted:
            running = np.concatenate([running, [request for request, _ in admitted]])
            seqs = np.concatenate([seqs, [seq for _, seq in admitted]])
        lens[running] += 1
        now, ends, room = lens[running], seq_lens[running], manager.room(seqs)
        if watch is not None:
            watch(running, seqs, now)
        used = sum(count * int((now if w is None else np.minimum(now, w)).sum()) for w, count in windows.items())
        reserved = num_layers * int((np.minimum(room, ends) - now).sum())
        allocated = int(manager.held(seqs).sum())
        external = memory - allocated if queue else 0
        steps.extend((used, reserved, allocated - used - reserved, external, len(running), len(queue)))
        ended = now == ends
        if ended.any():
            manager.free(seqs[ended])
            running, seqs = running[~ended], seqs[~ended]
    tokens, fill, unused, denied, at_once, waiting = np.frombuffer(steps, np.int64).reshape(-1, 6).T
    return Run(memory, tokens, fill, unused, denied, at_once, waiting, preempted, recomputed)
