"""The ASGI application: routes, limits and responses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from .. import __version__
from .admission import Admission, Busy
from .answers import Answer, event
from .logprobs import Decoder, Scores, token_text
from .protocol import Prompt, Refused, Wanted, parse, parse_detokenize, parse_tokenize, too_long
from .status import PAGE, metrics, pool
from .visits import Visit, Visits, refusal
from .worker import Engine, Job, Piece, Worker, Writer, counts

# A body past the limit is read and discarded up to so many times the limit, so that its sender can read the answer.
PATIENCE = 32

T = TypeVar("T")


class Gone(Exception):
    """Raised when the client has left before there was an answer."""


class Text(Protocol):
    """The interface of conversions between text and tokens; what raises ValueError is refused with its message."""

    num_tokens: int  # in the vocabulary

    def encode(self, prompt: str, *, add_special_tokens: bool) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[int]]:
        """The tokens of messages, with variables of the template; and from which lengths a later turn may go on."""

    def decode(self, tokens: list[int]) -> str: ...

    def decoder(self) -> Decoder: ...


class Server:
    """The server: its routes and what they share.

    Parameters
    ----------
    worker : Worker
    admission : Admission
    text : Text
    model : str
        The name of the model.
    context : int
        Tokens of a prompt and its text together, but for the last one: as many as the model and its pool have room for.
    max_body : int
        Bytes of a request.
    names : iterable of str
        Host names by which clients may reach it.
    key : str or None
        What clients have to send.

    Attributes
    ----------
    counts : Counter
        How many requests ended for each reason, and how many tokens were sent.
    """

    def __init__(
        self,
        worker: Worker,
        admission: Admission,
        text: Text,
        model: str,
        *,
        context: int,
        max_body: int,
        names: Iterable[str],
        key: str | None = None,
    ) -> None:
        self.worker, self.admission, self.text = worker, admission, text
        self._token_text = lru_cache(text.num_tokens)(partial(token_text, text.decode))
        self.context, self.max_body = context, max_body
        created = int(time.time())
        self.model: dict[str, Any] = {"id": model, "object": "model", "created": created, "owned_by": "pagedkv"}
        self._visits = Middleware(Visits, names=list(names), key=key)
        self.counts: Counter[str] = Counter()

    def app(self) -> Starlette:
        handlers: dict[Any, Any] = {Refused: _refused, Gone: _gone_away, HTTPException: _http_error, Exception: _error}
        return Starlette(
            routes=[
                Route("/v1/completions", partial(self.complete, chat=False), methods=["POST"]),
                Route("/v1/chat/completions", partial(self.complete, chat=True), methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.named),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/version", self.version),
                Route("/health", self.health),
                Route("/ping", self.health, methods=["GET", "POST"]),
                Route("/metrics", self.metrics),
                Route("/status/pool", self.pool),
                Route("/", self.page),
            ],
            middleware=[self._visits],
            exception_handlers=handlers,
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.worker.start()
        yield
        await self.worker.stop()

    # -- texts
    async def complete(self, request: Request, chat: bool) -> Response:
        visit: Visit = request.state.visit
        wanted = parse(await self._body(request), chat=chat, num_tokens=self.text.num_tokens)
        of_usage = {"include_usage": wanted.include_usage, "continuous_usage": wanted.continuous_usage}
        answer = Answer(self.model["id"], lambda: counts(visit.jobs), chat=chat, **of_usage)
        visit.id = answer.id
        pieces = self._pieces(wanted, visit)
        if not wanted.stream:
            return JSONResponse(await _unless_gone(request, _whole(pieces, answer)))
        events = _events(pieces, answer)
        first = await _unless_gone(request, anext(events))  # a refusal must come before the headers
        return EventResponse(first, events)

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                if size <= self.max_body:
                    parts.append(part)
                elif size > PATIENCE * self.max_body:
                    break
        except ClientDisconnect:
            raise Gone from None
        if size > self.max_body:
            raise Refused(413, f"the body must be of at most {self.max_body} bytes")
        return b"".join(parts)

    async def _pieces(self, wanted: Wanted, visit: Visit) -> AsyncGenerator[tuple[int, Piece]]:
        """Yield pieces of the texts as they come, each with the number of its choice."""
        visit.reason = "aborted"
        try:
            most = min(wanted.max_tokens or self.context, self.context)
            with self.admission.places(len(wanted.prompts) * wanted.n, most) as places:
                # Encode on a thread: long prompts take a while, and a chat template is a program.
                visit.jobs = await asyncio.to_thread(self._jobs, wanted)
                ended = 0
                async with contextlib.aclosing(self.worker.pieces(visit.jobs)) as pieces:
                    async for index, piece in pieces:
                        places[index].num_tokens += 1
                        self.counts["tokens"] += 1
                        ended += bool(piece.reason)
                        if ended == len(visit.jobs):
                            visit.reason = piece.reason
                        yield index, piece
        except Busy as error:
            visit.reason = "refused"
            raise Refused(503, str(error), retry_after=error.retry_after) from None
        except Refused:
            visit.reason = "refused"
            raise
        except ValueError as error:
            visit.reason = "refused"
            raise Refused(400, str(error)) from None
        except RuntimeError as error:
            visit.reason = "failed"
            raise Refused(500, str(error)) from None
        finally:
            self.counts[visit.reason] += 1

    def _jobs(self, wanted: Wanted) -> list[Job]:
        """What to compute for each choice."""
        jobs: list[Job] = []
        queue: asyncio.Queue[Any] = asyncio.Queue()
        for prompt in wanted.prompts:
            tokens, snapshot_at = self._encode(prompt)
            room = self.context + 1 - len(tokens)  # the last token of a text is not computed, and needs none
            max_tokens = max(1, room) if wanted.max_tokens is None else wanted.max_tokens
            if max(1, max_tokens) > room:
                parts = f"{len(tokens)} in the prompt, {max_tokens} in the completion"
                raise too_long(self.context, f"you requested {len(tokens) + max_tokens} tokens ({parts})")
            options = {**wanted.options, **_logprobs(wanted), "snapshot_at": snapshot_at}
            for choice in range(wanted.n):
                if wanted.options["seed"] is not None:
                    options = options | {"seed": wanted.options["seed"] + choice}
                writer = self._writer(wanted, prompt, tokens)
                scores = self._scores(wanted, prompt, tokens)
                jobs.append(Job(tokens, max_tokens, options, writer, scores, len(jobs), choice == 0, queue))
        return jobs

    def _writer(self, wanted: Wanted, prompt: Prompt, tokens: list[int]) -> Writer:
        decoder, echo = self.text.decoder(), ""
        if wanted.echo and isinstance(prompt.content, str):
            echo = prompt.content
        elif wanted.echo:
            echo = "".join(map(decoder.push, tokens))  # the text goes on from there, perhaps within a character
        stops = [] if wanted.max_tokens == 0 else wanted.stop  # what is left of the echo is no text that one ends
        return Writer(decoder, stops, wanted.options["min_tokens"], echo)

    def _scores(self, wanted: Wanted, prompt: Prompt, tokens: list[int]) -> Scores | None:
        if wanted.logprobs is None and wanted.prompt_logprobs is None:
            return None
        echoed = tokens if wanted.echo else []
        echo = prompt.content if wanted.echo and isinstance(prompt.content, str) else ""
        return Scores(self._token_text, self.text.decoder(), echoed, wanted.logprobs, wanted.prompt_logprobs, echo)

    def _encode(self, prompt: Prompt) -> tuple[list[int], list[int]]:
        """The tokens of a prompt, and the lengths from which a later one may go on."""
        content: Any = prompt.content
        try:
            if isinstance(content, str):
                return self.text.encode(content, **prompt.options), []
            if isinstance(content[0], int):
                return content, []
            return self.text.encode_chat(content, **prompt.options)
        except Refused:
            raise
        except Exception as error:  # a model's chat template may raise anything
            raise ValueError(f"the prompt cannot be encoded: {error}") from None

    async def tokenize(self, request: Request) -> Response:
        prompt = parse_tokenize(await self._body(request))
        try:
            tokens, _ = await asyncio.to_thread(self._encode, prompt)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        of_tokens = {"count": len(tokens), "max_model_len": self.context, "tokens": tokens, "token_strs": None}
        return JSONResponse(of_tokens)

    async def detokenize(self, request: Request) -> Response:
        tokens = parse_detokenize(await self._body(request), self.text.num_tokens)
        return JSONResponse({"prompt": await asyncio.to_thread(self.text.decode, tokens)})

    # -- the server itself
    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.model]})

    async def named(self, request: Request) -> Response:
        if request.path_params["name"] != self.model["id"]:
            raise Refused(404, f"the model here is {self.model['id']}", "model", code="model_not_found")
        return JSONResponse(self.model)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def health(self, request: Request) -> Response:
        if not self.worker.is_open:
            raise Refused(503, "no request is taken any more")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        text = await self._seen(lambda engine: metrics(engine, self.counts))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def pool(self, request: Request) -> Response:
        return JSONResponse(await self._seen(pool))

    async def _seen(self, at: Callable[[Engine], T]) -> T:
        try:
            return await self.worker.look(at)
        except Busy as error:
            raise Refused(503, str(error), retry_after=error.retry_after) from None
        except RuntimeError as error:
            raise Refused(500, str(error)) from None

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE)


def _logprobs(wanted: Wanted) -> dict[str, int]:
    """The options of `Engine.add` for the log-probabilities that an answer has."""
    of_prompt = [wanted.logprobs if wanted.echo else None, wanted.prompt_logprobs]
    options = {
        "logprobs": wanted.logprobs,
        "prompt_logprobs": max((one for one in of_prompt if one is not None), default=None),
    }
    return {name: value for name, value in options.items() if value is not None}


# -- answers
Pieces = AsyncGenerator[tuple[int, Piece]]


async def _whole(pieces: Pieces, answer: Answer) -> dict[str, Any]:
    choices: dict[int, list[Piece]] = {}
    async for index, piece in pieces:
        choices.setdefault(index, []).append(piece)
    return answer.whole([choices[index] for index in sorted(choices)])


async def _events(pieces: Pieces, answer: Answer) -> AsyncGenerator[str]:
    begun: set[int] = set()
    async with contextlib.aclosing(pieces):
        async for index, piece in pieces:
            if index not in begun:
                begun.add(index)
                yield answer.begin(index)
            if piece.text or piece.scored:
                yield answer.piece(index, piece)
            if piece.reason:
                yield answer.end(index, piece.reason)
    for last in answer.close():
        yield last


class EventResponse(StreamingResponse):
    """Sends events in order; an error in the middle becomes the last event.

    The source of the events is closed as soon as the client has left.
    """

    def __init__(self, first: str, rest: AsyncGenerator[str]) -> None:
        super().__init__(self._sent(first), media_type="text/event-stream")
        self._rest = rest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with contextlib.aclosing(self._rest):
            await super().__call__(scope, receive, send)

    async def _sent(self, first: str) -> AsyncIterator[str]:
        yield first
        try:
            async for one in self._rest:
                yield one
        except Refused as error:
            yield event(error.body())


# -- errors, all of them as JSON
async def _refused(request: Request, error: Refused) -> Response:
    return refusal(error)


async def _gone_away(request: Request, error: Gone) -> Response:
    return Response(status_code=499)


async def _http_error(request: Request, error: HTTPException) -> Response:
    headers = error.headers or {}
    remedy = "ask /v1/completions, /v1/chat/completions or /v1/models"
    if "Allow" in headers:
        remedy = f"send {headers['Allow']}"
    message = f"{request.method} {request.url.path[:80]}: {error.detail}: {remedy}"
    refused = refusal(Refused(error.status_code, message))
    refused.headers.update(headers)
    return refused


async def _error(request: Request, error: Exception) -> Response:
    return refusal(Refused(500, f"the server failed: {type(error).__name__}"))


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await some work, and cancel it if the client leaves first."""
    whole, gone = asyncio.ensure_future(_awaited(work)), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            raise Gone
        return await whole
    finally:
        for task in (whole, gone):
            task.cancel()
        await asyncio.gather(whole, gone, return_exceptions=True)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
