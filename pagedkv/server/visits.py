"""Visits: a check of the host name and a line of the log for each request."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import Response

from .protocol import Refused
from .worker import Job

LOG = logging.getLogger("pagedkv.serve")
POLLED = {"/health", "/metrics", "/status/pool"}  # polled routes, which are not logged
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(:[0-9]*)?")


@dataclass
class Visit:
    """The facts about a request that are logged; its text and the answer's never are.

    Attributes
    ----------
    id : str
        The id of the answer.
    job : Job or None
        None until the prompt is converted to tokens.
    status : int
        The HTTP status.
    reason : str
        Why the text ended.
    """

    id: str = "-"
    job: Job | None = None
    status: int = 500
    reason: str = "-"

    def line(self, client: str, route: str, seconds: float) -> str:
        job = self.job
        tokens = f"in={len(job.tokens)} cached={job.num_cached} out={job.num_new}" if job else "in=- cached=- out=-"
        return (
            f"id={self.id} client={client} route={route} status={self.status} {tokens} seconds={seconds:.3f} "
            f"reason={self.reason}"
        )


class Visits:
    """Middleware that refuses requests for unknown host names, and logs all requests.

    So a page of another site cannot reach the server through a name of its own for this machine (DNS rebinding).

    Parameters
    ----------
    app
        The ASGI application.
    names : iterable of str
        Host names without a port; "*" for any.
    """

    def __init__(self, app: Any, names: Iterable[str]) -> None:
        self._app, self._names = app, {name.lower().strip("[]") for name in names}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, visit = time.monotonic(), Visit()
        scope["state"]["visit"] = visit

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
            await send(message)

        try:
            app = self._app if self._is_named(Headers(scope=scope).get("host", "")) else refusal(STRANGER)
            await app(scope, receive, sent)
        finally:
            if scope["path"] not in POLLED:
                host, port = scope["client"] or ("-", 0)
                LOG.info(visit.line(f"{host}:{port}", quote(scope["path"])[:200], time.monotonic() - begun))

    def _is_named(self, host: str) -> bool:
        found = HOST.fullmatch(host.lower())
        return "*" in self._names or (found is not None and found[1].strip("[]") in self._names)


STRANGER = Refused(400, "this server has another name: start it with --allowed-host and the one in your address")


def refusal(error: Refused) -> Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    # In ASCII, since a quoted name may contain half a surrogate pair, which UTF-8 cannot encode.
    return Response(json.dumps(error.body()), error.status, headers, "application/json")
