"""Limits on connections: those beyond a number are refused and closed, and so are silent ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .protocol import Refused

try:
    import resource
except ModuleNotFoundError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

LINGER = 1.0
SILENCE = 5.0  # seconds within which the head of a request must come
PROBE = 0.2  # seconds between checks whether a client that has closed its sending half is still there
OTHER_FILES = 64  # files that Python, the event loop and the model have open, and newly accepted connections


def room_for_connections(wanted: int) -> int:
    """The number of connections that the process may have, at most `wanted`; refusals may take as many files again.

    The limit of open files is raised as far as possible.
    """
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    files = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    except (OSError, ValueError):  # the true limit of macOS is below the one that it reports
        files = soft
    return max(1, min(wanted, (files - OTHER_FILES) // 2))


def closing(status: str, error: Refused) -> bytes:
    """Write an answer after which the connection is closed."""
    body = json.dumps(error.body())
    head = [f"HTTP/1.1 {status}", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in error.headers.items()]
    return "\r\n".join([*head, "", body]).encode()


class Refusal(asyncio.Protocol):
    """Refuses a connection at little cost: it sends an answer, and waits up to a second for the request.

    It closes after the first bytes of the request, since closing with unread bytes resets the connection and may lose
    the answer. If `most` refusals wait already, it closes at once.
    """

    def __init__(self, others: set[Refusal], most: int, retry_after: int) -> None:
        self._others, self._most, self._retry_after = others, most, retry_after

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        full = Refused(503, "too many connections: try again later", retry_after=self._retry_after)
        transport.write(closing("503 Service Unavailable", full))
        if len(self._others) >= self._most:
            transport.close()
            return
        self._others.add(self)
        asyncio.get_running_loop().call_later(LINGER, transport.close)

    def data_received(self, data: bytes) -> None:
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._others.discard(self)


class Connection(H11Protocol):
    """A connection of uvicorn that closes if no request comes, and stays open for a client that only reads.

    uvicorn itself waits forever for the head of a first request, and for a later one once a byte of it has come.

    A client may close its sending half and read on, which looks like one that has left. So the server sends "100
    Continue" now and then, which clients skip; the machine of a client that has left answers that with a reset.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._awaited_after: Any = None  # the last request before the one whose head is awaited
        self._only_listens = False
        self.loop.call_later(SILENCE, self._end_silence, None)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        last = self.cycle
        if last is not None and last.response_complete and last is not self._awaited_after:
            self._awaited_after = last
            self.loop.call_later(SILENCE, self._end_silence, last)

    def _end_silence(self, last: Any) -> None:
        if self.cycle is last:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        self._only_listens = self._is_answering()
        if self._only_listens:
            self._probe()
        return self._only_listens

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._only_listens and not self._is_answering():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self.transport.write(closing("400 Bad Request", Refused(400, msg)))
        self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _probe(self) -> None:
        if self.transport.is_closing():
            return
        # HTTP/1.0 has no such answer, so a client that speaks it is served to the end.
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1":
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
        self.loop.call_later(PROBE, self._probe)


class Newcomer(asyncio.Protocol):
    """A new connection, which becomes a Connection or a Refusal when it is made and the number is known."""

    def __init__(
        self, refusals: set[Refusal], most: int, retry_after: Callable[[], int], options: dict[str, Any]
    ) -> None:
        self._connections: set[Any] = options["server_state"].connections
        self._refusals, self._most, self._retry_after, self._options = refusals, most, retry_after, options

    def connection_made(self, transport: Any) -> None:
        protocol: asyncio.Protocol
        if len(self._connections) >= self._most:
            protocol = Refusal(self._refusals, self._most, self._retry_after())
        else:
            protocol = Connection(**self._options)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def at_most(num_connections: int, retry_after: Callable[[], int]) -> Any:
    """Make the protocol factory that uvicorn calls for each connection.

    Parameters
    ----------
    num_connections : int
    retry_after : callable
        Returns the seconds after which a refused client should try again.
    """
    refusals: set[Refusal] = set()

    def protocol(**options: Any) -> asyncio.Protocol:
        return Newcomer(refusals, num_connections, retry_after, options)

    return protocol
