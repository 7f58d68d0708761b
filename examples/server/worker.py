"""The thread that computes: nothing else touches the engine, and the event loop never waits for it.

Messages go to it through a queue, and come back to the event loop once for each step. How many requests there are at a
time is bounded where they come in: the queue never has more than that, and as many cancellations and looks.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

SHUTTING_DOWN = "the server is shutting down"


class Sampled(NamedTuple):
    """The next token of a request; `reason` says why it ended, and is empty until then."""

    request: int
    token: int
    reason: str


class Engine(Protocol):
    """What the worker drives: `server.small.SmallEngine`, or `pagedkv.integrations.transformers.Engine`."""

    cache: Any
    scheduler: Any

    def add(self, tokens: list[int], max_tokens: int, **sampling: Any) -> int: ...

    def cancel(self, request: int) -> None: ...

    def step(self) -> list[Any]: ...


class Busy(Exception):
    """No request is taken: as many are here as may be, or the server is shutting down."""


@dataclass(eq=False)
class Job:
    """A request on its way: what to compute, and the event loop's end of what comes back.

    Attributes
    ----------
    tokens, max_tokens, sampling
        Arguments of `Engine.add`.
    events : asyncio.Queue
        A (token, reason) for each token, or the exception that ended it.
    request : int or None
        The engine's number, known to the worker alone.
    stopped : bool
        Its text has come to one of the request's own stops: it has not been cancelled.
    """

    tokens: list[int]
    max_tokens: int
    sampling: dict[str, Any]
    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    request: int | None = None
    stopped: bool = False


class Worker:
    """Runs an engine on a thread of its own.

    Parameters
    ----------
    engine : Engine
    max_requests : int
        Those that run and wait together, at most.

    Attributes
    ----------
    counts : Counter
        Requests by how they ended, and tokens; the event loop's.
    on_failure : callable
        What the event loop calls when the thread has died of an error.
    """

    def __init__(self, engine: Engine, max_requests: int) -> None:
        self.engine, self.max_requests = engine, max_requests
        self.counts: Counter[str] = Counter()
        self.on_failure: Callable[[], None] = lambda: None
        self._open: set[Job] = set()
        self._looks: set[asyncio.Future[Any]] = set()
        self._inbox: SimpleQueue[tuple[Callable[..., None], Any]] = SimpleQueue()
        self._jobs: dict[int, Job] = {}  # the worker's: those that the engine knows
        self._thread = threading.Thread(target=self._run, name="engine")
        self._is_open = True
        self._ending = False  # the worker's

    # -- on the event loop
    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End all requests; may be called again."""
        self._is_open = False
        self._inbox.put((self._end, None))
        await asyncio.to_thread(self._thread.join)

    async def tokens(self, job: Job) -> AsyncIterator[tuple[int, str]]:
        """The tokens of a job as they come; leaving the loop early cancels it.

        Raises
        ------
        Busy
            There are too many requests, or the server shuts down.
        ValueError
            It can never fit.
        RuntimeError
            The model failed.
        """
        if len(self._open) >= self.max_requests:
            self.counts["refused"] += 1
            raise Busy("too many requests wait: try again later")
        if not self._is_open:
            raise Busy(SHUTTING_DOWN)
        self._open.add(job)
        self._inbox.put((self._add, job))
        outcome = "cancelled"
        try:
            while True:
                event = await job.events.get()
                if isinstance(event, Exception):
                    outcome = "refused" if isinstance(event, ValueError | Busy) else "failed"
                    raise event
                if event[1]:
                    outcome = event[1]
                yield event
                if event[1]:
                    return
        finally:
            self._open.discard(job)
            self.counts["stop" if job.stopped else outcome] += 1
            if outcome == "cancelled":
                self._inbox.put((self._cancel, job))

    async def look(self, at: Callable[[Engine], Any]) -> Any:
        """What a function says of the engine between two steps.

        Raises
        ------
        Busy
            The server shuts down.
        RuntimeError
            The function failed.
        """
        if not self._is_open:
            raise Busy(SHUTTING_DOWN)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._looks.add(answer)
        self._inbox.put((self._look, (at, answer)))
        try:
            return await answer
        finally:
            self._looks.discard(answer)

    def _deliver(self, events: list[tuple[Job, Any]]) -> None:
        for job, event in events:
            job.events.put_nowait(event)

    def _answer(self, answer: asyncio.Future[Any], result: Any) -> None:
        if answer.done():  # who asked has left
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _fail(self, failure: Exception) -> None:
        """Nobody waits for a thread that has died."""
        self._is_open = False
        self._deliver([(job, failure) for job in self._open])
        for answer in self._looks:
            self._answer(answer, failure)
        self.on_failure()

    # -- on the thread
    def _run(self) -> None:
        try:
            self._compute()
        except BaseException as error:
            self._post(self._fail, RuntimeError(f"the engine has died: {type(error).__name__}: {error}"))
            raise

    def _compute(self) -> None:
        while not self._ending:
            # It waits for a message while there is nothing to compute, and takes those that are there in any case.
            while not self._ending and (not self._jobs or not self._inbox.empty()):
                handle, message = self._inbox.get()
                handle(message)
            if self._jobs:
                self._step()

    def _step(self) -> None:
        try:
            events = [(self._jobs[made.request], (made.token, made.reason)) for made in self.engine.step()]
        except Exception as error:
            failure = RuntimeError(f"the model failed: {type(error).__name__}: {error}")
            events = [(job, failure) for job in self._jobs.values()]
            for request in self._jobs:
                self.engine.cancel(request)
        for job, event in events:
            if isinstance(event, Exception) or event[1]:
                del self._jobs[job.request]
        self._post(self._deliver, events)

    def _add(self, job: Job) -> None:
        try:
            job.request = self.engine.add(job.tokens, job.max_tokens, **job.sampling)
            self._jobs[job.request] = job
        except (TypeError, ValueError) as error:
            self._post(self._deliver, [(job, ValueError(str(error)))])
        except Exception as error:
            failure = RuntimeError(f"the engine cannot take it: {type(error).__name__}: {error}")
            self._post(self._deliver, [(job, failure)])

    def _cancel(self, job: Job) -> None:
        if self._jobs.pop(job.request, None):  # else it ended meanwhile, or never began
            self.engine.cancel(job.request)

    def _look(self, message: tuple[Callable[[Engine], Any], asyncio.Future[Any]]) -> None:
        at, answer = message
        try:
            result = at(self.engine)
        except Exception as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        self._post(self._answer, answer, result)

    def _end(self, _: None) -> None:
        for request in self._jobs:
            self.engine.cancel(request)
        self._ending = True
        ended = [(job, Busy(SHUTTING_DOWN)) for job in self._jobs.values()]
        self._jobs.clear()
        self._post(self._deliver, ended)

    def _post(self, function: Callable[..., Any], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)
