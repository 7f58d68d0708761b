"""Waiting: the requests that do not run, in the order in which they will start."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .request import Request


class Waiting:
    """A heap of requests: the smallest key first, and of equal keys the smallest number.

    An aborted request leaves its entry in the heap. When more than half of the entries are stale, `remove` rebuilds the
    heap, so that it has at most two entries for each request, and a removal costs O(log n) on average.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._heap: list[tuple[int, int]] = []

    def refill(self, requests: dict[int, Request]) -> None:
        """Replace all waiting requests by these, in whatever state an interrupted call has left the heap."""
        heap = sorted((request.key, number) for number, request in requests.items())
        self._requests, self._heap = requests.copy(), heap

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def push(self, request: Request) -> None:
        """Add a request."""
        heappush(self._heap, (request.key, request.number))
        self._requests[request.number] = request

    def first(self) -> Request | None:
        """The request that starts next, None if there is none."""
        return self._requests[self._heap[0][1]] if self._heap else None

    def remove(self, request: Request) -> None:
        """Remove a request, because it starts or is aborted."""
        del self._requests[request.number]
        # Only a request that was the first is ever pushed again, and then its old entry is gone.
        while self._heap and self._heap[0][1] not in self._requests:
            heappop(self._heap)
        if len(self._heap) > 2 * len(self._requests):
            self._heap = [(waiting.key, waiting.number) for waiting in self._requests.values()]
            heapify(self._heap)
