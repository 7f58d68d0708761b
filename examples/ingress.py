"""What stands in front of the replicas of examples/replicas.py: an ingress, and a router that picks one for a request.

The ingress reads a request and calls a replica with its text; the router goes by that text; the replica gives the
request to the server's ASGI application, whose messages the ingress passes on as they come.
"""

from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response

# The class needs no vLLM, but its public place, `ray.serve.llm.request_router`, refuses to be imported without.
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (  # isort: skip
    PrefixCacheAffinityRouter,
)

from pagedkv.server.protocol import Refused
from pagedkv.server.visits import refusal
from replica import beginning

# What the server reads of a scope. Ray's has more, which cannot be sent to another process.
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")
PAGES = {"/", "/metrics", "/status/pool"}


class PrefixRouter(PrefixCacheAffinityRouter):
    """Ray's router by prefixes of texts, mended: where there are several ingresses, it may lose a request for ever."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        try:
            return await super().choose_replicas(candidate_replicas, pending_request)
        except KeyError:  # it has chosen a replica that only the router of another ingress knows yet
            return [candidate_replicas]


class Ingress:
    """Reads requests, and passes the answers of replicas on.

    Parameters
    ----------
    replicas
        Ray's handle of the replicas.
    max_body : int
        Bytes of a request.
    """

    def __init__(self, replicas: Any, max_body: int) -> None:
        self._answer, self._max_body = replicas.options(stream=True).answer, max_body

    async def __call__(self, request: Request) -> Response:
        if (path := request.url.path) in PAGES:
            return refusal(Refused(404, f"{path} is a page of one server, and there are several here"))
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body:  # the replica refuses it
                break
        text = beginning(body)
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        messages = self._answer.remote(*([text] if text else []), scope=scope, body=bytes(body))
        try:
            head = await anext(messages)
        except BackPressureError as error:
            return refusal(Refused(503, f"too many requests wait: {error}", retry_after=1))
        except (RayError, DeploymentUnavailableError) as error:
            return refusal(Refused(500, f"the replica failed: {type(error).__name__}"))
        return Passed(head, messages)


class Passed(Response):
    """An answer that is passed on as it comes; Ray cancels it when the client leaves, and the replica's with it."""

    def __init__(self, head: dict[str, Any], rest: AsyncIterator[dict[str, Any]]) -> None:
        self._head, self._rest = head, rest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send(self._head)
        async for message in self._rest:
            await send(message)
