"""How many connections there may be: those beyond are told so at once, and closed; so are those that say nothing."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    import resource
except ModuleNotFoundError:  # Windows, which has no such limit
    resource = None

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: text/plain\r\nContent-Length: 22\r\n\r\ntoo many connections.\n"
)
LINGER = 1.0
SILENCE = 5.0  # seconds until the head of a request has come
OTHER_FILES = 64  # what Python, the event loop and the model have open, and connections that were just accepted


def room_for_connections(wanted: int) -> int:
    """As many as are wanted, unless the process may not have so many files open: half of those are for refusals.

    The limit of the process is raised as far as it may be.
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
    except (OSError, ValueError):  # macOS has a limit below the one that it tells
        files = soft
    return max(1, min(wanted, (files - OTHER_FILES) // 2))


class Refusal(asyncio.Protocol):
    """Answers whatever comes, or will come within a second, and costs nothing else.

    It closes after the first bytes of the request: a connection that is closed with bytes unread is reset, and the
    answer may be lost on its way. Where as many wait for theirs already, it closes at once.
    """

    def __init__(self, others: set["Refusal"], most: int) -> None:
        self._others, self._most = others, most

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(FULL)
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
    """uvicorn's, which is closed unless the head of a request comes.

    uvicorn waits for the first one for ever, and for a later one as soon as a byte of it is there.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._awaited_after: Any = None  # the last request before the one whose head is awaited
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


class Newcomer(asyncio.Protocol):
    """Becomes a connection, or its refusal: only now, for several come between two looks at how many there are."""

    def __init__(self, connections: set[Any], refusals: set[Refusal], most: int, options: dict[str, Any]) -> None:
        self._connections, self._refusals, self._most, self._options = connections, refusals, most, options

    def connection_made(self, transport: Any) -> None:
        protocol: asyncio.Protocol
        if len(self._connections) >= self._most:
            protocol = Refusal(self._refusals, self._most)
        else:
            protocol = Connection(**self._options)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def at_most(num_connections: int) -> Any:
    """What uvicorn makes a protocol with, for each connection."""
    refusals: set[Refusal] = set()

    def protocol(**options: Any) -> asyncio.Protocol:
        return Newcomer(options["server_state"].connections, refusals, num_connections, options)

    return protocol
