"""The worker: a thread that alone touches the engine, and for which the event loop never waits.

It gets messages through a queue, and sends results to the event loop once for each step. Admission bounds the number of
requests, and so the length of the queue.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from .admission import Busy
from .logprobs import Scored, Scores

SHUTTING_DOWN = "the server is shutting down"


class Stops:
    """Holds text back as long as it may be the beginning of a stop text."""

    def __init__(self, stops: list[str]) -> None:
        self._stops, self._held, self.found = stops, "", False

    def push(self, text: str, *, may_stop: bool = True, final: bool = False) -> str:
        """Add text, and return what can be sent; nothing after the end. ``may_stop=False`` finds no end."""
        if self.found:
            return ""
        num_held, self._held = len(self._held), self._held + text
        # A stop within held text was not allowed to end the text.
        found = (self._held.find(stop, max(0, num_held - len(stop) + 1)) for stop in self._stops)
        if may_stop and (ends := [at for at in found if at >= 0]):
            out, self._held, self.found = self._held[: min(ends)], "", True
            return out
        longest = 0 if final else max((self._length_of_partial(stop) for stop in self._stops), default=0)
        cut = len(self._held) - longest
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _length_of_partial(self, stop: str) -> int:
        """How many characters at the end of the held text are the beginning of `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)


class Writer:
    """Converts the tokens of a request to text.

    Parameters
    ----------
    decoder
        Has `push(token)` and `finish()`, which return complete text.
    stops : list of str
        The text ends before the first of these.
    min_tokens : int
        A stop that is complete with so many tokens does not end the text.
    echo : str
        What the text begins with; no stop ends it.

    Attributes
    ----------
    num_tokens : int
        Tokens so far.
    """

    def __init__(self, decoder: Any, stops: list[str], min_tokens: int = 0, echo: str = "") -> None:
        self._decoder, self._stops, self._min_tokens, self._echo = decoder, Stops(stops), min_tokens, echo
        self.num_tokens = 0

    def push(self, token: int, reason: str) -> tuple[str, str]:
        """Add a token; return the text that is certain now, and why it ends. A token that ends the text adds none."""
        self.num_tokens += 1
        text = "" if reason == "stop" else self._decoder.push(token)
        if reason:
            text += self._decoder.finish()
        text = self._stops.push(text, may_stop=self.num_tokens > self._min_tokens, final=bool(reason))
        text, self._echo = self._echo + text, ""
        return text, "stop" if self._stops.found else reason


class Engine(Protocol):
    """The interface of engines: that of `pagedkv.integrations.transformers`, or one of your own.

    `add` raises ValueError for an option that the engine lacks, and the client gets its message.
    """

    cache: Any
    scheduler: Any

    def add(self, tokens: list[int], max_tokens: int, **options: Any) -> int: ...

    def abort(self, request: int) -> bool: ...

    def step(self) -> list[Any]: ...


class Piece(NamedTuple):
    """What a token adds to a text.

    Attributes
    ----------
    text : str
    reason : str
        Why the text ends; empty while it goes on.
    scored : sequence of Scored
        The tokens with their log-probabilities, if they are wanted.
    prompt_logprobs : list or None
        With the first token, what the answer has for `prompt_logprobs`.
    """

    text: str
    reason: str
    scored: Sequence[Scored] = ()
    prompt_logprobs: list[Any] | None = None


@dataclass(eq=False)
class Job:
    """A text of a request: what to compute, and the queue in which the texts of the request come back.

    Attributes
    ----------
    tokens, max_tokens, options
        Arguments of `Engine.add`; of no tokens the engine makes one, which is thrown away.
    writer : Writer
        Makes the text, on the worker's thread.
    scores : Scores or None
        Makes its log-probabilities there.
    index : int
        The number of the text among those of its request.
    is_first : bool
        Whether it is the first text of its prompt, which is counted once.
    pieces : asyncio.Queue
        Gets a (job, Piece) for each token, or (job, the exception that ended the request).
    request : int
        The engine's number for it, which only the worker uses; -1 before it has one.
    num_cached, num_new : int
        Tokens of the prompt that the prefix cache had, and tokens generated.
    """

    tokens: list[int]
    max_tokens: int
    options: dict[str, Any]
    writer: Writer
    scores: Scores | None
    index: int
    is_first: bool
    pieces: asyncio.Queue[Any]
    request: int = -1
    num_cached: int = 0
    num_new: int = 0

    def piece(self, sampled: Any) -> Piece | Exception:
        """Convert a token to what it adds to the text, or to the exception that ends the request."""
        if sampled.reason == "error":
            return RuntimeError(f"the model failed: {sampled.message}")
        self.num_cached = sampled.num_cached
        try:
            made = Piece(*self._text(sampled))
            return made if self.scores is None else self._with_logprobs(made, sampled, self.scores)
        except Exception as error:  # a tokenizer may raise anything
            return RuntimeError(f"the text cannot be decoded: {type(error).__name__}: {error}")

    def _text(self, sampled: Any) -> tuple[str, str]:
        if not self.max_tokens:
            return self.writer.push(sampled.token, "stop")[0], "length"
        self.num_new += 1
        return self.writer.push(sampled.token, sampled.reason)

    def _with_logprobs(self, made: Piece, sampled: Any, scores: Scores) -> Piece:
        scored: list[Scored] = []
        of_prompt = None
        if sampled.prompt_logprobs is not None:
            scored += scores.prompt(sampled.prompt_logprobs)
            of_prompt = scores.of_prompt(sampled.prompt_logprobs)
        if self.max_tokens and sampled.logprob is not None:
            scored.append(scores.token(sampled.token, sampled.logprob, sampled.top_logprobs))
        return made._replace(scored=scored, prompt_logprobs=of_prompt)


def counts(jobs: Sequence[Job]) -> tuple[int, int, int]:
    """The tokens of the prompts of jobs, those of them that the prefix cache had, and generated ones."""
    firsts = [job for job in jobs if job.is_first]
    num_prompt, num_cached = sum(len(job.tokens) for job in firsts), sum(job.num_cached for job in firsts)
    return num_prompt, num_cached, sum(job.num_new for job in jobs)


class Worker:
    """Runs an engine on a thread of its own.

    Parameters
    ----------
    engine : Engine

    Attributes
    ----------
    is_open : bool
        Whether it takes requests.
    on_failure : callable
        Called on the event loop if the thread dies of an error.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.on_failure: Callable[[], None] = lambda: None
        self._open: set[Job] = set()
        self._looks: set[asyncio.Future[Any]] = set()
        self._inbox: SimpleQueue[tuple[Callable[..., None], Any]] = SimpleQueue()
        self._jobs: dict[int, Job] = {}  # jobs in the engine; only the worker uses this
        self._thread = threading.Thread(target=self._run, name="engine")
        self.is_open = True
        self._ending = False  # only the worker uses this

    # -- on the event loop
    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End all requests; may be called again."""
        self.is_open = False
        self._inbox.put((self._end, None))
        await asyncio.to_thread(self._thread.join)

    async def pieces(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Piece]]:
        """Yield the texts of jobs token by token, each with the number of the text.

        The jobs share their queue. Leaving the loop early aborts those that have not ended, as does an error of one.

        Raises
        ------
        Busy
            The server shuts down.
        ValueError
            The request can never fit.
        RuntimeError
            The model failed.
        """
        if not self.is_open:
            raise Busy(SHUTTING_DOWN, 1)
        self._open.update(jobs)
        left = {*jobs}
        for job in jobs:
            self._inbox.put((self._add, job))
        try:
            while left:
                job, piece = await jobs[0].pieces.get()
                if isinstance(piece, Exception):
                    left.discard(job)
                    raise piece
                if piece.reason:
                    left.discard(job)
                yield job.index, piece
        finally:
            self._open.difference_update(jobs)
            for job in left:
                self._inbox.put((self._abort, job))

    async def look(self, at: Callable[[Engine], Any]) -> Any:
        """Call a function with the engine between two steps, and return its result.

        Raises
        ------
        Busy
            The server shuts down.
        RuntimeError
            The function failed.
        """
        if not self.is_open:
            raise Busy(SHUTTING_DOWN, 1)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._looks.add(answer)
        self._inbox.put((self._look, (at, answer)))
        try:
            return await answer
        finally:
            self._looks.discard(answer)

    def _deliver(self, pieces: list[tuple[Job, Any]]) -> None:
        for job, piece in pieces:
            job.pieces.put_nowait((job, piece))

    def _answer(self, answer: asyncio.Future[Any], result: Any) -> None:
        if answer.done():  # the caller has left
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _fail(self, failure: Exception) -> None:
        """Deliver the error to all callers after the thread has died."""
        self.is_open = False
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
            # Wait for a message while there is nothing to compute; otherwise only handle those in the queue.
            while not self._ending and (not self._jobs or not self._inbox.empty()):
                handle, message = self._inbox.get()
                handle(message)
            if self._jobs:
                self._step()

    def _step(self) -> None:
        try:
            made = self.engine.step()
        except Exception as error:
            failure = RuntimeError(f"the model failed: {type(error).__name__}: {error}")
            pieces: list[tuple[Job, Any]] = [(job, failure) for job in self._jobs.values()]
            for request in self._jobs:
                self.engine.abort(request)
            self._jobs.clear()
        else:
            # A step that failed after it had chosen tokens returns them now, though their requests were ended.
            pieces = [self._piece(sampled) for sampled in made if sampled.request in self._jobs]
        self._post(self._deliver, pieces)

    def _piece(self, sampled: Any) -> tuple[Job, Any]:
        """Add a token to the text of its request, which may end it."""
        job = self._jobs[sampled.request]
        piece = job.piece(sampled)
        if isinstance(piece, Exception) or piece.reason:
            del self._jobs[sampled.request]
            if not sampled.reason:  # the engine does not know that the text has ended
                self.engine.abort(sampled.request)
        return job, piece

    def _add(self, job: Job) -> None:
        try:
            job.request = self.engine.add(job.tokens, max(1, job.max_tokens), **job.options)
            self._jobs[job.request] = job
        except (TypeError, ValueError, ImportError) as error:
            self._post(self._deliver, [(job, ValueError(str(error)))])
        except Exception as error:
            failure = RuntimeError(f"the engine cannot take it: {type(error).__name__}: {error}")
            self._post(self._deliver, [(job, failure)])

    def _abort(self, job: Job) -> None:
        if job.request in self._jobs:  # otherwise it has ended, or never began
            del self._jobs[job.request]
            self.engine.abort(job.request)

    def _look(self, message: tuple[Callable[[Engine], Any], asyncio.Future[Any]]) -> None:
        at, answer = message
        try:
            result = at(self.engine)
        except Exception as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        self._post(self._answer, answer, result)

    def _end(self, _: None) -> None:
        for request in self._jobs:
            self.engine.abort(request)
        self._ending = True
        ended = [(job, Busy(SHUTTING_DOWN, 1)) for job in self._jobs.values()]
        self._jobs.clear()
        self._post(self._deliver, ended)

    def _post(self, function: Callable[..., Any], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)
