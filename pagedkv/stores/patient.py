"""PatientStore: asks a store, and waits only so long for the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any
from weakref import finalize, ref

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
        for method in ("get", "has", "put", "remove"):
            require_callable(f"store.{method}", getattr(store, method, None), "a method, as of a BlockStore")
        self._store: BlockStore | None = store
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

    def ask(self, keys: Sequence[bytes]) -> Future[list[Any]]:
        """Begin to get blocks; `wait` has the answer."""
        store = self._open_store()
        return self._ask(lambda: list(store.get(keys)))

    def has(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Say for each key whether its block is there; none is if the store raises, or is late."""
        store = self._open_store()
        if not keys:
            return []
        there = self.wait(self._ask(lambda: [bool(x) for x in store.has(keys)]), deadline)
        return there if len(there) == len(keys) else [False] * len(keys)

    def _ask(self, function: Callable[[], list[Any]]) -> Future[list[Any]]:
        if self._stalled is not None and not self._stalled.done():
            nothing: Future[list[Any]] = Future()
            nothing.set_result([])
            return nothing
        self._stalled = None
        return self._gets.call(function)

    def wait(self, asked: Future[list[Any]], deadline: float) -> list[Any]:
        """What was asked for; nothing if the store raises, or has not answered at the deadline."""
        try:
            found = asked.result(max(0.0, deadline - time.monotonic()))
        except Exception as error:
            if not asked.done():
                self._stalled = asked
            self._fail(error)
            return []
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[Buffer]) -> Future[bool]:
        """Have a thread put blocks, which are the store's from now on; the result says whether it has taken them."""
        size, store = sum(sizes_of(blocks)), self._open_store()
        with self._lock:
            self._pending_bytes += size

        def put() -> bool:
            try:
                store.put(keys, blocks)
            except BaseException as error:  # of the store, whatever it is: nobody interrupts this thread
                self._fail(error)
                return False
            finally:
                with self._lock:
                    self._pending_bytes -= size
            return True

        return self._puts.call(put)

    def put_now(self, keys: Sequence[bytes], blocks: Sequence[Buffer], deadline: float | None = None) -> bool:
        """Put blocks; whether the store has taken them in time, or by a deadline. It takes none while it stalls."""
        if self._behind is not None and not self._behind.done():
            return False
        taken = self.put(keys, blocks)
        return self.flush(deadline) and taken.result()

    def remove(self, keys: Sequence[bytes]) -> None:
        """Have the thread that puts remove keys, before it puts more."""
        store = self._open_store()
        self._puts.call(lambda: store.remove(keys))

    def remove_damaged(self, keys: Sequence[bytes]) -> None:
        """Have the thread that gets remove keys, before it says what else is there."""
        store = self._open_store()
        self._gets.call(lambda: store.remove(keys))

    def remove_with(self, owner: object, keys: Sequence[bytes]) -> None:
        """Have a thread remove keys once nobody has an object any more."""
        removal = _Removal(owner, self._puts.calls.put)
        removal.remove = partial(self._remove, self._open_store(), keys)
        self._removals.add(removal)

    def _remove(self, store: BlockStore, keys: Sequence[bytes], removal: _Removal) -> None:
        self._removals.discard(removal)
        store.remove(keys)

    def flush(self, deadline: float | None = None) -> bool:
        """Wait until the store has taken all that was put; whether it did before the time-out, or by a deadline."""
        if self._store is None:
            return True
        taken = self._puts.call(lambda: None)
        try:
            taken.result(max(0.0, (self.deadline() if deadline is None else deadline) - time.monotonic()))
        except TimeoutError as error:
            self._behind = taken
            self._fail(error)
            return False
        return True

    def close(self) -> None:
        """Let go of the store, and end the threads once they have done what they were told."""
        for removal in [*self._removals]:
            self._puts.calls.put(removal)
        self._store = None
        self._gets.end()
        self._puts.end()

    def _open_store(self) -> BlockStore:
        if self._store is None:
            raise ValueError("the store was let go by close: make another StoredPrefixes or SwapSpace")
        return self._store

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.num_failed += 1
            self.last_error = error
        cause: BaseException | None = error
        while cause is not None and cause.__traceback__ is not None:  # its frames would keep the blocks of the call
            cause.__traceback__ = None
            cause = cause.__cause__ or cause.__context__


class _Removal(ref[object]):
    """A call of the thread that puts, for when an object is gone. No Python code runs there: it would lose a Ctrl-C."""

    remove: Callable[[_Removal], None]

    def __call__(self) -> None:
        _answer(partial(self.remove, self), Future())


class Worker:
    """A thread that makes calls one after the other.

    It begins with the first call, ends with this object, and keeps neither the process nor a store alive.

    Attributes
    ----------
    calls : SimpleQueue
        What it has to call; None ends it.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None
        finalize(self, self.calls.put, None).atexit = False

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
        del call  # has the store


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # the asker would take it for its own: a cancelled task, or a Ctrl-C
        future.set_exception(RuntimeError(f"the store raised {error!r}"))
