"""PatientStore: asks a store, and waits only so long for the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any
from weakref import ref

from ..memory.arguments import as_int, require_callable
from ..validation.require import number
from .store import BlockStore, Buffer, sizes_of

_LONGEST = 2.0**31  # seconds: a lock refuses to wait much longer


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
    last_error : BaseException or None
        What the last call raised that did.
    """

    def __init__(self, store: BlockStore, timeout: float, max_pending_bytes: int) -> None:
        for method in ("get", "put", "remove"):
            require_callable(f"store.{method}", getattr(store, method, None), "a method, as of a BlockStore")
        self._store = store
        self._timeout = min(number("timeout", timeout, positive=True), _LONGEST)
        self._max_pending_bytes = as_int("max_pending_bytes", max_pending_bytes)
        self.num_failed = 0
        self.last_error: BaseException | None = None
        self._pending_bytes, self._lock = 0, Lock()
        # A store that stalls in one thread neither delays what the other asks nor the end of the process.
        self._gets, self._puts = Worker(), Worker()
        self._stalled: Future[Any] | None = None  # a call to get that was not done in time
        self._behind: Future[Any] | None = None  # the same of the calls to put
        self._removals: set[_Removal] = set()

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
            except BaseException as error:  # of the store, whatever it is: nobody interrupts this thread
                self._fail(error)
                on_failure()
            finally:
                with self._lock:
                    self._pending_bytes -= size

        self._puts.call(put)

    def put_now(self, keys: Sequence[bytes], blocks: Sequence[Buffer], deadline: float | None = None) -> bool:
        """Put blocks; whether the store has taken them in time, or by a deadline. It takes none while it stalls."""
        failed: list[None] = []
        if self._behind is not None and not self._behind.done():
            return False
        self.put(keys, blocks, lambda: failed.append(None))
        return self.flush(deadline) and not failed

    def remove(self, keys: Sequence[bytes]) -> None:
        """Have a thread remove keys."""
        self._puts.call(lambda: self._store.remove(keys))

    def remove_with(self, owner: object, keys: Sequence[bytes]) -> None:
        """Have a thread remove keys once nobody has an object any more."""
        removal = _Removal(owner, self._puts.calls.put)
        removal.remove = partial(self._remove, removal, keys)
        self._removals.add(removal)

    def _remove(self, removal: _Removal, keys: Sequence[bytes]) -> None:
        self._removals.discard(removal)
        self._store.remove(keys)

    def flush(self, deadline: float | None = None) -> bool:
        """Wait until the store has taken all that was put; whether it did before the time-out, or by a deadline."""
        taken = self._puts.call(lambda: None)
        try:
            taken.result(max(0.0, (self.deadline() if deadline is None else deadline) - time.monotonic()))
        except TimeoutError as error:
            self._behind = taken
            self._fail(error)
            return False
        return True

    def close(self) -> None:
        """End the threads once they have done what they were told."""
        self._gets.end()
        self._puts.end()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.num_failed += 1
            self.last_error = error.with_traceback(None)  # whose frames would keep the blocks of the call


class _Removal(ref[object]):
    """A call of the thread that puts, for when an object is gone. No Python code runs there: it would lose a Ctrl-C."""

    remove: Callable[[], None]

    def __call__(self) -> None:
        _answer(self.remove, Future())


class Worker:
    """A thread that makes calls one after the other; it begins with the first, and does not keep the process alive.

    Attributes
    ----------
    calls : SimpleQueue
        What it has to call; None ends it.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the thread call a function."""
        if self._thread is None or not self._thread.is_alive():  # as in a forked process
            self._thread = Thread(target=_work, args=(self.calls,), name="pagedkv-store", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self.calls.put(partial(_answer, function, future))
        return future

    def end(self) -> None:
        """End the thread after the calls that wait."""
        self.calls.put(None)


def _work(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while call := calls.get():
        call()


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # the asker would take it for its own: a cancelled task, or a Ctrl-C
        future.set_exception(RuntimeError(f"the store raised {error!r}"))
