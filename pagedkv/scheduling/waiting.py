"""Waiting: the requests that do not run, in the order in which they start."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .request import Request


class Waiting:
    """A heap of requests, smallest key first, and of equal ones the one that was added first.

    A request that is aborted leaves its entry in the heap. Once more than half of the entries are such, `remove` makes
    the heap anew: it has at most two entries for each request that waits, and a removal costs O(log n) on average.
    """

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
        return self._requests[self._heap[0][1]] if self._heap else None

    def remove(self, request: Request) -> None:
        """A request waits no longer: the first one, or one that is aborted."""
        del self._requests[request.number]
        # Only a request that was the first may be pushed again, and its entry is gone by then.
        while self._heap and self._heap[0][1] not in self._requests:
            heappop(self._heap)
        if len(self._heap) > 2 * len(self._requests):
            self._heap = [(waiting.key, waiting.number) for waiting in self._requests.values()]
            heapify(self._heap)
