"""Visits: a check of the host name and of the key, and a line of the log, for each request."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import Response

from .protocol import Refused
from .worker import Job, counts

LOG = logging.getLogger("pagedkv.serve")
POLLED = {"/health", "/ping", "/metrics", "/status/pool"}  # polled routes, which are not logged
OPEN = {"/health", "/ping"}  # routes that need no key
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(:[0-9]*)?")


@dataclass
class Visit:
    """The facts about a request that are logged; its text and the answer's never are.

    Attributes
    ----------
    id : str
        The id of the answer.
    jobs : list of Job
        One for each choice; empty until the prompts are converted to tokens.
    status : int
        The HTTP status.
    reason : str
        Why the last text ended.
    """

    id: str = "-"
    jobs: list[Job] = field(default_factory=list)
    status: int = 500
    reason: str = "-"

    def line(self, client: str, route: str, seconds: float) -> str:
        num_in, num_cached, num_out = counts(self.jobs) if self.jobs else "---"
        tokens = f"in={num_in} cached={num_cached} out={num_out}"
        return (
            f"id={self.id} client={client} route={route} status={self.status} {tokens} seconds={seconds:.3f} "
            f"reason={self.reason}"
        )


class Visits:
    """Middleware that refuses requests for unknown host names or without the key, and logs all requests.

    So a page of another site cannot reach the server through a name of its own for this machine (DNS rebinding).

    Parameters
    ----------
    app
        The ASGI application.
    names : iterable of str
        Host names without a port; "*" for any.
    key : str or None
        What clients have to send.
    """

    def __init__(self, app: Any, names: Iterable[str], key: str | None = None) -> None:
        self._app, self._names = app, {name.lower().strip("[]") for name in names}
        self._digest = None if key is None else _digest(key)

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
            headers, app = Headers(scope=scope), self._app
            if not self._is_named(headers.get("host", "")):
                app = refusal(STRANGER)
            elif scope["path"] not in OPEN and not self._has_key(headers.get("authorization", "")):
                app = refusal(LOCKED_OUT)
            await app(scope, receive, sent)
        finally:
            if scope["path"] not in POLLED:
                host, port = scope["client"] or ("-", 0)
                LOG.info(visit.line(f"{host}:{port}", quote(scope["path"])[:200], time.monotonic() - begun))

    def _is_named(self, host: str) -> bool:
        found = HOST.fullmatch(host.lower())
        return "*" in self._names or (found is not None and found[1].strip("[]") in self._names)

    def _has_key(self, authorization: str) -> bool:
        if self._digest is None:
            return True
        scheme, _, key = authorization.partition(" ")
        return scheme.lower() == "bearer" and compare_digest(_digest(key.strip()), self._digest)


def _digest(key: str) -> bytes:
    """Hash a key, so that the time of a comparison does not tell its length either."""
    return sha256(key.encode()).digest()


STRANGER = Refused(400, "this server has another name: start it with --allowed-host and the one in your address")
LOCKED_OUT = Refused(
    401, "the key is missing or wrong: send that of this server as Authorization: Bearer KEY", code="invalid_api_key"
)


def refusal(error: Refused) -> Response:
    # In ASCII, since a quoted name may contain half a surrogate pair, which UTF-8 cannot encode.
    return Response(json.dumps(error.body()), error.status, error.headers, "application/json")
