"""How many connections there may be: those beyond are told so at once, and closed."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: text/plain\r\nContent-Length: 22\r\n\r\ntoo many connections.\n"
)
LINGER = 1.0


class Refusal(asyncio.Protocol):
    """Answers whatever comes, or will come within a second, and costs nothing else.

    It closes after the first bytes of the request: a connection that is closed with bytes unread is reset, and the
    answer may be lost on its way.
    """

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(FULL)
        asyncio.get_running_loop().call_later(LINGER, transport.close)

    def data_received(self, data: bytes) -> None:
        self._transport.close()


def at_most(num_connections: int) -> Any:
    """What uvicorn makes a protocol with, for each connection."""

    def protocol(config: Any, server_state: Any, **rest: Any) -> asyncio.Protocol:
        if len(server_state.connections) >= num_connections:
            return Refusal()
        return H11Protocol(config=config, server_state=server_state, **rest)

    return protocol
