"""The ASGI application: routes, limits, and how tokens leave."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from .protocol import Refused, Shape, Stops, Wanted, parse, usage
from .status import PAGE, metrics, pool
from .worker import Busy, Engine, Job, Worker

# A body past the limit is read on and thrown away, so that its sender gets to read the answer: up to so many times it.
PATIENCE = 32


T = TypeVar("T")


class Gone(Exception):
    """The client has left before there was an answer."""


def refusal(error: Refused) -> Response:
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return JSONResponse(error.body(), error.status, headers)


class Server:
    """What the routes share.

    Parameters
    ----------
    worker : Worker
    text : SmallText or TransformersText
    model : str
        What it is called.
    context : int
        Tokens of a prompt and its text together.
    max_body : int
        Bytes of a request.
    """

    def __init__(self, worker: Worker, text: Any, model: str, context: int, max_body: int) -> None:
        self.worker, self.text, self.model, self.context, self.max_body = worker, text, model, context, max_body

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", partial(self.complete, chat=False), methods=["POST"]),
                Route("/v1/chat/completions", partial(self.complete, chat=True), methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                Route("/status/pool", self.pool),
                Route("/", self.page),
            ],
            # A page of another site must not get here by a name of its own for 127.0.0.1.
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.worker.start()
        yield
        await self.worker.stop()

    # -- texts
    async def complete(self, request: Request, chat: bool) -> Response:
        try:
            wanted = parse(await self._body(request), chat=chat, num_tokens=self.text.num_tokens)
            job = await asyncio.to_thread(self._job, wanted, chat)
            shape = Shape(self.model, chat=chat, stream=wanted.stream)
            pieces = self._pieces(job, wanted.stop)
            if not wanted.stream:
                return JSONResponse(await _unless_gone(request, self._whole(pieces, job, shape)))
            events = self._stream(pieces, job, wanted, shape)
            first = await _unless_gone(request, anext(events))  # what refuses the request comes before the headers
        except Refused as error:
            return refusal(error)
        except (Gone, ClientDisconnect):
            return Response(status_code=499)
        return StreamingResponse(_sent(first, events), media_type="text/event-stream")

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size <= self.max_body:
                parts.append(part)
            elif size > PATIENCE * self.max_body:
                break
        if size > self.max_body:
            raise Refused(413, f"the body must be of at most {self.max_body} bytes")
        return b"".join(parts)

    def _job(self, wanted: Wanted, chat: bool) -> Job:
        """Prompts become tokens here, on a thread: long ones take a while."""
        prompt = wanted.prompt
        try:
            if chat:
                prompt = self.text.encode_chat(prompt)
            elif isinstance(prompt, str):
                prompt = self.text.encode(prompt)
        except Exception as error:  # a model's chat template is a program, and raises what it likes
            raise Refused(400, f"the prompt cannot be encoded: {error}", "prompt") from None
        # The last token of a text is not computed, and needs no room.
        return Job(prompt, wanted.max_tokens or max(1, self.context + 1 - len(prompt)), wanted.sampling)

    async def _pieces(self, job: Job, stop: list[str]) -> AsyncIterator[tuple[str, str]]:
        """Text as it comes, and why it ended with the last piece."""
        decoder, stops = self.text.decoder(), Stops(stop)
        try:
            async with contextlib.aclosing(self.worker.tokens(job)) as tokens:
                async for token, reason in tokens:
                    self.worker.counts["tokens"] += 1
                    # A token that ends the text is not in it.
                    piece = stops.push("" if reason == "stop" else decoder.push(token))
                    if reason and not stops.found:
                        piece += stops.push(decoder.finish(), final=True)
                    job.stopped = stops.found
                    reason = "stop" if stops.found else reason
                    yield piece, reason
                    if reason:
                        return
        except Busy as error:
            raise Refused(503, str(error)) from None
        except ValueError as error:
            raise Refused(400, str(error), "prompt") from None
        except RuntimeError as error:
            raise Refused(500, str(error)) from None

    async def _whole(self, pieces: AsyncIterator[tuple[str, str]], job: Job, shape: Shape) -> dict[str, Any]:
        parts = [piece async for piece in pieces]
        return shape("".join(text for text, _ in parts), parts[-1][1], usage(len(job.tokens), len(parts)))

    async def _stream(
        self, pieces: AsyncIterator[tuple[str, str]], job: Job, wanted: Wanted, shape: Shape
    ) -> AsyncIterator[str]:
        count = 0
        async with contextlib.aclosing(pieces):
            async for text, reason in pieces:
                count += 1
                if text or reason or count == 1:
                    yield _event(shape(text, reason or None))
        if wanted.include_usage:
            yield _event(shape.usage(usage(len(job.tokens), count)))
        yield "data: [DONE]\n\n"

    # -- the server itself
    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "pagedkv"}]})

    async def metrics(self, request: Request) -> Response:
        def answer(text: str) -> Response:
            return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

        return await self._seen(lambda engine: metrics(engine, self.worker.counts), answer)

    async def pool(self, request: Request) -> Response:
        return await self._seen(pool, JSONResponse)

    async def _seen(self, at: Callable[[Engine], Any], answer: Callable[[Any], Response]) -> Response:
        try:
            return answer(await self.worker.look(at))
        except Busy as error:
            return refusal(Refused(503, str(error)))
        except RuntimeError as error:
            return refusal(Refused(500, str(error)))

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE)


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


async def _sent(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events in order; an error in the middle of them is the last one. A client that leaves closes `rest`."""
    async with contextlib.aclosing(rest):
        yield first
        try:
            async for event in rest:
                yield event
        except Refused as error:
            yield _event(error.body())


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What some work comes to; it is cancelled if the client leaves before."""
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
