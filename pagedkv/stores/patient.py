"""PatientStore: asks a store, and waits only so long for the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from ..memory.arguments import as_int, require_callable
from ..validation.require import number
from .store import BlockStore, Buffer, sizes_of

_LONGEST = 2.0**31  # seconds: a lock refuses to wait much longer
_Call = tuple[Callable[[], Any], Future[Any]]


class PatientStore:
    """Calls a store in threads of its own, so that a store that fails or stalls is one that has nothing.

    Parameters
    ----------
    store : BlockStore
    timeout : float
        Seconds to wait for an answer, more than 0.
    max_pending_bytes : int
        The most bytes of blocks that wait for the store to take them.

    Attributes
    ----------
    num_failed : int
        Calls that raised, or gave no answer in time.
    last_error : Exception or None
        What the last call raised that did.
    """

    def __init__(self, store: BlockStore, timeout: float, max_pending_bytes: int) -> None:
        for method in ("get", "put", "remove"):
            require_callable(f"store.{method}", getattr(store, method, None), "a method, as of a BlockStore")
        self._store = store
        self._timeout = min(number("timeout", timeout, positive=True), _LONGEST)
        self._max_pending_bytes = as_int("max_pending_bytes", max_pending_bytes)
        self.num_failed = 0
        self.last_error: Exception | None = None
        self._pending_bytes, self._lock = 0, Lock()
        # A store that stalls in one thread neither delays what the other asks nor the end of the process.
        self._gets, self._puts = Worker(), Worker()
        self._stalled: Future[Any] | None = None

    @property
    def room(self) -> int:
        """Bytes of blocks that `put` takes now."""
        return self._max_pending_bytes - self._pending_bytes

    def deadline(self) -> float:
        """When a call that begins now ends at the latest."""
        return time.monotonic() + self._timeout

    def ask(self, keys: Sequence[bytes]) -> Future[Any]:
        """Begin to get blocks; `wait` has the answer."""
        if self._stalled is not None and not self._stalled.done():
            nothing: Future[Any] = Future()
            nothing.set_result([])
            return nothing
        return self._gets.call(lambda: list(self._store.get(keys)))

    def wait(self, asked: Future[Any], deadline: float) -> list[Buffer | None]:
        """The blocks that were asked for; none if the store raises, or has not answered at the deadline."""
        try:
            found: list[Buffer | None] = asked.result(max(0.0, deadline - time.monotonic()))
        except Exception as error:
            if not asked.done():
                self._stalled = asked
            self._fail(error)
            return []
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[Buffer], on_failure: Callable[[], object]) -> None:
        """Have a thread put blocks, which are the store's from now on."""
        size = sum(sizes_of(blocks))
        with self._lock:
            self._pending_bytes += size

        def put() -> None:
            try:
                self._store.put(keys, blocks)
            except Exception as error:
                self._fail(error)
                on_failure()
            finally:
                with self._lock:
                    self._pending_bytes -= size

        self._puts.call(put)

    def put_now(self, keys: Sequence[bytes], blocks: Sequence[Buffer]) -> bool:
        """Put blocks; whether the store has taken them in time."""
        failed: list[None] = []
        self.put(keys, blocks, lambda: failed.append(None))
        return self.flush() and not failed

    def remove(self, keys: Sequence[bytes]) -> None:
        """Have a thread remove keys."""
        self._puts.call(lambda: self._store.remove(keys))

    def flush(self) -> bool:
        """Wait until the store has taken all that was put; whether it did before the time-out."""
        try:
            self._puts.call(lambda: None).result(self._timeout)
        except TimeoutError as error:
            self._fail(error)
            return False
        return True

    def close(self) -> None:
        """End the threads once they have done what they were told."""
        self._gets.end()
        self._puts.end()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.num_failed += 1
            self.last_error = error


class Worker:
    """A thread that makes calls one after the other; it begins with the first, and does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: Thread | None = None

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the thread call a function."""
        if self._thread is None or not self._thread.is_alive():  # as in a forked process
            self._thread = Thread(target=_work, args=(self._calls,), name="pagedkv-store", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future

    def end(self) -> None:
        """End the thread after the calls that wait."""
        self._calls.put(None)


def _work(calls: SimpleQueue[_Call | None]) -> None:
    while call := calls.get():
        function, future = call
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
