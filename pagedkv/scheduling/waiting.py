"""Waiting: the requests that do not run, in the order in which they start."""

from __future__ import annotations

from heapq import heappop, heappush

from .request import Request


class Waiting:
    """A heap of requests, smallest key first, and of equal ones the one that was added first."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._heap: list[tuple[int, int]] = []

    def refill(self, requests: dict[int, Request]) -> None:
        """Let these wait and no others, by their numbers, whatever an interrupted call has left."""
        heap = sorted((request.key, number) for number, request in requests.items())
        self._requests, self._heap = requests.copy(), heap

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def push(self, request: Request) -> None:
        """Let a request wait."""
        heappush(self._heap, (request.key, request.number))
        self._requests[request.number] = request

    def first(self) -> Request | None:
        """The request that starts next, None if there is none."""
        # A number that was removed is never pushed again: its entry is passed over once it comes up.
        while self._heap and self._heap[0][1] not in self._requests:
            heappop(self._heap)
        return self._requests[self._heap[0][1]] if self._heap else None

    def remove(self, request: Request) -> None:
        """A request waits no longer: the first one, or one that is aborted."""
        del self._requests[request.number]
        if self._heap[0][1] == request.number:
            heappop(self._heap)
